"""Rows as a pass over them meets them: one block after another."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import chain
from typing import TypeAlias, final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.data import Dataset, Ranks, Source

# Rows of a block on a CPU, where what is made of them should stay in the caches.
CHUNK = 2048
# On a GPU: many, so that work is more than waiting for it to be asked for, and few enough for its
# memory. Rows at most, since what float32 adds up over more of them loses digits; numbers, of
# points or inputs times rows, at most.
_MOST, _NUMBERS = 262_144, 2**26
# Matrices of a block's rows by all points that a pass holds at once.
_HELD = 6

Sums: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Some rows."""

    rows: slice
    """Which, among those of this process."""
    X: Float[Tensor, "B D"]
    features: Float[Tensor, "B F"]
    """[x, x², 1] of the centred inputs, in which squared distances to any point are linear."""
    Y: Float[Tensor, "B P"]
    weights: Float[Tensor, " B"] | None

    def __len__(self) -> int:
        return len(self.X)


@final
class RowBlocks:
    """The rows of a source in blocks, as often as one likes.

    Those of a `Dataset` are cut once; others are read again for each pass, so that memory is that
    of a block whatever their number. In processes that share a source each one passes over its own
    rows, and `summed` gives all of them the sums over all rows.

    Args:
        source: the rows.
        device: where blocks are wanted.
        size: rows of a block.
        ranks: processes whose rows are added up, if others than those that share the source.
    """

    def __init__(
        self, source: Source, *, device: torch.device, size: int, ranks: Ranks | None = None
    ) -> None:
        self.N, self.P, self.observations = source.N, source.P, source.observations
        self._source, self._device, self._size = source, device, size
        self._ranks = source.ranks if ranks is None else ranks
        held = source.held()
        # Read by all processes together, and so the same rows in each, however much memory it has.
        first = source.part(torch.arange(min(source.N, CHUNK))) if held is None else held
        self.centre = first.X.mean(0).to(device)
        self.in_memory = all(isinstance(lane, Dataset) for lane in source.lanes())
        self._cut = [list(lane) for lane in self._read_lanes()] if self.in_memory else None

    @classmethod
    def of(
        cls,
        source: Source,
        *,
        points: int = 0,
        device: torch.device | None = None,
        size: int | None = None,
        ranks: Ranks | None = None,
    ) -> "RowBlocks":
        """Blocks whose size suits the device and its free memory.

        Args:
            points: how many there are for each row, at most.
            device: that of the rows if None.
            size: rows of a block, for those who know better.
            ranks: processes whose rows are added up, if others than those that share the source.
        """
        place = source.device if device is None else device
        size = size or _size(place, points, source.D)
        return cls(source, device=place, size=size, ranks=ranks)

    @cached_property
    def free(self) -> int:
        """Bytes of the GPU that nobody used when this was first asked for."""
        return free_memory(self._device)

    @property
    def device(self) -> torch.device:
        """Where blocks are."""
        return self._device

    def __iter__(self) -> Iterator[RowBlock]:
        return chain.from_iterable(self.lanes())

    def lanes(self) -> Iterator[Iterable[RowBlock]]:
        """Runs of rows whose sums are formed separately (`Source.lanes`)."""
        return self._read_lanes() if self._cut is None else iter(self._cut)

    def summed(self, lanes: Iterable[Sums]) -> Sums:
        """Sums over the rows of all processes, from those of each lane of this one."""
        return self._ranks.total(*pairwise_sum(lanes))

    def _read_lanes(self) -> Iterator[Iterator[RowBlock]]:
        lanes = zip(self._source.lanes(), self._source.lane_chunks(self._size), strict=True)
        first = 0
        for lane, chunks in lanes:
            yield self._read(chunks, first)
            first += lane.N

    def _read(self, chunks: Iterator[Dataset], first: int) -> Iterator[RowBlock]:
        for chunk in chunks:
            rows = chunk.to(self._device)
            X = rows.X
            features = rbf_features(X - self.centre)
            yield RowBlock(slice(first, first + len(X)), X, features, rows.Y, rows.weights)
            first += len(X)


def pairwise_sum(parts: Iterable[Sums]) -> Sums:
    """((a + b) + (c + d)) + …: a power of two of parts is summed as its two halves are.

    So that what several processes add up to has the same digits whatever their number.
    """
    pending: list[tuple[int, Sums]] = []
    for part in parts:
        size = 1
        while pending and pending[-1][0] == size:
            part = _added(pending.pop()[1], part)
            size *= 2
        pending.append((size, part))
    return reduce(
        lambda late, early: _added(early[1], late), reversed(pending[:-1]), pending[-1][1]
    )


def _added(a: Sums, b: Sums) -> Sums:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def rbf_features(X: Float[Tensor, "N D"]) -> Float[Tensor, "N F"]:
    """[x, x², 1] of each row. Centre the inputs: exponents are differences."""
    return torch.cat([X, X.square(), X.new_ones(X.shape[0], 1)], 1)


def _size(device: torch.device, points: int, D: int) -> int:
    if device.type != "cuda":
        return CHUNK
    return gpu_size(free_memory(device), points, D)


def gpu_size(free: int, points: int, D: int) -> int:
    """Rows of a block for which half of so many free bytes are enough."""
    # For each point what a pass holds; for each input itself, two features, and copies of them.
    numbers = _HELD * (points + D)
    wide = max(points, D, 1)
    return max(CHUNK, min(_MOST, _NUMBERS // wide, free // (2 * 8 * max(numbers, 1))))


def free_memory(device: torch.device) -> int:
    """Bytes of a GPU that nobody uses."""
    free, _ = torch.cuda.mem_get_info(device)
    # What PyTorch has set aside and does not use is free too.
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
