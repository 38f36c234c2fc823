"""Rows that a model can learn from, wherever they are."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from winnowgp.data.ranks import Ranks
from winnowgp.errors import InputError

if TYPE_CHECKING:
    from winnowgp.data.dataset import Dataset


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
    def ranks(self) -> Ranks:
        """The processes that share the rows; this one alone, unless they are `shared`."""
        return Ranks.alone()

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

    def lane_chunks(self, size: int) -> "Iterator[Iterator[Dataset]]":
        """The chunks of each lane, to be read one lane after another."""
        return (lane.chunks(size) for lane in self.lanes())

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

    def lanes(self) -> "Sequence[Source]":
        """Runs of rows whose sums are formed separately, and then added in pairs.

        A sum over rows that several processes share then has the same digits whatever their number.
        """
        return (self,)

    def total(self, *sums: Tensor) -> tuple[Tensor, ...]:
        """Sums over all rows, from sums over those that this process reads."""
        return self.ranks.total(*sums)

    def gathered(self, value: Value) -> list[Value]:
        """What each process that reads some of the rows found, in the order of the rows."""
        return self.ranks.gathered(value)
