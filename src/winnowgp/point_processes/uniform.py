"""No preference: every subset alike."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.point_processes.bernoulli import Bernoulli
from winnowgp.point_processes.cardinality import CardinalityPrior, checked_count
from winnowgp.typing import Scalar, SizeTable


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
