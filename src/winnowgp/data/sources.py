"""The interface of data sources, and random subsets of their rows."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from jaxtyping import Int
from torch import Tensor

from winnowgp.data.distributed import SINGLE_PROCESS, ProcessGroup
from winnowgp.errors import InputError

if TYPE_CHECKING:
    from winnowgp.data.dataset import Dataset


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """The dimensions of a source, the dtype of its tensors and the names of its inputs."""

    N: int
    D: int
    P: int
    dtype: torch.dtype
    names: tuple[str, ...] | None = None


class Source(ABC):
    """N rows of D inputs and P targets that need not be in memory all at once.

    `Dataset` holds its rows in memory. `ArraySource` (NumPy arrays and memory maps),
    `ParquetSource` (files and folders) and `BatchSource` (any iterator that can be restarted) read
    them in chunks. `standardise` scales the columns of a source; `shard` divides its rows among
    processes.

    The order of the rows is fixed, and they can be read any number of times. Values are converted
    to tensors of one dtype and checked when they are read; an error gives the position of a value
    that is not finite.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def info(self) -> SourceInfo:
        """Number of rows and columns, dtype and names."""

    @property
    def N(self) -> int:
        """Number of rows."""
        return self.info.N

    @property
    def D(self) -> int:
        """Number of input columns."""
        return self.info.D

    @property
    def P(self) -> int:
        """Number of target columns."""
        return self.info.P

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensors that rows are converted to."""
        return self.info.dtype

    @property
    def names(self) -> tuple[str, ...] | None:
        """Names of the input columns, or None if they have no names."""
        return self.info.names

    @property
    def device(self) -> torch.device:
        """Device of the tensors that are read."""
        return torch.device("cpu")

    @property
    def observations(self) -> int | float:
        """Number of observations that the rows count as: N, or the sum of the weights."""
        return self.N

    @property
    def process_group(self) -> ProcessGroup:
        """Processes that the rows are sharded over; one, unless the source comes from `shard`."""
        return SINGLE_PROCESS

    @abstractmethod
    def chunks(self, size: int) -> "Iterator[Dataset]":
        """Yield all rows in order, `size` at a time; the last chunk may be shorter."""

    @abstractmethod
    def part(self, rows: Int[Tensor, " B"]) -> "Dataset":
        """Return the rows with these indices, in this order, in at most one pass."""

    @abstractmethod
    def shard(self, index: int, count: int) -> "Source":
        """Return one of `count` contiguous shards of nearly equal length.

        Args:
            index: number of the shard, from 0.
            count: number of shards; together they hold all rows.
        """

    def shards(self) -> "Sequence[Source]":
        """Return the shards that this process sums separately, before their sums are added.

        A sharded source has eight, divided among its processes. Sums over rows then have the same
        digits whether one, two, four or eight processes compute them.
        """
        return (self,)

    def shard_chunks(self, size: int) -> "Iterator[Iterator[Dataset]]":
        """Yield an iterator over the chunks of each shard; read them one after another."""
        return (shard.chunks(size) for shard in self.shards())

    def to(self, device: torch.device) -> "Source":
        """Move rows in memory to a device; rows that are read in chunks stay where they are."""
        return self

    def as_dataset(self) -> "Dataset | None":
        """Return all rows if this process has them in memory, else None."""
        return None

    def require_dataset(self, user: str) -> "Dataset":
        """Return all rows, for an algorithm that needs them at once.

        Args:
            user: name of the algorithm, for the error message.

        Raises:
            InputError: this process does not have the rows in memory.
        """
        dataset = self.as_dataset()
        if dataset is None:
            raise InputError(
                f"{user} needs all {self.N} rows in memory at once; read them with "
                "`next(source.chunks(source.N))`, and shard them after that, if at all. Regression "
                "with Gaussian noise and the fast schedule reads some rows at a time."
            )
        return dataset

    def with_rows(self, rows: "Dataset") -> "Source":
        """Return other rows, sharded over the same processes as this source."""
        return rows


def checked_size(size: int) -> int:
    """Return a chunk size, or raise an error if it is below one row."""
    if size < 1:
        raise InputError(f"`size` must be at least 1 row; got {size}.")
    return size


def checked_rows(rows: Int[Tensor, " B"], N: int) -> Int[Tensor, " B"]:
    """Return row indices, or raise an error if one is outside 0 to N − 1."""
    if len(rows) and not bool(((rows >= 0) & (rows < N)).all()):
        raise InputError(
            f"`rows` must be indices from 0 to {N - 1}; got {int(rows.min())} to {int(rows.max())}."
        )
    return rows


def shard_range(N: int, index: int, count: int) -> range:
    """Return the rows of one of `count` shards; their lengths differ by at most one.

    >>> [shard_range(5, index, 2) for index in range(2)]
    [range(0, 2), range(2, 5)]
    """
    if not 0 <= index < count:
        raise InputError(f"`index` must be from 0 to below `count`; got {index} of {count}.")
    if count > N:
        raise InputError(f"{N} rows cannot be divided into {count} shards; use at most {N}.")
    return range(index * N // count, (index + 1) * N // count)


def sampled_rows(N: int, count: int, generator: torch.Generator) -> Int[Tensor, " B"]:
    """Return up to `count` distinct random row indices in random order.

    Memory grows with `count`, not with N. The result is on the generator's device.
    """
    device = generator.device
    if 4 * count >= N:
        return torch.randperm(N, generator=generator, device=device)[:count]
    # Draws with replacement: with N > 4 count few of the 2 count draws coincide.
    rows = torch.randint(N, (2 * count,), generator=generator, device=device).unique()
    return rows[torch.randperm(len(rows), generator=generator, device=device)[:count]]


@final
class RowBatches:
    """An endless iterator over minibatches of row indices, without replacement in each epoch.

    The rows are shuffled again whenever fewer than `size` are left, so every batch is a uniformly
    random subset. If `size` is at least N, every batch is all rows in order. `state_dict` and
    `load_state_dict` save and restore the position.

    >>> batches = RowBatches(5, 2, generator=torch.Generator().manual_seed(0))
    >>> [len(next(batches)) for _ in range(4)]
    [2, 2, 2, 2]

    Args:
        N: number of rows.
        size: rows per batch.
        generator: source of randomness; shuffling happens on its device.
        device: device of the returned indices.
    """

    def __init__(
        self,
        N: int,
        size: int,
        *,
        generator: torch.Generator,
        device: torch.device | None = None,
    ) -> None:
        self._N, self._size = N, min(size, N)
        self._generator, self._device = generator, device
        self._order: Int[Tensor, " N"] | None = None
        self._position = 0

    def __iter__(self) -> "RowBatches":
        return self

    def __next__(self) -> Int[Tensor, " B"]:
        if self._size == self._N:
            return torch.arange(self._N, device=self._device)
        if self._order is None or self._position + self._size > self._N:
            g = self._generator
            self._order, self._position = torch.randperm(self._N, generator=g, device=g.device), 0
        rows = self._order[self._position : self._position + self._size]
        self._position += self._size
        return rows.to(device=self._device)

    def state_dict(self) -> dict[str, Any]:
        """Return the current order of the rows and the position in it."""
        return {"order": self._order, "place": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position that `state_dict` returned."""
        order = state["order"]
        self._order = None if order is None else order.to(self._generator.device)
        self._position = state["place"]
