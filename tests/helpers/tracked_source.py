"""A source that counts how many of its rows are still referenced."""

import weakref
from collections.abc import Iterator

from jaxtyping import Int
from torch import Tensor

from winnowgp.data import Dataset, Source
from winnowgp.data.dataset import SourceInfo


class Tracked(Source):
    """Copies of the rows of a data set, counted from reading to garbage collection."""

    def __init__(self, rows: Dataset) -> None:
        self._rows = rows
        self.alive = self.most = self.read = 0

    @property
    def info(self) -> SourceInfo:
        return self._rows.info

    def chunks(self, size: int) -> Iterator[Dataset]:
        for start in range(0, self.N, size):
            yield self._counted(self._rows.part(slice(start, start + size)))

    def part(self, rows: Int[Tensor, " B"]) -> Dataset:
        return self._counted(self._rows.part(rows))

    def shard(self, index: int, count: int) -> Source:
        raise NotImplementedError

    def _counted(self, part: Dataset) -> Dataset:
        X = part.X.clone()
        self.read += len(X)
        self.alive += len(X)
        self.most = max(self.most, self.alive)
        weakref.finalize(X, self._released, len(X))
        return Dataset(X, part.Y.clone())

    def _released(self, count: int) -> None:
        self.alive -= count
