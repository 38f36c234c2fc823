"""Gaussian regression as a function of the subset: each score straight from the kernel blocks."""

from dataclasses import dataclass
from typing import final

from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds import collapsed_bound, masked_bound, subset_blocks
from winnowgp.models.kernel_blocks import KernelBlocks
from winnowgp.selection import RelaxedObjective
from winnowgp.typing import Masks, Nats, Noise, Scalar, Weights


@final
@dataclass(frozen=True, slots=True)
class CollapsedObjective(RelaxedObjective):
    """The collapsed bound of any subset, differentiable in kernel, noise and locations.

    The kernel is evaluated once for all candidates; a batch of S subsets costs O(S N M²) with M the
    size of the largest.
    """

    blocks: KernelBlocks
    Y: Float[Tensor, "N P"]
    noise: Noise
    constant: Scalar | float = 0.0
    """Added to every value: `bounds.repetition` where rows count more than once."""

    @property
    def K(self) -> int:
        return self.blocks.Kuu.shape[0]

    def value(self, mask: Masks) -> Nats:
        Kuu, Kuf = subset_blocks(self.blocks.Kuu, self.blocks.Kuf, mask)
        nats = collapsed_bound(Kuu, Kuf, kff=self.blocks.kff, Y=self.Y, noise=self.noise)
        return nats + self.constant

    def relaxed_value(self, weights: Weights) -> Nats:
        nats = masked_bound(
            self.blocks.Kuu,
            self.blocks.Kuf,
            weights=weights,
            kff=self.blocks.kff,
            Y=self.Y,
            noise=self.noise,
        )
        return nats + self.constant
