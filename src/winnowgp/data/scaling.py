"""Standardising columns to mean zero and unit variance, in memory and out of core."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from typing import TypeAlias, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from winnowgp.data.dataset import Dataset, MaskedMatrix, Source
from winnowgp.data.distributed import ProcessGroup
from winnowgp.data.out_of_core import WrappedSource

# Largest number of rows, and of numbers, that are read at once to find means and deviations.
_ROWS, _NUMBERS = 65_536, 2**22


@dataclass(frozen=True, slots=True)
class Standardiser:
    """Standardises columns by z = (x − shift) / scale; a constant column is only shifted.

    >>> scaler = Standardiser.of(torch.tensor([[1.0], [3.0]]))
    >>> scaler.forward(torch.tensor([[5.0]])).item(), scaler.inverse(torch.tensor([[0.0]])).item()
    (3.0, 2.0)
    """

    shift: Float[Tensor, " C"]
    scale: Float[Tensor, " C"]

    @classmethod
    def of(
        cls, A: Float[Tensor, "N C"], *, weights: Float[Tensor, " N"] | None = None
    ) -> "Standardiser":
        """Return the standardiser of the columns of `A`.

        Args:
            A: values in memory; NaN is missing.
            weights: weights of the rows; a row of weight w counts as w rows.
        """
        table = MaskedMatrix(A, ~torch.isnan(A))
        if not table.complete:
            return cls.of_entries(table, weights=weights)
        size = _column_size(A.abs())
        if weights is None:
            spread, centre = torch.std_mean(A / size, dim=0, correction=0)
        else:
            share = weights / weights.sum()
            centre = share @ (A / size)
            spread = (share @ (A / size - centre).square()).sqrt()
        return cls._of_mean_and_sd(size * centre, size * spread)

    @classmethod
    def of_entries(
        cls, table: MaskedMatrix, *, weights: Float[Tensor, " N"] | None = None
    ) -> "Standardiser":
        """Return the standardiser of the observed entries of each column."""
        size = _column_size(torch.where(table.observed, table.Y.abs(), 0.0))
        share = table.observed.to(table.Y)
        share = share if weights is None else weights[:, None] * share
        count = share.sum(0)
        count = torch.where(count > 0, count, 1.0)
        centre = (share * (table.filled() / size)).sum(0) / count
        deviation = torch.where(table.observed, table.Y / size - centre, 0.0)
        spread = ((share * deviation.square()).sum(0) / count).sqrt()
        return cls._of_mean_and_sd(size * centre, size * spread)

    @classmethod
    def of_moments(cls, moments: "ColumnMoments") -> "Standardiser":
        """Return the standardiser of columns with these moments."""
        return cls._of_mean_and_sd(moments.mean, moments.sd)

    @classmethod
    def none(cls, A: Float[Tensor, "N C"]) -> "Standardiser":
        """Return the identity for as many columns as `A` has."""
        return cls(torch.zeros_like(A[0]), torch.ones_like(A[0]))

    @classmethod
    def _of_mean_and_sd(cls, mean: Float[Tensor, " C"], sd: Float[Tensor, " C"]) -> "Standardiser":
        # A column that varies by rounding alone carries no information: do not amplify it.
        constant = sd <= 10 * torch.finfo(mean.dtype).eps * mean.abs()
        return cls(mean, torch.where(constant, 1.0, sd))

    def to(self, device: torch.device) -> "Standardiser":
        """Return the standardiser on another device."""
        return Standardiser(self.shift.to(device), self.scale.to(device))

    def forward(self, A: Float[Tensor, "*batch C"]) -> Float[Tensor, "*batch C"]:
        """Standardise values in original units."""
        return (A - self.shift) / self.scale

    def inverse(self, A: Float[Tensor, "*batch C"]) -> Float[Tensor, "*batch C"]:
        """Convert standardised values back to original units."""
        return A * self.scale + self.shift


def standardise(source: Source, *, targets: bool = True) -> "StandardisedSource":
    """Scale every column to mean zero and unit variance, found in one pass over the rows.

    >>> rows = Dataset.of(torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 8.0]))
    >>> next(standardise(rows).chunks(2)).Y.tolist()
    [[-1.0], [1.0]]

    Args:
        source: rows to scale, each when it is read.
        targets: whether to scale the targets too; set to False for classes and counts.
    """
    shards = [_shard_moments(shard) for shard in source.shards()]
    x, y = reduce(_merged, chain.from_iterable(source.process_group.all_gather(shards)))
    x_scaler, y_scaler = (Standardiser.of_moments(m).to(source.device) for m in (x, y))
    if not targets:
        y_scaler = Standardiser.none(y_scaler.shift[None])
    return StandardisedSource(source, x_scaler, y_scaler)


@final
@dataclass(frozen=True, slots=True)
class StandardisedSource(WrappedSource):
    """The rows of another source, standardised when they are read."""

    x_scaler: Standardiser
    y_scaler: Standardiser

    @property
    def process_group(self) -> ProcessGroup:
        return self.source.process_group

    def chunks(self, size: int) -> Iterator[Dataset]:
        return map(self._forward, self.source.chunks(size))

    def part(self, rows: Int[Tensor, " B"]) -> Dataset:
        return self._forward(self.source.part(rows))

    def shard(self, index: int, count: int) -> "StandardisedSource":
        """Return a shard, standardised by the means and deviations of all rows."""
        return StandardisedSource(self.source.shard(index, count), self.x_scaler, self.y_scaler)

    def shards(self) -> tuple[Source, ...]:
        return tuple(
            StandardisedSource(shard, self.x_scaler, self.y_scaler).materialised()
            for shard in self.source.shards()
        )

    def shard_chunks(self, size: int) -> Iterator[Iterator[Dataset]]:
        return (map(self._forward, chunks) for chunks in self.source.shard_chunks(size))

    def to(self, device: torch.device) -> "StandardisedSource":
        moved = self.source.to(device)
        return StandardisedSource(
            moved, self.x_scaler.to(moved.device), self.y_scaler.to(moved.device)
        )

    def as_dataset(self) -> Dataset | None:
        dataset = self.source.as_dataset()
        return None if dataset is None else self._forward(dataset)

    def with_rows(self, rows: Dataset) -> Source:
        return self.source.with_rows(rows)

    def materialised(self) -> Source:
        """Standardise rows in memory now, instead of whenever they are read."""
        dataset = self.as_dataset()
        return self if dataset is None else self.with_rows(dataset)

    def _forward(self, rows: Dataset) -> Dataset:
        noise = None if rows.noise is None else rows.noise / self.y_scaler.scale.square()
        X, Y = self.x_scaler.forward(rows.X), self.y_scaler.forward(rows.Y)
        return Dataset(X, Y, rows.weights, noise)


@dataclass(frozen=True, slots=True)
class ColumnMoments:
    """Total weight w, mean m and sum of squares S = Σ w_i (x_i − m)² of each column.

    The moments of two sets of rows merge into those of their union (Chan, Golub & LeVeque 1979):

        δ = m_b − m_a,   m = m_a + δ w_b / w,   S = S_a + S_b + δ² w_a w_b / w

    No large sums are subtracted, so a column near 1e9 that varies by 1 keeps its digits. Each
    column is divided by the power of two below its largest value: squares of 1e200 do not
    overflow, and the division is exact.

    >>> ColumnMoments.of(torch.tensor([[1.0], [2.0]])).merged(
    ...     ColumnMoments.of(torch.tensor([[6.0]]))
    ... ).mean
    tensor([3.])
    """

    weight: Float[Tensor, ""]
    centre: Float[Tensor, " C"]
    """m / unit."""
    squares: Float[Tensor, " C"]
    """S / unit²."""
    unit: Float[Tensor, " C"]

    @classmethod
    def of(
        cls, A: Float[Tensor, "N C"], *, weights: Float[Tensor, " N"] | None = None
    ) -> "ColumnMoments":
        """Return the moments of at least one row, with optional weights."""
        largest = A.abs().amax(0)
        # x = mantissa · 2^e: this quotient is 2^(e−1), exactly, and finite if x is.
        unit = largest / 2 / torch.frexp(largest).mantissa
        unit = torch.where(unit > 0, unit, 1.0)
        scaled = A / unit
        if weights is None:
            weights = torch.ones_like(A[:, 0])
        weight = weights.sum()
        centre = weights @ scaled / weight
        # A second step, so that the mean of a constant column is exactly that constant.
        centre = centre + weights @ (scaled - centre) / weight
        return cls(weight, centre, weights @ (scaled - centre).square(), unit)

    @property
    def mean(self) -> Float[Tensor, " C"]:
        """Mean m of each column."""
        return self.unit * self.centre

    @property
    def sd(self) -> Float[Tensor, " C"]:
        """Standard deviation √(S / w) of each column, without Bessel's correction."""
        return self.unit * (self.squares / self.weight).sqrt()

    def merged(self, other: "ColumnMoments") -> "ColumnMoments":
        """Return the moments of the rows of both."""
        unit = torch.maximum(self.unit, other.unit)
        a, b = self.unit / unit, other.unit / unit
        weight = self.weight + other.weight
        step = other.centre * b - self.centre * a
        centre = self.centre * a + step * (other.weight / weight)
        between = step.square() * (self.weight * other.weight / weight)
        squares = self.squares * a.square() + other.squares * b.square() + between
        return ColumnMoments(weight, centre, squares, unit)


_Pair: TypeAlias = tuple[ColumnMoments, ColumnMoments]


def _shard_moments(source: Source) -> _Pair:
    """Return the moments of the inputs and of the targets, in one pass."""
    size = max(1, min(_ROWS, _NUMBERS // (source.D + source.P)))
    return reduce(_merged, map(_chunk_moments, source.chunks(size)))


def _chunk_moments(rows: Dataset) -> _Pair:
    rows = rows.to(torch.device("cpu"))
    return (
        ColumnMoments.of(rows.X, weights=rows.weights),
        ColumnMoments.of(rows.Y, weights=rows.weights),
    )


def _merged(a: _Pair, b: _Pair) -> _Pair:
    return a[0].merged(b[0]), a[1].merged(b[1])


def _column_size(magnitudes: Float[Tensor, "N C"]) -> Float[Tensor, " C"]:
    """Return the largest magnitude of each column.

    Columns are divided by it first: squares of 1e200 would overflow, and those of 1e-200 vanish.
    """
    size = magnitudes.amax(0)
    return torch.where(size > 0, size, 1.0)
