"""Rows that several processes share."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import final

import torch
from jaxtyping import Int
from torch import Tensor

from winnowgp.data.dataset import Dataset
from winnowgp.data.distributed import ProcessGroup
from winnowgp.data.out_of_core import StreamedSource, WrappedSource, chunk_sizes, cut
from winnowgp.data.sources import Source, checked_rows, share_range
from winnowgp.errors import InputError

# Whoever shares rows sums them in so many runs, and the digits do not depend on who sums which.
_SHARDS = 8


@final
@dataclass(frozen=True, slots=True)
class ShardedSource(WrappedSource):
    """All rows of a source, of which each process reads its own share only.

    Numbers of rows are those of the whole; `chunks` and `lanes` give what this process reads, and
    `total` adds up what all of them found.
    """

    among: ProcessGroup

    def __post_init__(self) -> None:
        if self.among.world_size > self.N:
            raise InputError(
                f"each of {self.among.world_size} processes needs at least one row; got {self.N} "
                "rows. Start fewer processes."
            )

    @property
    def process_group(self) -> ProcessGroup:
        return self.among

    def to(self, device: torch.device) -> "ShardedSource":
        return ShardedSource(self.source.to(device), self.process_group)

    def held(self) -> Dataset | None:
        return self.source.held()

    def alike(self, rows: Dataset) -> "ShardedSource":
        return ShardedSource(rows, self.among)

    def chunks(self, size: int) -> Iterator[Dataset]:
        return chain.from_iterable(self.shard_chunks(size))

    def shard_chunks(self, size: int) -> Iterator[Iterator[Dataset]]:
        """Of rows that come one after another, in one pass over all lanes."""
        shards = self.shards()
        if not isinstance(self.source, StreamedSource):
            yield from (shard.chunks(size) for shard in shards)
            return
        sizes = [list(chunk_sizes(shard.N, size)) for shard in shards]
        own = share_range(self.N, self.process_group.rank, self.process_group.world_size)
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
        own = share_range(self.N, self.process_group.rank, self.process_group.world_size)
        mine = ((rows >= own.start) & (rows < own.stop)).cpu()
        found = self.source.share(self.process_group.rank, self.process_group.world_size).part(
            rows.cpu()[mine] - own.start
        )
        X = found.X.new_zeros(len(rows), self.D)
        Y = found.Y.new_zeros(len(rows), self.P)
        X[mine], Y[mine] = found.X, found.Y
        return Dataset(*self.process_group.all_reduce(X, Y))

    def share(self, rank: int, of: int) -> Source:
        raise InputError("rows that are shared already cannot be shared again.")

    def shards(self) -> tuple[Source, ...]:
        rank, of = self.process_group.rank, self.process_group.world_size
        if _SHARDS % of or self.N < _SHARDS:
            return (self.source.share(rank, of),)
        each = _SHARDS // of
        return tuple(self.source.share(rank * each + i, _SHARDS) for i in range(each))


def shared(source: Source, *, device: torch.device | str | None = None) -> ShardedSource:
    """The rows of a source, shared among the processes that `torchrun` has started.

        torchrun --nproc-per-node 4 fit.py

    where every process makes the same source and fits the same model to `shared(source)`. Without
    `torchrun` one process reads all rows.

    Args:
        device: where the fit is to be: processes on GPUs talk by NCCL, others by gloo.
    """
    process_group = ProcessGroup.started(None if device is None else torch.device(device))
    shapes = process_group.all_gather(
        f"{source.N} rows with {source.D} inputs and {source.P} targets"
    )
    if len(set(shapes)) > 1:
        raise InputError(
            f"every process must make the whole source, of which `shared` gives it a part; got "
            f"{', '.join(shapes)}."
        )
    return ShardedSource(source, process_group)
