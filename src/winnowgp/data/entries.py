"""A table of which some entries may be missing."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from winnowgp.data.row_batches import RowBatches
from winnowgp.errors import InputError


@dataclass(frozen=True, slots=True)
class Entries:
    """N rows of P columns, NaN where an entry is missing.

    >>> entries = Entries.of(torch.tensor([[1.0, 2.0], [float("nan"), 3.0]]))
    >>> entries.count, entries.filled()[1, 0].item()
    (3, 0.0)
    """

    Y: Float[Tensor, "N P"]
    observed: Bool[Tensor, "N P"]

    @classmethod
    def of(cls, Y: Tensor) -> "Entries":
        """Check a table `[N P]`: floating-point, no infinity, something observed."""
        if Y.dim() != 2 or not Y.dtype.is_floating_point:
            raise InputError(
                f"`Y` must be floating-point numbers [N P]; got {Y.dtype} of shape {list(Y.shape)}."
            )
        if bool(torch.isinf(Y).any()):
            raise InputError(
                f"`Y` has {int(torch.isinf(Y).sum())} infinite entries; use NaN for what is "
                "missing, and mend the others."
            )
        observed = ~torch.isnan(Y)
        if not bool(observed.any()):
            raise InputError(
                f"`Y` must have at least one entry that is observed; got shape {list(Y.shape)}."
            )
        return cls(Y, observed)

    @property
    def N(self) -> int:
        """Number of rows."""
        return self.Y.shape[0]

    @property
    def P(self) -> int:
        """Number of columns."""
        return self.Y.shape[1]

    @property
    def count(self) -> int:
        """Number of entries observed."""
        return int(self.observed.sum())

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return bool(self.observed.all())

    def filled(self, value: float = 0.0) -> Float[Tensor, "N P"]:
        """The table with missing entries replaced."""
        return torch.where(self.observed, self.Y, value)

    def patterns(self) -> tuple[Bool[Tensor, "G N"], Int[Tensor, " P"]]:
        """The distinct sets of rows that columns are observed in, and which one each column has."""
        if self.complete:
            zero = torch.zeros(self.P, dtype=torch.long, device=self.Y.device)
            return self.observed[:, :1].mT, zero
        return torch.unique(self.observed.mT, dim=0, return_inverse=True)

    def rows(self, index: Int[Tensor, " B"]) -> "Entries":
        """Some of the rows."""
        return Entries(self.Y[index], self.observed[index])

    def batches(self, size: int, *, generator: torch.Generator) -> RowBatches:
        """Numbers of `size` random rows without end, in an order drawn anew once it is used up."""
        return RowBatches(self.N, size, generator=generator, device=self.Y.device)
