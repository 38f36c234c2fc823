"""A source in standard units."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from typing import TypeAlias, final

import torch
from jaxtyping import Int
from torch import Tensor

from winnowgp.data.column_moments import ColumnMoments
from winnowgp.data.dataset import Dataset
from winnowgp.data.ranks import Ranks
from winnowgp.data.source import Source
from winnowgp.data.standardise import Standardiser
from winnowgp.data.wrapped_source import WrappedSource

# Rows read at once, and numbers: fewer rows of wide tables.
_ROWS, _NUMBERS = 65_536, 2**22


@final
@dataclass(frozen=True, slots=True)
class StandardisedSource(WrappedSource):
    """The rows of another source, each in standard units when it is read."""

    x_units: Standardiser
    y_units: Standardiser

    @property
    def ranks(self) -> Ranks:
        return self.source.ranks

    def to(self, device: torch.device) -> "StandardisedSource":
        moved = self.source.to(device)
        return StandardisedSource(
            moved, self.x_units.to(moved.device), self.y_units.to(moved.device)
        )

    def chunks(self, size: int) -> Iterator[Dataset]:
        return map(self._forward, self.source.chunks(size))

    def part(self, rows: Int[Tensor, " B"]) -> Dataset:
        return self._forward(self.source.part(rows))

    def share(self, rank: int, of: int) -> "StandardisedSource":
        """In the units of all rows, as the other shares are."""
        return StandardisedSource(self.source.share(rank, of), self.x_units, self.y_units)

    def held(self) -> Dataset | None:
        held = self.source.held()
        return None if held is None else self._forward(held)

    def converted(self) -> Source:
        """The same rows; where they are in memory, in these units from now on."""
        held = self.held()
        return self if held is None else self.alike(held)

    def alike(self, rows: Dataset) -> Source:
        return self.source.alike(rows)

    def lanes(self) -> tuple[Source, ...]:
        return tuple(map(self._lane, self.source.lanes()))

    def lane_chunks(self, size: int) -> Iterator[Iterator[Dataset]]:
        return (map(self._forward, lane) for lane in self.source.lane_chunks(size))

    def _lane(self, lane: Source) -> Source:
        held = lane.held()
        if held is not None:
            return self._forward(held)
        return StandardisedSource(lane, self.x_units, self.y_units)

    def _forward(self, rows: Dataset) -> Dataset:
        return Dataset(self.x_units.forward(rows.X), self.y_units.forward(rows.Y), rows.weights)


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
    x_units, y_units = (Standardiser.of_moments(m).to(source.device) for m in (x, y))
    if not targets:
        y_units = Standardiser.none(y_units.shift[None])
    return StandardisedSource(source, x_units, y_units)


_Pair: TypeAlias = tuple[ColumnMoments, ColumnMoments]


def _over_all(source: Source) -> _Pair:
    """Of all rows, those that other processes read included."""
    found = source.gathered([_of_lane(lane) for lane in source.lanes()])
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
