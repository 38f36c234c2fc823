"""Priors p(Z) that depend on the number of inducing points, and KL[q ‖ p]."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.point_processes.bernoulli import Bernoulli, PointProcess, count_distribution
from winnowgp.typing import Masks, Nats, Scalar, SizeTable


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
    def expected_log_weight(self, q: PointProcess) -> Scalar:
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
            f"`alpha` must be a positive number; got {alpha}. Larger values select fewer inducing "
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

    def expected_log_weight(self, q: PointProcess) -> Scalar:
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

    def expected_log_weight(self, q: PointProcess) -> Scalar:
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

    def expected_log_weight(self, q: PointProcess) -> Scalar:
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

    def expected_log_weight(self, q: PointProcess) -> Scalar:
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
