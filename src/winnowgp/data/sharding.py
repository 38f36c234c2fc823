"""Rows that several processes share."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import final

import torch
from jaxtyping import Int
from torch import Tensor

from winnowgp.data.dataset import Dataset
from winnowgp.data.distributed import Ranks
from winnowgp.data.out_of_core import StreamedSource, WrappedSource, chunk_sizes, cut
from winnowgp.data.sources import Source, checked_rows, share_range
from winnowgp.errors import InputError

# Whoever shares rows sums them in so many runs, and the digits do not depend on who sums which.
_LANES = 8


@final
@dataclass(frozen=True, slots=True)
class SharedSource(WrappedSource):
    """All rows of a source, of which each process reads its own share only.

    Numbers of rows are those of the whole; `chunks` and `lanes` give what this process reads, and
    `total` adds up what all of them found.
    """

    among: Ranks

    def __post_init__(self) -> None:
        if self.among.of > self.N:
            raise InputError(
                f"there must be a row for each of {self.among.of} processes; got {self.N} rows. "
                "Start fewer processes."
            )

    @property
    def ranks(self) -> Ranks:
        return self.among

    def to(self, device: torch.device) -> "SharedSource":
        return SharedSource(self.source.to(device), self.ranks)

    def held(self) -> Dataset | None:
        return self.source.held()

    def alike(self, rows: Dataset) -> "SharedSource":
        return SharedSource(rows, self.among)

    def chunks(self, size: int) -> Iterator[Dataset]:
        return chain.from_iterable(self.lane_chunks(size))

    def lane_chunks(self, size: int) -> Iterator[Iterator[Dataset]]:
        """Of rows that come one after another, in one pass over all lanes."""
        lanes = self.lanes()
        if not isinstance(self.source, StreamedSource):
            yield from (lane.chunks(size) for lane in lanes)
            return
        sizes = [list(chunk_sizes(lane.N, size)) for lane in lanes]
        own = share_range(self.N, self.ranks.rank, self.ranks.of)
        stream = cut(self.source.between(own.start, own.stop), chain.from_iterable(sizes))
        yield from (islice(stream, len(counts)) for counts in sizes)
        # What the source says at its end, that it has changed for example, is to be heard.
        for _ in stream:
            pass

    def part(self, rows: Int[Tensor, " B"]) -> Dataset:
        """Each process reads those that are its own, and all get all of them."""
        held = self.held()
        if held is not None:
            return held.part(rows)
        checked_rows(rows, self.N)
        own = share_range(self.N, self.ranks.rank, self.ranks.of)
        mine = ((rows >= own.start) & (rows < own.stop)).cpu()
        found = self.source.share(self.ranks.rank, self.ranks.of).part(rows.cpu()[mine] - own.start)
        X = found.X.new_zeros(len(rows), self.D)
        Y = found.Y.new_zeros(len(rows), self.P)
        X[mine], Y[mine] = found.X, found.Y
        return Dataset(*self.ranks.total(X, Y))

    def share(self, rank: int, of: int) -> Source:
        raise InputError("rows that are shared already cannot be shared again.")

    def lanes(self) -> tuple[Source, ...]:
        rank, of = self.ranks.rank, self.ranks.of
        if _LANES % of or self.N < _LANES:
            return (self.source.share(rank, of),)
        each = _LANES // of
        return tuple(self.source.share(rank * each + i, _LANES) for i in range(each))


def shared(source: Source, *, device: torch.device | str | None = None) -> SharedSource:
    """The rows of a source, shared among the processes that `torchrun` has started.

        torchrun --nproc-per-node 4 fit.py

    where every process makes the same source and fits the same model to `shared(source)`. Without
    `torchrun` one process reads all rows.

    Args:
        device: where the fit is to be: processes on GPUs talk by NCCL, others by gloo.
    """
    ranks = Ranks.started(None if device is None else torch.device(device))
    shapes = ranks.gathered(f"{source.N} rows with {source.D} inputs and {source.P} targets")
    if len(set(shapes)) > 1:
        raise InputError(
            f"every process must make the whole source, of which `shared` gives it a part; got "
            f"{', '.join(shapes)}."
        )
    return SharedSource(source, ranks)
