"""Sources whose rows are divided among the processes of a fit."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import final

import torch
from jaxtyping import Int
from torch import Tensor

from winnowgp.data.dataset import Dataset, Source
from winnowgp.data.distributed import ProcessGroup
from winnowgp.data.out_of_core import StreamedSource, WrappedSource, chunk_sizes, rechunk
from winnowgp.data.row_indices import checked_rows, shard_range
from winnowgp.errors import InputError

# Shards whose sums are formed separately, divided among 1, 2, 4 or 8 processes: the order of
# additions, and so every digit, does not depend on the number of processes.
_SHARDS = 8


def shard(source: Source, *, device: torch.device | str | None = None) -> "ShardedSource":
    """Divide the rows of a source among the processes that `torchrun` has started.

        torchrun --nproc-per-node 4 fit.py

    Every process creates the same source and fits the same model to `shard(source)`. Without
    `torchrun` one process reads all rows.

    Args:
        source: all rows, the same in every process.
        device: device of the fit. Processes on GPUs communicate by NCCL, others by gloo.

    Raises:
        InputError: the processes have different sources, or there are more processes than rows.
    """
    process_group = ProcessGroup.initialise(None if device is None else torch.device(device))
    shapes = process_group.all_gather(
        f"{source.N} rows with {source.D} inputs and {source.P} targets"
    )
    if len(set(shapes)) > 1:
        raise InputError(
            "every process must create the whole source, which `shard` divides; got "
            f"{', '.join(shapes)}."
        )
    return ShardedSource(source, process_group)


@final
@dataclass(frozen=True, slots=True)
class ShardedSource(WrappedSource):
    """All rows of a source, divided among several processes that each read their own rows.

    N and row indices are those of all rows. `chunks` and `shards` give the rows of this process
    only; `part` returns the same rows in every process.
    """

    group: ProcessGroup

    def __post_init__(self) -> None:
        if self.group.world_size > self.N:
            raise InputError(
                f"each of {self.group.world_size} processes needs at least one row; got {self.N} "
                "rows. Start fewer processes."
            )

    @property
    def process_group(self) -> ProcessGroup:
        return self.group

    def chunks(self, size: int) -> Iterator[Dataset]:
        return chain.from_iterable(self.shard_chunks(size))

    def part(self, rows: Int[Tensor, " B"]) -> Dataset:
        """Return some rows: each process reads its own, and all receive all of them."""
        dataset = self.as_dataset()
        if dataset is not None:
            return dataset.part(rows)
        checked_rows(rows, self.N)
        own = self._own_rows
        mine = ((rows >= own.start) & (rows < own.stop)).cpu()
        shard = self.source.shard(self.group.rank, self.group.world_size)
        selected = shard.part(rows.cpu()[mine] - own.start)
        X = selected.X.new_zeros(len(rows), self.D)
        Y = selected.Y.new_zeros(len(rows), self.P)
        X[mine], Y[mine] = selected.X, selected.Y
        if not self.has_noise:
            return Dataset(*self.group.all_reduce(X, Y))
        noise = torch.zeros_like(Y)
        if selected.noise is not None:
            noise[mine] = selected.noise
        X, Y, noise = self.group.all_reduce(X, Y, noise)
        return Dataset(X, Y, None, noise)

    def shard(self, index: int, count: int) -> Source:
        raise InputError(
            "a source that is divided among processes cannot be sharded again; shard the source "
            "it was made from."
        )

    def shards(self) -> tuple[Source, ...]:
        rank, world_size = self.group.rank, self.group.world_size
        if _SHARDS % world_size or self.N < _SHARDS:
            return (self.source.shard(rank, world_size),)
        each = _SHARDS // world_size
        return tuple(self.source.shard(rank * each + i, _SHARDS) for i in range(each))

    def shard_chunks(self, size: int) -> Iterator[Iterator[Dataset]]:
        """Yield the chunks of each shard; a streamed source is read in one pass over all shards."""
        shards = self.shards()
        if not isinstance(self.source, StreamedSource):
            yield from (shard.chunks(size) for shard in shards)
            return
        sizes = [list(chunk_sizes(shard.N, size)) for shard in shards]
        own = self._own_rows
        stream = self.source.rechunked(own.start, own.stop, chain.from_iterable(sizes))
        yield from (islice(stream, len(counts)) for counts in sizes)
        # A source that has changed raises its error at the end of the stream.
        for _ in stream:
            pass

    def all_chunks(self, size: int) -> Iterator[Dataset]:
        """Yield all rows in order, `size` at a time and the same in every process.

        Each process reads its own rows, in one pass, and sends them to the others. An error of one
        of them is raised in all.
        """
        return rechunk(self._sent(size), chunk_sizes(self.N, size))

    def _sent(self, size: int) -> Iterator[Dataset]:
        """Yield the chunks of the first process, then those of the second, and so on."""
        own = self.source.shard(self.group.rank, self.group.world_size).chunks(size)
        for rank in range(self.group.world_size):
            while True:
                chunk = self.group.broadcast_result(lambda: next(own, None), rank=rank)
                if chunk is None:
                    break
                yield chunk

    def to(self, device: torch.device) -> "ShardedSource":
        return ShardedSource(self.source.to(device), self.group)

    def as_dataset(self) -> Dataset | None:
        return self.source.as_dataset()

    def with_rows(self, rows: Dataset) -> "ShardedSource":
        return ShardedSource(rows, self.group)

    @property
    def _own_rows(self) -> range:
        return shard_range(self.N, self.group.rank, self.group.world_size)
