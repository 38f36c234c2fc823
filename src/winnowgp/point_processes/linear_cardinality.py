"""A constant price for each point."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.point_processes.bernoulli import Bernoulli
from winnowgp.point_processes.cardinality import (
    CardinalityPrior,
    checked_count,
    checked_strength,
)
from winnowgp.typing import Scalar, SizeTable


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
