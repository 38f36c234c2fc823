"""Distributions over subsets of K candidates: priors p(Z), the process q(Z), and KL[q ‖ p]."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from winnowgp.errors import InputError
from winnowgp.typing import Mask, Masks, Nats, Scalar, SizeTable

__all__ = [
    "Bernoulli",
    "Budget",
    "CardinalityPrior",
    "LinearCardinality",
    "SquaredCardinality",
    "Uniform",
    "kl_divergence",
    "poisson_binomial",
]

# Beyond this |logit| a candidate's entropy is below 1e-300 nats; the clamp avoids 0 · ∞.
_SATURATED = 700.0


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


@dataclass(frozen=True, slots=True)
class Bernoulli:
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
    def K(self) -> int:
        """Number of candidates."""
        return self.logits.shape[0]

    @property
    def inclusion(self) -> Float[Tensor, " K"]:
        """λ, the probability that each candidate is included."""
        return torch.sigmoid(self.logits)

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


class CardinalityPrior(ABC):
    """Interface of priors p(Z) = C · exp(w(|Z|)) over all 2^K subsets, including the empty one.

    A subclass defines the log weights w(0..K) and, in closed form, their expectation under q.
    """

    K: int
    """Number of candidates."""

    @abstractmethod
    def log_weights(self, like: Tensor) -> SizeTable:
        """Return the log weight w(m) of a subset of each size m = 0..K, as a tensor like `like`."""

    @abstractmethod
    def expected_log_weight(self, q: Bernoulli) -> Scalar:
        """Return E_q[w(|Z|)], exactly and differentiably."""

    @abstractmethod
    def expected_slope(self, q: Bernoulli) -> Float[Tensor, " K"]:
        """Return E_q[w(|Z₋ₖ| + 1) − w(|Z₋ₖ|)] for every k, where Z₋ₖ is the subset without k.

        This is the derivative of E_q[w(|Z|)] with respect to λ_k.
        """

    @final
    def log_normaliser(self, like: Tensor) -> Scalar:
        """Return −log C = log Σ_{m=0}^{K} binom(K, m) exp(w(m)), as a log-sum-exp.

        The sum includes the empty subset, m = 0; section 3.2 of the paper starts it at 1.
        """
        m = torch.arange(self.K + 1, dtype=like.dtype, device=like.device)
        log_binomial = (
            torch.lgamma(torch.full_like(m, self.K + 1.0))
            - torch.lgamma(m + 1)
            - torch.lgamma(self.K - m + 1)
        )
        return torch.logsumexp(log_binomial + self.log_weights(like), dim=0)

    @final
    def log_prob(self, mask: Masks, like: Tensor) -> Nats:
        """Return log p(Z) of each subset, in nats."""
        return self.log_weights(like)[mask.sum(-1)] - self.log_normaliser(like)


def checked_count(K: int) -> int:
    """Return `K` after checking that it is a number of candidates."""
    if K < 0:
        raise InputError(f"`K`, the number of candidates, must be zero or more; got {K}.")
    return K


def checked_strength(alpha: float) -> float:
    """Return `alpha` after checking that it is positive and finite."""
    if not 0 < alpha < float("inf"):
        raise InputError(
            f"`alpha` must be a positive number; got {alpha}. Larger values keep fewer inducing "
            "points."
        )
    return float(alpha)


@final
@dataclass(frozen=True)
class Uniform(CardinalityPrior):
    """The uniform prior p(Z) = 2^−K over all subsets."""

    K: int

    def __post_init__(self) -> None:
        checked_count(self.K)

    def log_weights(self, like: Tensor) -> SizeTable:
        return torch.zeros(self.K + 1, dtype=like.dtype, device=like.device)

    def expected_log_weight(self, q: Bernoulli) -> Scalar:
        """Return zero."""
        return q.logits.new_zeros(())

    def expected_slope(self, q: Bernoulli) -> Float[Tensor, " K"]:
        """Return zero for every k."""
        return torch.zeros_like(q.logits)


@final
@dataclass(frozen=True)
class LinearCardinality(CardinalityPrior):
    """The prior p_α(Z) = C · exp(−α |Z|): K independent inclusions with λ = sigmoid(−α)."""

    K: int
    alpha: float

    def __post_init__(self) -> None:
        checked_count(self.K)
        checked_strength(self.alpha)

    def log_weights(self, like: Tensor) -> SizeTable:
        return -self.alpha * torch.arange(self.K + 1, dtype=like.dtype, device=like.device)

    def expected_log_weight(self, q: Bernoulli) -> Scalar:
        """Return −α E|Z|; O(K)."""
        return -self.alpha * q.mean_count()

    def expected_slope(self, q: Bernoulli) -> Float[Tensor, " K"]:
        """Return −α for every k."""
        return torch.full_like(q.logits, -self.alpha)


@final
@dataclass(frozen=True)
class SquaredCardinality(CardinalityPrior):
    """The paper's prior p_α(Z) = C · exp(−α |Z|²) (section 3.2).

    The penalty is quadratic since a prediction with M inducing points costs O(M²).
    """

    K: int
    alpha: float

    def __post_init__(self) -> None:
        checked_count(self.K)
        checked_strength(self.alpha)

    def log_weights(self, like: Tensor) -> SizeTable:
        return -self.alpha * torch.arange(self.K + 1, dtype=like.dtype, device=like.device) ** 2

    def expected_log_weight(self, q: Bernoulli) -> Scalar:
        """Return −α E|Z|² = −α (Var|Z| + (E|Z|)²); O(K)."""
        return -self.alpha * (q.variance_count() + q.mean_count() ** 2)

    def expected_slope(self, q: Bernoulli) -> Float[Tensor, " K"]:
        """Return −α (1 + 2 Σ_{j≠k} λ_j); O(K)."""
        return -self.alpha * (1 + 2 * (q.mean_count() - q.inclusion))


@final
@dataclass(frozen=True, eq=False)
class Budget(CardinalityPrior):
    """A prior p(Z) = C · exp(table[|Z|]) with any table of K + 1 log weights.

    −∞ forbids a size: a table that is 0 up to m and −∞ beyond is a hard budget of m inducing
    points. Under a hard budget KL[q ‖ p] is infinite for every q that can exceed it.

    >>> Budget(torch.tensor([0.0, -1.0, -4.0])).K
    2
    """

    table: SizeTable
    K: int = field(init=False)

    def __post_init__(self) -> None:
        bad = torch.isnan(self.table) | (self.table == float("inf"))
        if self.table.numel() == 0 or bad.any() or torch.isinf(self.table).all():
            raise InputError(
                "`table` must hold K + 1 log weights, each finite or -inf and at least one finite; "
                f"got {self.table.tolist()}."
            )
        object.__setattr__(self, "K", self.table.shape[0] - 1)

    def log_weights(self, like: Tensor) -> SizeTable:
        return self.table.to(like)

    def expected_log_weight(self, q: Bernoulli) -> Scalar:
        """Return Σ_m P(|Z| = m) table[m] from the exact distribution of the count; O(K²)."""
        probs, table = q.count_probs(), self.log_weights(q.logits)
        # 0 · (−∞) counts as 0: a size of probability zero adds nothing and has no gradient.
        return (probs * torch.where(probs > 0, table, 0.0)).sum()

    def expected_slope(self, q: Bernoulli) -> Float[Tensor, " K"]:
        """Return the derivative of the count distribution times the table; O(K²)."""
        with torch.enable_grad():
            off, on = (torch.sigmoid(s * q.logits.detach()).requires_grad_(True) for s in (-1, 1))
            probs = count_distribution(off, on)
            # Replace −∞ by a large finite penalty, since −∞ · 0 would be NaN.
            forbidden = torch.finfo(q.logits.dtype).min / (4 * (self.K + 1))
            table = self.log_weights(q.logits).clamp_min(forbidden)
            d_off, d_on = torch.autograd.grad(probs @ table, (off, on))
        return d_on - d_off


def kl_divergence(q: Bernoulli, p: CardinalityPrior) -> Scalar:
    """Return KL[q(Z) ‖ p(Z)] = −H(q) − E_q[w(|Z|)] + log Σ_Z exp(w(|Z|)) in nats, in closed form.

    Equation 4 of the paper, with the entropy of `Bernoulli.entropy` and the normaliser of
    `CardinalityPrior.log_normaliser`, so that it is non-negative and zero when q = p.

    >>> import torch
    >>> from winnowgp.point_processes import LinearCardinality
    >>> q = Bernoulli(torch.full((5,), -0.7, dtype=torch.float64))
    >>> round(abs(kl_divergence(q, LinearCardinality(5, 0.7)).item()), 12)
    0.0
    """
    if q.K != p.K:
        raise InputError(
            f"`p` must be a prior over the {q.K} candidates of `q`; got one over {p.K}. Build the "
            f"prior with K={q.K}."
        )
    return p.log_normaliser(q.logits) - q.entropy() - p.expected_log_weight(q)
