"""The paper's prior: few points, since predicting with M of them costs O(M²)."""

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
