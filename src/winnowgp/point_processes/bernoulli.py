"""Processes q(Z) over subsets of K candidates: the interface, and independent inclusion."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from winnowgp.errors import InputError
from winnowgp.typing import Mask, Masks, Nats, Scalar, SizeTable

# Beyond this |logit| a candidate's entropy is below 1e-300 nats; the clamp avoids 0 · ∞.
_SATURATED = 700.0


class PointProcess(ABC):
    """Interface of distributions q(Z) over all 2^K subsets of K candidates."""

    logits: Float[Tensor, " K"]
    """One parameter per candidate; larger values include it more often."""

    @property
    @abstractmethod
    def inclusion(self) -> Float[Tensor, " K"]:
        """Probability P(k ∈ Z) that each candidate is included."""

    @abstractmethod
    def pairwise_inclusion(self) -> Float[Tensor, "K K"]:
        """Return P(j ∈ Z and k ∈ Z) of every pair, and P(k ∈ Z) on the diagonal."""

    @abstractmethod
    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Masks:
        """Return `n` independent subsets, which may be empty."""

    @abstractmethod
    def log_prob(self, mask: Masks) -> Nats:
        """Return log q(Z) of each subset, in nats."""

    @abstractmethod
    def conditional_logits(self, mask: Masks) -> Float[Tensor, "S K"]:
        """Return logit q(k ∈ Z | Z₋ₖ) = log q(Z ∪ k) − log q(Z \\ k) of every candidate."""

    @abstractmethod
    def mean_count(self) -> Scalar:
        """Return E|Z|."""

    @abstractmethod
    def variance_count(self) -> Scalar:
        """Return Var|Z|."""

    @abstractmethod
    def count_probs(self) -> SizeTable:
        """Return P(|Z| = m) for m = 0..K, exactly."""

    @property
    def K(self) -> int:
        """Number of candidates."""
        return self.logits.shape[0]


@dataclass(frozen=True, slots=True)
class Bernoulli(PointProcess):
    """The paper's variational process: each of K candidates is included independently.

        q(Z) = Π_{k∈Z} λ_k Π_{k∉Z} (1 − λ_k),    λ = sigmoid(logits)

    This is the discrete Poisson point process of section 3.2 of the paper. It stores logits, so
    that log λ and log(1 − λ) stay exact where λ would round to 0 or 1. The object is immutable; an
    optimiser owns the logits as its parameter.

    >>> q = Bernoulli(torch.tensor([2.0, -1.0, 0.0], dtype=torch.float64))
    >>> q.mode().tolist()
    [True, False, False]
    """

    logits: Float[Tensor, " K"]

    @classmethod
    def from_inclusion(cls, inclusion: Float[Tensor, " K"]) -> "Bernoulli":
        """Return the process with the given inclusion probabilities, each within [0, 1]."""
        if not ((inclusion >= 0) & (inclusion <= 1)).all():
            raise InputError(
                f"`inclusion` must lie within [0, 1]; got values from {float(inclusion.min()):.3g} "
                f"to {float(inclusion.max()):.3g}. Pass logits to Bernoulli(logits) instead."
            )
        return cls(torch.logit(inclusion))

    @property
    def inclusion(self) -> Float[Tensor, " K"]:
        """λ, the probability that each candidate is included."""
        return torch.sigmoid(self.logits)

    def pairwise_inclusion(self) -> Float[Tensor, "K K"]:
        """Return λ_j λ_k of every pair, and λ_k on the diagonal."""
        inclusion = self.inclusion
        return (inclusion[:, None] * inclusion).diagonal_scatter(inclusion)

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Masks:
        """Return `n` independent subsets, which may be empty."""
        logits = self.logits.detach()
        uniform = torch.rand(
            (n, self.K), generator=generator, dtype=logits.dtype, device=logits.device
        )
        # u < λ ⇔ logit u < logit λ; u = 0 can be drawn and must not include a candidate of λ = 0.
        return torch.logit(uniform) < logits

    def log_prob(self, mask: Masks) -> Nats:
        """Return log q(Z) = Σ_{k∈Z} log λ_k + Σ_{k∉Z} log(1 − λ_k) of each subset, in nats."""
        return torch.where(mask, logsigmoid(self.logits), logsigmoid(-self.logits)).sum(-1)

    def conditional_logits(self, mask: Masks) -> Float[Tensor, "S K"]:
        """Return the logits, which do not depend on the other candidates."""
        return self.logits.expand(mask.shape)

    def entropy(self) -> Scalar:
        """Return H(q) = −Σ_k [λ_k log λ_k + (1 − λ_k) log(1 − λ_k)] in nats.

        This is H(λ) of equation 4 of the paper, which prints log λ_k instead of log(1 − λ_k).
        """
        # H = Σ p a + log(1 + e⁻ᵃ) with a = |logit| and p = sigmoid(−a) = min(λ, 1 − λ).
        a = self.logits.abs().clamp_max(_SATURATED)
        return (torch.sigmoid(-a) * a + torch.log1p(torch.exp(-a))).sum()

    def mean_count(self) -> Scalar:
        """Return E|Z| = Σ_k λ_k."""
        return self.inclusion.sum()

    def variance_count(self) -> Scalar:
        """Return Var|Z| = Σ_k λ_k (1 − λ_k)."""
        return (self.inclusion * torch.sigmoid(-self.logits)).sum()

    def count_probs(self) -> SizeTable:
        """Return P(|Z| = m) for m = 0..K, exactly; O(K²)."""
        return poisson_binomial(self.logits)

    def mode(self) -> Mask:
        """Return the most probable subset: every candidate with λ_k > ½."""
        return self.logits > 0

    def prune(self, keep: Mask) -> "Bernoulli":
        """Return the same process on the candidates of a mask."""
        return Bernoulli(self.logits[keep])


def poisson_binomial(logits: Float[Tensor, " K"]) -> Float[Tensor, " K+1"]:
    """Return the distribution of `|Z| = Σ_k b_k`, `b_k ~ Bernoulli(λ_k)`, λ = sigmoid(logits).

    The coefficients of the generating function `Π_k (1 − λ_k + λ_k t)` are computed by multiplying
    the factors in pairs, then the products in pairs, and so on: O(K²) operations in log₂ K
    vectorised steps. All sums are of positive terms, so that small probabilities keep their
    relative accuracy (a Fourier transform would lose it). Differentiable in `logits`.

    >>> poisson_binomial(torch.zeros(2, dtype=torch.float64))
    tensor([0.2500, 0.5000, 0.2500], dtype=torch.float64)
    """
    return count_distribution(torch.sigmoid(-logits), torch.sigmoid(logits))


def count_distribution(off: Float[Tensor, " K"], on: Float[Tensor, " K"]) -> Float[Tensor, " K+1"]:
    """Return the coefficients of Π_k (off_k + on_k t), where off_k + on_k = 1."""
    K = on.shape[0]
    polynomials = torch.stack([off, on], dim=-1)
    # Pad to a power of two with factors of one (λ = 0), which do not change the count.
    missing = (1 << max(K - 1, 0).bit_length()) - K
    one = polynomials.new_tensor([[1.0, 0.0]]).expand(missing, 2)
    polynomials = torch.cat([polynomials, one])
    while polynomials.shape[0] > 1:
        polynomials = _products(polynomials[0::2], polynomials[1::2])
    return polynomials[0, : K + 1]


def _products(a: Float[Tensor, "n d"], b: Float[Tensor, "n d"]) -> Float[Tensor, "n e"]:
    """Return the row-wise polynomial products `out_t = Σ_s a_s b_{t−s}`."""
    d = a.shape[1]
    windows = torch.nn.functional.pad(b, (d - 1, d - 1)).unfold(1, d, 1)
    return (windows @ a.flip(1)[:, :, None])[..., 0]
