"""To mean zero and unit variance, and back."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.data.column_moments import ColumnMoments
from winnowgp.data.entries import Entries


@dataclass(frozen=True, slots=True)
class Standardiser:
    """z = (x − shift) / scale, column by column. A constant column is only shifted."""

    shift: Float[Tensor, " C"]
    scale: Float[Tensor, " C"]

    @classmethod
    def of(
        cls, A: Float[Tensor, "N C"], *, weights: Float[Tensor, " N"] | None = None
    ) -> "Standardiser":
        """Mean and standard deviation of each column, of rows that may count more than once."""
        # Squares of 1e200 overflow and of 1e-200 vanish: take out each column's size first.
        size = A.abs().amax(0)
        size = torch.where(size > 0, size, 1.0)
        if weights is None:
            spread, centre = torch.std_mean(A / size, dim=0, correction=0)
        else:
            share = weights / weights.sum()
            centre = share @ (A / size)
            spread = (share @ (A / size - centre).square()).sqrt()
        scale, shift = size * spread, size * centre
        # A column that varies by rounding alone carries no information: do not blow it up.
        constant = scale <= 10 * torch.finfo(A.dtype).eps * shift.abs()
        return cls(shift, torch.where(constant, 1.0, scale))

    @classmethod
    def of_moments(cls, moments: ColumnMoments) -> "Standardiser":
        """Of columns of which only this is known, as of a source that was read once."""
        mean, sd = moments.mean, moments.sd
        constant = sd <= 10 * torch.finfo(mean.dtype).eps * mean.abs()
        return cls(mean, torch.where(constant, 1.0, sd))

    @classmethod
    def of_entries(cls, table: Entries) -> "Standardiser":
        """Mean and standard deviation of what is observed of each column."""
        size = torch.where(table.observed, table.Y.abs(), 0.0).amax(0)
        size = torch.where(size > 0, size, 1.0)
        count = table.observed.sum(0).clamp_min(1)
        shift = (table.filled() / size).sum(0) / count
        off = torch.where(table.observed, table.Y / size - shift, 0.0)
        scale = size * (off.square().sum(0) / count).sqrt()
        constant = scale <= 10 * torch.finfo(table.Y.dtype).eps * (size * shift).abs()
        return cls(size * shift, torch.where(constant | (scale == 0), 1.0, scale))

    @classmethod
    def none(cls, A: Float[Tensor, "N C"]) -> "Standardiser":
        """For columns that stay in their own units."""
        return cls(torch.zeros_like(A[0]), torch.ones_like(A[0]))

    def to(self, device: torch.device) -> "Standardiser":
        """The same for columns on another device."""
        return Standardiser(self.shift.to(device), self.scale.to(device))

    def forward(self, A: Float[Tensor, "*batch C"]) -> Float[Tensor, "*batch C"]:
        """Original units to standard ones."""
        return (A - self.shift) / self.scale

    def inverse(self, A: Float[Tensor, "*batch C"]) -> Float[Tensor, "*batch C"]:
        """Standard units to original ones."""
        return A * self.scale + self.shift
