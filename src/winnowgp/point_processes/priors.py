"""Priors p(Z) that depend on the number of points alone."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.point_processes.bernoulli import Bernoulli, count_distribution
from winnowgp.typing import Masks, Nats, Scalar, SizeTable

# Priors on subsets that look only at how many points there are.


class CardinalityPrior(ABC):
    """p(Z) = C · exp(w(|Z|)) over all 2^K subsets, the empty one included.

    A leaf gives the log weights w(0..K) and, in closed form, their expectation under q.
    """

    K: int
    """Number of candidates."""

    @abstractmethod
    def log_weights(self, like: Tensor) -> SizeTable:
        """w(m) for m = 0..K, of one subset of each size, in the dtype and device of `like`."""

    @abstractmethod
    def expected_log_weight(self, q: Bernoulli) -> Scalar:
        """E_q[w(|Z|)], exactly and differentiably."""

    @abstractmethod
    def expected_slope(self, q: Bernoulli) -> Float[Tensor, " K"]:
        """E_q[w(|Z₋ₖ| + 1) − w(|Z₋ₖ|)] for every k, Z₋ₖ the subset without it.

        The derivative of E_q[w(|Z|)] with respect to λ_k.
        """

    @final
    def log_normaliser(self, like: Tensor) -> Scalar:
        """−log C = log Σ_m binom(K, m) exp(w(m)), as a log-sum-exp (slip 2 of the text)."""
        m = torch.arange(self.K + 1, dtype=like.dtype, device=like.device)
        log_binomial = (
            torch.lgamma(torch.full_like(m, self.K + 1.0))
            - torch.lgamma(m + 1)
            - torch.lgamma(self.K - m + 1)
        )
        return torch.logsumexp(log_binomial + self.log_weights(like), dim=0)

    @final
    def log_prob(self, mask: Masks, like: Tensor) -> Nats:
        """log p(Z) of each subset."""
        return self.log_weights(like)[mask.sum(-1)] - self.log_normaliser(like)


def checked_count(K: int) -> int:
    """`K` if it is a number of candidates."""
    if K < 0:
        raise InputError(f"`K` must be the number of candidates, zero or more; got {K}.")
    return K


def checked_strength(alpha: float) -> float:
    """`alpha` if it is a positive, finite strength."""
    if not 0 < alpha < float("inf"):
        raise InputError(
            f"`alpha` must be a positive number; got {alpha}. Larger values keep fewer points."
        )
    return float(alpha)


# No preference: every subset alike.


@final
@dataclass(frozen=True)
class Uniform(CardinalityPrior):
    """p(Z) = 2^−K."""

    K: int

    def __post_init__(self) -> None:
        checked_count(self.K)

    def log_weights(self, like: Tensor) -> SizeTable:
        return torch.zeros(self.K + 1, dtype=like.dtype, device=like.device)

    def expected_log_weight(self, q: Bernoulli) -> Scalar:
        """Nothing to expect: zero."""
        return q.logits.new_zeros(())

    def expected_slope(self, q: Bernoulli) -> Float[Tensor, " K"]:
        """Zero for every k."""
        return torch.zeros_like(q.logits)


# A constant price for each point.


@final
@dataclass(frozen=True)
class LinearCardinality(CardinalityPrior):
    """p_α(Z) = C · exp(−α |Z|): K independent points of λ = sigmoid(−α)."""

    K: int
    alpha: float

    def __post_init__(self) -> None:
        checked_count(self.K)
        checked_strength(self.alpha)

    def log_weights(self, like: Tensor) -> SizeTable:
        return -self.alpha * torch.arange(self.K + 1, dtype=like.dtype, device=like.device)

    def expected_log_weight(self, q: Bernoulli) -> Scalar:
        """−α E|Z|, O(K)."""
        return -self.alpha * q.mean_count()

    def expected_slope(self, q: Bernoulli) -> Float[Tensor, " K"]:
        """−α for every k."""
        return torch.full_like(q.logits, -self.alpha)


# The paper's prior: few points, since predicting with M of them costs O(M²).


@final
@dataclass(frozen=True)
class SquaredCardinality(CardinalityPrior):
    """p_α(Z) = C · exp(−α |Z|²)."""

    K: int
    alpha: float

    def __post_init__(self) -> None:
        checked_count(self.K)
        checked_strength(self.alpha)

    def log_weights(self, like: Tensor) -> SizeTable:
        return -self.alpha * torch.arange(self.K + 1, dtype=like.dtype, device=like.device) ** 2

    def expected_log_weight(self, q: Bernoulli) -> Scalar:
        """−α E|Z|² = −α (Var|Z| + (E|Z|)²), O(K)."""
        return -self.alpha * (q.variance_count() + q.mean_count() ** 2)

    def expected_slope(self, q: Bernoulli) -> Float[Tensor, " K"]:
        """−α (1 + 2 Σ_{j≠k} λ_j), O(K)."""
        return -self.alpha * (1 + 2 * (q.mean_count() - q.inclusion))


# Any price list: what a subset of each size costs, as a table.


@final
@dataclass(frozen=True, eq=False)
class Budget(CardinalityPrior):
    """p(Z) = C · exp(table[|Z|]) for a table of K + 1 log weights.

    −∞ forbids a size: a table that is 0 up to m and −∞ beyond is a hard budget of m points. Under
    a hard budget KL[q ‖ p] is infinite for every q that can exceed it.

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
        """Σ_m P(|Z| = m) table[m] through the exact distribution of the count, O(K²)."""
        probs, table = q.count_probs(), self.log_weights(q.logits)
        # 0 · (−∞) counts as 0: a size that cannot occur costs nothing, and has no gradient.
        return (probs * torch.where(probs > 0, table, 0.0)).sum()

    def expected_slope(self, q: Bernoulli) -> Float[Tensor, " K"]:
        """The derivative of the distribution of the count, against the table, O(K²)."""
        with torch.enable_grad():
            off, on = (torch.sigmoid(s * q.logits.detach()).requires_grad_(True) for s in (-1, 1))
            probs = count_distribution(off, on)
            # A size that cannot occur even with k switched is not paid for; −∞ · 0 would be NaN.
            forbidden = torch.finfo(q.logits.dtype).min / (4 * (self.K + 1))
            table = self.log_weights(q.logits).clamp_min(forbidden)
            d_off, d_on = torch.autograd.grad(probs @ table, (off, on))
        return d_on - d_off


# How far the variational process is from the prior.


def kl_divergence(q: Bernoulli, p: CardinalityPrior) -> Scalar:
    """KL[q(Z) ‖ p(Z)] = −H(q) − E_q[w(|Z|)] + log Σ_Z exp(w(|Z|)), in nats, in closed form.

    A true KL: non-negative, and zero when q = p. Equation 3 of the paper with slips 1 and 2 mended.

    >>> import torch
    >>> from winnowgp.point_processes import LinearCardinality
    >>> q = Bernoulli(torch.full((5,), -0.7, dtype=torch.float64))
    >>> round(abs(kl_divergence(q, LinearCardinality(5, 0.7)).item()), 12)
    0.0
    """
    if q.K != p.K:
        raise InputError(f"q has {q.K} candidates and p has {p.K}; build the prior with K={q.K}.")
    return p.log_normaliser(q.logits) - q.entropy() - p.expected_log_weight(q)
