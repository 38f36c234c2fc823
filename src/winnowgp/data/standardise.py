"""Standardising inputs and targets, in memory and out of core."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from typing import TypeAlias, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from winnowgp.data.dataset import Dataset, MaskedMatrix
from winnowgp.data.distributed import ProcessGroup
from winnowgp.data.out_of_core import WrappedSource
from winnowgp.data.sources import Source

# Means and standard deviations of columns that come in parts.


@dataclass(frozen=True, slots=True)
class ColumnMoments:
    """Total weight w, mean m and sum of squares S = Σ w_i (x_i − m)² of each column.

    Two parts merge to what their union has (Chan, Golub & LeVeque 1979):

        δ = m_b − m_a,   m = m_a + δ w_b / w,   S = S_a + S_b + δ² w_a w_b / w

    No difference of large sums is ever taken, so that a column near 1e9 that varies by 1 keeps its
    digits. Columns are held in units of the power of two below their largest value: squares of
    1e200 do not overflow, and the change of units rounds nothing.

    >>> ColumnMoments.of(torch.tensor([[1.0], [2.0]])).merged(
    ...     ColumnMoments.of(torch.tensor([[6.0]]))
    ... ).mean
    tensor([3.])
    """

    weight: Float[Tensor, ""]
    centre: Float[Tensor, " C"]
    """m, in these units."""
    squares: Float[Tensor, " C"]
    """S, in their squares."""
    unit: Float[Tensor, " C"]

    @classmethod
    def of(
        cls, A: Float[Tensor, "N C"], *, weights: Float[Tensor, " N"] | None = None
    ) -> "ColumnMoments":
        """Of some rows, at least one, each of which may count as more or less than one."""
        largest = A.abs().amax(0)
        # x = mantissa · 2^e: this quotient is 2^(e−1), exactly, and as finite as x is.
        unit = largest / 2 / torch.frexp(largest).mantissa
        unit = torch.where(unit > 0, unit, 1.0)
        scaled = A / unit
        if weights is None:
            weights = torch.ones_like(A[:, 0])
        weight = weights.sum()
        centre = weights @ scaled / weight
        # Once more, so that the mean of a constant column is that constant.
        centre = centre + weights @ (scaled - centre) / weight
        return cls(weight, centre, weights @ (scaled - centre).square(), unit)

    @property
    def mean(self) -> Float[Tensor, " C"]:
        """m."""
        return self.unit * self.centre

    @property
    def sd(self) -> Float[Tensor, " C"]:
        """√(S / w), of the rows themselves: nothing is added for having estimated m."""
        return self.unit * (self.squares / self.weight).sqrt()

    def merged(self, other: "ColumnMoments") -> "ColumnMoments":
        """Of the rows of both."""
        unit = torch.maximum(self.unit, other.unit)
        a, b = self.unit / unit, other.unit / unit
        weight = self.weight + other.weight
        step = other.centre * b - self.centre * a
        centre = self.centre * a + step * (other.weight / weight)
        between = step.square() * (self.weight * other.weight / weight)
        squares = self.squares * a.square() + other.squares * b.square() + between
        return ColumnMoments(weight, centre, squares, unit)


# To mean zero and unit variance, and back.


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
    def of_entries(cls, table: MaskedMatrix) -> "Standardiser":
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


# A source in standard units.


# Rows read at once, and numbers: fewer rows of wide tables.
_ROWS, _NUMBERS = 65_536, 2**22


@final
@dataclass(frozen=True, slots=True)
class StandardisedSource(WrappedSource):
    """The rows of another source, each in standard units when it is read."""

    x_scaler: Standardiser
    y_scaler: Standardiser

    @property
    def process_group(self) -> ProcessGroup:
        return self.source.process_group

    def to(self, device: torch.device) -> "StandardisedSource":
        moved = self.source.to(device)
        return StandardisedSource(
            moved, self.x_scaler.to(moved.device), self.y_scaler.to(moved.device)
        )

    def chunks(self, size: int) -> Iterator[Dataset]:
        return map(self._forward, self.source.chunks(size))

    def part(self, rows: Int[Tensor, " B"]) -> Dataset:
        return self._forward(self.source.part(rows))

    def share(self, rank: int, of: int) -> "StandardisedSource":
        """In the units of all rows, as the other shares are."""
        return StandardisedSource(self.source.share(rank, of), self.x_scaler, self.y_scaler)

    def held(self) -> Dataset | None:
        held = self.source.held()
        return None if held is None else self._forward(held)

    def converted(self) -> Source:
        """The same rows; where they are in memory, in these units from now on."""
        held = self.held()
        return self if held is None else self.alike(held)

    def alike(self, rows: Dataset) -> Source:
        return self.source.alike(rows)

    def shards(self) -> tuple[Source, ...]:
        return tuple(map(self._lane, self.source.shards()))

    def shard_chunks(self, size: int) -> Iterator[Iterator[Dataset]]:
        return (map(self._forward, shard) for shard in self.source.shard_chunks(size))

    def _lane(self, shard: Source) -> Source:
        held = shard.held()
        if held is not None:
            return self._forward(held)
        return StandardisedSource(shard, self.x_scaler, self.y_scaler)

    def _forward(self, rows: Dataset) -> Dataset:
        return Dataset(self.x_scaler.forward(rows.X), self.y_scaler.forward(rows.Y), rows.weights)


def standardised(source: Source, *, targets: bool = True) -> StandardisedSource:
    """Every column to mean zero and unit variance, both found in one pass over the rows.

    >>> import torch
    >>> rows = Dataset.of(torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 8.0]))
    >>> next(standardised(rows).chunks(2)).Y.tolist()
    [[-1.0], [1.0]]

    Args:
        targets: whether they change as well; classes and counts must not.
    """
    x, y = _over_all(source)
    x_scaler, y_scaler = (Standardiser.of_moments(m).to(source.device) for m in (x, y))
    if not targets:
        y_scaler = Standardiser.none(y_scaler.shift[None])
    return StandardisedSource(source, x_scaler, y_scaler)


_Pair: TypeAlias = tuple[ColumnMoments, ColumnMoments]


def _over_all(source: Source) -> _Pair:
    """Of all rows, those that other processes read included."""
    found = source.gathered([_of_lane(shard) for shard in source.shards()])
    return reduce(_merged, chain.from_iterable(found))


def _of_lane(source: Source) -> _Pair:
    size = max(1, min(_ROWS, _NUMBERS // (source.D + source.P)))
    return reduce(_merged, map(_moments, source.chunks(size)))


def _moments(rows: Dataset) -> _Pair:
    there = rows.to(torch.device("cpu"))
    return (
        ColumnMoments.of(there.X, weights=there.weights),
        ColumnMoments.of(there.Y, weights=there.weights),
    )


def _merged(a: _Pair, b: _Pair) -> _Pair:
    return a[0].merged(b[0]), a[1].merged(b[1])
