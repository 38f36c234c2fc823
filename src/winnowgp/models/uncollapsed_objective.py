"""An explicit q(u) as a function of the subset: each score is that of q's own marginal."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds import (
    masked_blocks,
    masked_marginal,
    subset_blocks,
    subset_marginal,
    uncollapsed_bound,
)
from winnowgp.models.kernel_blocks import KernelBlocks
from winnowgp.selection import RelaxedObjective
from winnowgp.typing import Masks, Nats, Weights


@final
@dataclass(frozen=True, slots=True)
class UncollapsedObjective(RelaxedObjective):
    """The uncollapsed bound of any subset, differentiable in all that the model holds.

    S subsets are one batch: O(S M³ + S P N M²) with M the size of the largest.
    """

    blocks: KernelBlocks
    q_mean: Float[Tensor, "K P"]
    q_factor: Float[Tensor, "P K K"]
    expected_log_prob: Callable[[Tensor, Tensor], Tensor]
    """From means and variances `[S B P]` to nats of each row and target."""
    scale: float
    """Rows that each row stands for."""

    @property
    def K(self) -> int:
        return self.blocks.Kuu.shape[0]

    def value(self, mask: Masks) -> Nats:
        Kuu, Kuf = subset_blocks(self.blocks.Kuu, self.blocks.Kuf, mask)
        q = subset_marginal(self.blocks.Kuu, self.q_mean, self.q_factor, mask=mask)
        return self._bound(Kuu, Kuf, q)

    def relaxed_value(self, weights: Weights) -> Nats:
        Kuu, Kuf = masked_blocks(self.blocks.Kuu, self.blocks.Kuf, weights)
        q = masked_marginal(self.blocks.Kuu, self.q_mean, self.q_factor, weights=weights)
        return self._bound(Kuu, Kuf, q)

    def _bound(self, Kuu: Tensor, Kuf: Tensor, q: tuple[Tensor, Tensor]) -> Nats:
        return uncollapsed_bound(
            Kuu,
            Kuf,
            kff=self.blocks.kff,
            q_mean=q[0],
            q_factor=q[1],
            expected_log_prob=self.expected_log_prob,
            scale=self.scale,
        )
