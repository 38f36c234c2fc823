"""The variational process q(Z) of independent inclusions."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from winnowgp.errors import InputError
from winnowgp.typing import Mask, Masks, Nats, Scalar, SizeTable

# The number of points in a random subset: the Poisson binomial distribution, exactly.


def poisson_binomial(logits: Float[Tensor, " K"]) -> Float[Tensor, " K+1"]:
    """Distribution of `|Z| = Σ_k b_k` for independent `b_k ~ Bernoulli(λ_k)`, λ = sigmoid(logits).

    The generating function is `Π_k (1 − λ_k + λ_k t)`. Its coefficients are found by multiplying
    the factors in pairs, then the products in pairs, and so on: O(K²) operations in log₂ K
    vectorised steps, sums of positive terms throughout, so that small probabilities keep their
    relative accuracy (a Fourier transform would lose it). Differentiable in `logits`.

    >>> poisson_binomial(torch.zeros(2, dtype=torch.float64))
    tensor([0.2500, 0.5000, 0.2500], dtype=torch.float64)
    """
    return count_distribution(torch.sigmoid(-logits), torch.sigmoid(logits))


def count_distribution(off: Float[Tensor, " K"], on: Float[Tensor, " K"]) -> Float[Tensor, " K+1"]:
    """Coefficients of Π_k (off_k + on_k t); the two are probabilities that add to one."""
    K = on.shape[0]
    polynomials = torch.stack([off, on], dim=-1)
    # A factor of one (λ = 0) more on the right changes no count: pad to a power of two.
    missing = (1 << max(K - 1, 0).bit_length()) - K
    one = polynomials.new_tensor([[1.0, 0.0]]).expand(missing, 2)
    polynomials = torch.cat([polynomials, one])
    while polynomials.shape[0] > 1:
        polynomials = _products(polynomials[0::2], polynomials[1::2])
    return polynomials[0, : K + 1]


def _products(a: Float[Tensor, "n d"], b: Float[Tensor, "n d"]) -> Float[Tensor, "n e"]:
    """Row-wise polynomial products: `out_t = Σ_s a_s b_{t−s}`."""
    d = a.shape[1]
    windows = torch.nn.functional.pad(b, (d - 1, d - 1)).unfold(1, d, 1)
    return (windows @ a.flip(1)[:, :, None])[..., 0]


# The paper's variational process: each candidate is in or out, independently.


@dataclass(frozen=True, slots=True)
class Bernoulli:
    """Discrete Poisson process on K candidates, section 3.2 of the paper.

        q(Z) = Π_{k∈Z} λ_k Π_{k∉Z} (1 − λ_k),    λ = sigmoid(logits)

    Parametrised by logits, so that log λ and log(1 − λ) stay exact where λ itself would round
    to 0 or 1. A value: whoever improves the process owns the logits as a parameter.

    >>> q = Bernoulli(torch.tensor([2.0, -1.0, 0.0], dtype=torch.float64))
    >>> q.mode().tolist()
    [True, False, False]
    """

    logits: Float[Tensor, " K"]

    @classmethod
    def from_inclusion(cls, inclusion: Float[Tensor, " K"]) -> "Bernoulli":
        """The process with the given inclusion probabilities, each within [0, 1]."""
        if not ((inclusion >= 0) & (inclusion <= 1)).all():
            raise InputError("`inclusion` must lie within [0, 1]; did you mean Bernoulli(logits)?")
        return cls(torch.logit(inclusion))

    @property
    def K(self) -> int:
        """Number of candidates."""
        return self.logits.shape[0]

    @property
    def inclusion(self) -> Float[Tensor, " K"]:
        """λ, the probability that each candidate is included."""
        return torch.sigmoid(self.logits)

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Masks:
        """`n` independent subsets. The empty subset is as good a draw as any other."""
        logits = self.logits.detach()
        uniform = torch.rand(
            (n, self.K), generator=generator, dtype=logits.dtype, device=logits.device
        )
        # u < λ ⇔ logit u < logit λ; u = 0 can be drawn and must not include a point of λ = 0.
        return torch.logit(uniform) < logits

    def log_prob(self, mask: Masks) -> Nats:
        """log q(Z) of each subset: Σ_{k∈Z} log λ_k + Σ_{k∉Z} log(1 − λ_k)."""
        return torch.where(mask, logsigmoid(self.logits), logsigmoid(-self.logits)).sum(-1)

    def entropy(self) -> Scalar:
        """H(q) = −Σ_k [λ_k log λ_k + (1 − λ_k) log(1 − λ_k)], in nats (slip 1 of the text)."""
        # H = Σ p a + log(1 + e⁻ᵃ) with a = |logit| and p = sigmoid(−a) = min(λ, 1 − λ).
        a = self.logits.abs().clamp_max(_SATURATED)
        return (torch.sigmoid(-a) * a + torch.log1p(torch.exp(-a))).sum()

    def mean_count(self) -> Scalar:
        """E|Z| = Σ_k λ_k."""
        return self.inclusion.sum()

    def variance_count(self) -> Scalar:
        """Var|Z| = Σ_k λ_k (1 − λ_k)."""
        return (self.inclusion * torch.sigmoid(-self.logits)).sum()

    def count_probs(self) -> SizeTable:
        """P(|Z| = m) for m = 0..K, exactly; O(K²)."""
        return poisson_binomial(self.logits)

    def mode(self) -> Mask:
        """The most probable subset: every candidate with λ_k > ½."""
        return self.logits > 0

    def prune(self, keep: Mask) -> "Bernoulli":
        """The same process on the candidates that stay."""
        return Bernoulli(self.logits[keep])


# Beyond this |logit| a candidate's entropy is below 1e-300 nats; the clamp keeps 0 · ∞ out.
_SATURATED = 700.0
