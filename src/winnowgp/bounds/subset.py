"""S subsets of different sizes as one batch of equally large blocks."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from winnowgp.typing import Masks


@dataclass(frozen=True, slots=True)
class Subset:
    """Where the points of S subsets stand in a padded batch as wide as the largest of them."""

    index: Int[Tensor, "S M"]
    """Candidates of each subset in their order, then padding."""
    present: Bool[Tensor, "S M"]
    """False where a place is padding."""

    @classmethod
    def of(cls, mask: Masks) -> "Subset":
        """The places of the candidates that each mask includes."""
        widest = int(mask.sum(-1).max()) if mask.numel() else 0
        index = torch.argsort(mask.int(), dim=-1, descending=True, stable=True)[:, :widest]
        return cls(index, torch.gather(mask, 1, index))

    def rows(self, A: Float[Tensor, "K C"]) -> Float[Tensor, "S M C"]:
        """Rows of `A` that belong to each subset, zero where a place is padding."""
        return A[self.index] * self.present[..., None]

    def square(self, A: Float[Tensor, "K K"]) -> Float[Tensor, "S M M"]:
        """Sub-matrices of `A`; padding is independent of everything and of average variance."""
        return self.block(A) + torch.diag_embed((~self.present) * A.diagonal().mean().detach())

    def block(self, A: Float[Tensor, "*G K K"]) -> Float[Tensor, "S *G M M"]:
        """Sub-matrices of one or several `A`, zero where a place is padding."""
        both = self.present[:, :, None] & self.present[:, None, :]
        blocks = A[..., self.index[:, :, None], self.index[:, None, :]] * both
        return blocks.movedim(-3, 0)


def subset_blocks(
    Kuu: Float[Tensor, "K K"], Kuf: Float[Tensor, "K N"], mask: Masks
) -> tuple[Float[Tensor, "S M M"], Float[Tensor, "S M N"]]:
    """Kernel blocks of S subsets of the candidates, padded to the largest of them.

    A padded place is an inducing value that is independent of the data, so any bound of the padded
    blocks is the bound of the subset. S · N · max|Z| numbers instead of S · N · K.
    """
    subset = Subset.of(mask)
    return subset.square(Kuu), subset.rows(Kuf)
