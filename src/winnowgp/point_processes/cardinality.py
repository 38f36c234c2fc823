"""Priors on subsets that look only at how many points there are."""

from abc import ABC, abstractmethod
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.point_processes.bernoulli import Bernoulli
from winnowgp.typing import Masks, Nats, Scalar, SizeTable


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
