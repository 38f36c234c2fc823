"""Sources of rows in memory and out of core."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch
from jaxtyping import Int
from torch import Tensor

from winnowgp.data.distributed import ProcessGroup
from winnowgp.errors import InputError

if TYPE_CHECKING:
    from winnowgp.data.dataset import Dataset


# Rows that a model can learn from, wherever they are.


Value = TypeVar("Value")


class Source(ABC):
    """N rows of D inputs and P targets, which need not be in memory all at once.

    `Dataset` is one that is. The others are `ArraySource` (numpy arrays and memory maps),
    `ParquetSource` (files and folders) and `BatchSource` (any iterator that can be started again);
    `standardised` puts another one in standard units.

    The order of the rows is fixed, and rows can be read as often as one likes. Values become
    tensors of one dtype when they are read, and are checked then: an error names the place of what
    is not finite.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def N(self) -> int:
        """Number of rows."""

    @property
    @abstractmethod
    def D(self) -> int:
        """Number of input columns."""

    @property
    @abstractmethod
    def P(self) -> int:
        """Number of target columns."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of the tensors that rows become."""

    @property
    def names(self) -> tuple[str, ...] | None:
        """Of the inputs, where they have any."""
        return None

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return torch.device("cpu")

    def to(self, device: torch.device) -> "Source":
        """The same on another device, where they are in memory; others move as they are read."""
        return self

    @property
    def observations(self) -> int | float:
        """How many observations the rows stand for: N, unless they have weights."""
        return self.N

    @property
    def process_group(self) -> ProcessGroup:
        """The processes that share the rows; this one alone, unless they are `shared`."""
        return ProcessGroup.alone()

    @abstractmethod
    def chunks(self, size: int) -> "Iterator[Dataset]":
        """All rows in order, `size` at a time and what is left at the end."""

    @abstractmethod
    def part(self, rows: Int[Tensor, " B"]) -> "Dataset":
        """Some rows by number, in the order asked for, in one pass at most."""

    @abstractmethod
    def share(self, rank: int, of: int) -> "Source":
        """The rows of one of several processes: `of` runs of nearly one length, together all.

        Args:
            rank: of the process, from 0.
        """

    def shard_chunks(self, size: int) -> "Iterator[Iterator[Dataset]]":
        """The chunks of each lane, to be read one lane after another."""
        return (shard.chunks(size) for shard in self.shards())

    def held(self) -> "Dataset | None":
        """All rows, where this process has them in memory."""
        return None

    def alike(self, rows: "Dataset") -> "Source":
        """Other rows, shared among processes as these are."""
        return rows

    def in_memory(self, user: str) -> "Dataset":
        """All rows, for one who needs them at once.

        Raises:
            InputError: this process does not have them in memory.
        """
        held = self.held()
        if held is None:
            raise InputError(
                f"{user} needs all {self.N} rows in memory at once; read them with "
                "`next(source.chunks(source.N))`, and share them after that, if at all. Regression "
                "with Gaussian noise and the fast schedule reads some rows at a time."
            )
        return held

    def shards(self) -> "Sequence[Source]":
        """Runs of rows whose sums are formed separately, and then added in pairs.

        A sum over rows that several processes share then has the same digits whatever their number.
        """
        return (self,)

    def total(self, *sums: Tensor) -> tuple[Tensor, ...]:
        """Sums over all rows, from sums over those that this process reads."""
        return self.process_group.all_reduce(*sums)

    def gathered(self, value: Value) -> list[Value]:
        """What each process that reads some of the rows found, in the order of the rows."""
        return self.process_group.all_gather(value)


# Checks of numbers of rows, said once for every source.


def checked_size(size: int) -> int:
    """Rows of a chunk."""
    if size < 1:
        raise InputError(f"`size` must be at least 1 row; got {size}.")
    return size


def checked_rows(rows: Int[Tensor, " B"], N: int) -> Int[Tensor, " B"]:
    """Numbers of rows, each of which exists."""
    if len(rows) and not bool(((rows >= 0) & (rows < N)).all()):
        raise InputError(
            f"`rows` must be numbers from 0 to {N - 1}; got {int(rows.min())} to {int(rows.max())}."
        )
    return rows


def share_range(N: int, rank: int, of: int) -> range:
    """The rows of one of `of` processes; lengths differ by at most one.

    >>> [share_range(5, rank, 2) for rank in range(2)]
    [range(0, 2), range(2, 5)]
    """
    if not 0 <= rank < of:
        raise InputError(f"`rank` must be from 0 to below `of`; got {rank} of {of}.")
    if of > N:
        raise InputError(f"{of} processes cannot share {N} rows; start at most {N}.")
    return range(rank * N // of, (rank + 1) * N // of)


def sampled_rows(N: int, count: int, generator: torch.Generator) -> Int[Tensor, " B"]:
    """Up to `count` different rows of N in random order, on the generator's device.

    Memory is that of `count` rows: an order of all would take some for each row.
    """
    device = generator.device
    if 4 * count >= N:
        return torch.randperm(N, generator=generator, device=device)[:count]
    # Few of them are drawn twice.
    rows = torch.randint(N, (2 * count,), generator=generator, device=device).unique()
    return rows[torch.randperm(len(rows), generator=generator, device=device)[:count]]


# Random parts of the rows, one after another without end.


@final
class RowBatches:
    """Numbers of `size` random rows, in an order drawn anew whenever fewer than `size` are left.

    Every batch is a uniformly random part of the rows; all of them in order if there are no more.
    An iterator with a memory: `state_dict` says where it stands, to go on from there.

    >>> batches = RowBatches(5, 2, generator=torch.Generator().manual_seed(0))
    >>> [len(next(batches)) for _ in range(4)]
    [2, 2, 2, 2]

    Args:
        generator: drawn from when an order is needed, on its device.
        device: where the numbers are wanted.
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
        self._place = 0

    def __iter__(self) -> "RowBatches":
        return self

    def __next__(self) -> Int[Tensor, " B"]:
        if self._size == self._N:
            return torch.arange(self._N, device=self._device)
        if self._order is None or self._place + self._size > self._N:
            g = self._generator
            self._order, self._place = torch.randperm(self._N, generator=g, device=g.device), 0
        rows = self._order[self._place : self._place + self._size]
        self._place += self._size
        return rows.to(device=self._device)

    def state_dict(self) -> dict[str, Any]:
        """The order, and how much of it is used up."""
        return {"order": self._order, "place": self._place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Stand where another one stood."""
        order = state["order"]
        self._order = None if order is None else order.to(self._generator.device)
        self._place = state["place"]
