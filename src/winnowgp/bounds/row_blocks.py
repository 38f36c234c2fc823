"""Rows in blocks, and kernel blocks whitened block by block."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import chain
from typing import TypeAlias, final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.data import Dataset, Source
from winnowgp.data.distributed import ProcessGroup
from winnowgp.linalg import cholesky, definite_cholesky, solve_lower

# Rows as a pass over them meets them: one block after another.


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
        self,
        source: Source,
        *,
        device: torch.device,
        size: int,
        process_group: ProcessGroup | None = None,
    ) -> None:
        self.N, self.P, self.observations = source.N, source.P, source.observations
        self._source, self._device, self._size = source, device, size
        self._process_group = source.process_group if process_group is None else process_group
        held = source.as_dataset()
        # Read by all processes together, and so the same rows in each, however much memory it has.
        first = source.part(torch.arange(min(source.N, CHUNK))) if held is None else held
        self.centre = first.X.mean(0).to(device)
        self.in_memory = all(isinstance(shard, Dataset) for shard in source.shards())
        self._cut = [list(shard) for shard in self._read_lanes()] if self.in_memory else None

    @classmethod
    def of(
        cls,
        source: Source,
        *,
        points: int = 0,
        device: torch.device | None = None,
        size: int | None = None,
        process_group: ProcessGroup | None = None,
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
        return cls(source, device=place, size=size, process_group=process_group)

    @cached_property
    def free(self) -> int:
        """Bytes of the GPU that nobody used when this was first asked for."""
        return free_memory(self._device)

    @property
    def device(self) -> torch.device:
        """Where blocks are."""
        return self._device

    def __iter__(self) -> Iterator[RowBlock]:
        return chain.from_iterable(self.shards())

    def shards(self) -> Iterator[Iterable[RowBlock]]:
        """Runs of rows whose sums are formed separately (`Source.lanes`)."""
        return self._read_lanes() if self._cut is None else iter(self._cut)

    def summed(self, shards: Iterable[Sums]) -> Sums:
        """Sums over the rows of all processes, from those of each lane of this one."""
        return self._process_group.all_reduce(*pairwise_sum(shards))

    def _read_lanes(self) -> Iterator[Iterator[RowBlock]]:
        shards = zip(self._source.shards(), self._source.shard_chunks(self._size), strict=True)
        first = 0
        for shard, chunks in shards:
            yield self._read(chunks, first)
            first += shard.N

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


# K_uf of all rows in whitened coordinates, one chunk of rows after another.


# Bytes that may be kept between passes to save another evaluation of the kernel; on a GPU a quarter
# of its free memory.
KEEP = 2**29
# Relative to the mean of diag K_uu. Part of the objective and of its gradient; at the 1e-12 of
# `linalg.cholesky` the gradient of close points is mostly rounding.
JITTER = 1e-8
# Rows of a panel: of 40, 48 and 64 the quickest for most M from 100 to 508, on one core with MKL;
# on an H200, of 48, 256 and all the quickest for 1024.
PANEL, GPU_PANEL = 48, 256


class ChunkedKernel(ABC):
    """Blocks of a kernel at fixed parameters, and the pull-back of their gradients onto those.

    A cotangent that is handed over may be overwritten.
    """

    @abstractmethod
    def uu(self) -> Float[Tensor, "M M"]:
        """K_uu without jitter."""

    @abstractmethod
    def uf(self, block: RowBlock) -> Float[Tensor, "M B"]:
        """K_uf of some rows."""

    @abstractmethod
    def ff(self, block: RowBlock) -> Float[Tensor, " B"]:
        """Prior variance of some rows."""

    @abstractmethod
    def pull_uf(
        self, block: RowBlock, cotangent: Float[Tensor, "M B"], Kuf: Float[Tensor, "M B"]
    ) -> None:
        """Add what ∂F/∂K_uf of some rows comes to; `Kuf` is what `uf` returned for them."""

    @abstractmethod
    def pull_ff(self, block: RowBlock, cotangent: Float[Tensor, " B"]) -> None:
        """Add what ∂F/∂k_ii of some rows comes to."""

    @abstractmethod
    def pulled(self) -> Sums:
        """What was added since it was asked last; sums over rows."""

    @abstractmethod
    def gradient(self, pulled: Sums, uu: Float[Tensor, "M M"]) -> tuple[Tensor, ...]:
        """∂F of each parameter.

        Args:
            pulled: over all rows.
            uu: ∂F/∂K_uu, symmetric.
        """


@dataclass(frozen=True, slots=True)
class WhitenedChunk:
    """Some rows: V = L⁻¹ K_uf, and t_i = k_ii − ‖v_i‖², the variance that the points leave open."""

    block: RowBlock
    Kuf: Float[Tensor, "M B"]
    V: Float[Tensor, "M B"]
    t: Float[Tensor, " B"]

    @property
    def rows(self) -> slice:
        """Which."""
        return self.block.rows


@final
class WhitenedChunks:
    """All rows, kept after the first pass over them if they are few enough.

    Args:
        kernel: at fixed parameters.
        blocks: the rows.
        L: factor of K_uu.
        L_inverse: its inverse, for whitening by products instead of solves: two to three times
            quicker, and as good only where the jitter is not small.
        keep: numbers that may be kept, of rows that are in memory; as many as suit the device if
            None.
        dtype: of what has as many columns as there are rows; that of L if None.
    """

    def __init__(
        self,
        kernel: ChunkedKernel,
        blocks: RowBlocks,
        *,
        L: Float[Tensor, "M M"],
        L_inverse: Float[Tensor, "M M"] | None = None,
        keep: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.dtype = dtype or L.dtype
        self.kernel, self.blocks, self.L, self._L_inverse = kernel, blocks, L, L_inverse
        self.N = blocks.N
        most = _keep(blocks) // self.dtype.itemsize if keep is None else keep
        self._keeps = blocks.in_memory and 2 * self.N * L.shape[0] <= most
        self._kept: list[list[WhitenedChunk]] | None = None

    @classmethod
    def for_gradients(
        cls,
        kernel: ChunkedKernel,
        blocks: RowBlocks,
        *,
        keep: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> "WhitenedChunks":
        """With the jitter that gradients need, 1e-8, and an inverse."""
        Kuu = kernel.uu()
        M = Kuu.shape[0]
        eye = torch.eye(M, dtype=Kuu.dtype, device=Kuu.device)
        shift = JITTER * Kuu.diagonal().mean() if M else 0.0
        L = definite_cholesky(Kuu + shift * eye)
        return cls(kernel, blocks, L=L, L_inverse=solve_lower(L, eye), keep=keep, dtype=dtype)

    @classmethod
    def for_values(
        cls, kernel: ChunkedKernel, blocks: RowBlocks, *, keep: int | None = None
    ) -> "WhitenedChunks":
        """With the smallest jitter that serves, and solves."""
        return cls(kernel, blocks, L=cholesky(kernel.uu()).L, keep=keep)

    @property
    def L_inverse(self) -> Float[Tensor, "M M"]:
        """Only where it was given."""
        assert self._L_inverse is not None
        return self._L_inverse

    def __iter__(self) -> Iterator[WhitenedChunk]:
        return chain.from_iterable(self._lanes())

    def summed(self, add: Callable[[Iterable[WhitenedChunk]], Sums]) -> Sums:
        """Sums over all rows, of all processes; `add` forms those of some of them."""
        return self.blocks.summed(add(shard) for shard in self._lanes())

    def _lanes(self) -> Iterator[Iterable[WhitenedChunk]]:
        if self._kept is not None:
            yield from self._kept
            return
        kept: list[list[WhitenedChunk]] = []
        for shard in self.blocks.shards():
            parts = map(self._evaluate, shard)
            if self._keeps:
                kept.append([])
                parts = _remembered(parts, kept[-1])
            yield parts
        if self._keeps:
            self._kept = kept

    def _evaluate(self, block: RowBlock) -> WhitenedChunk:
        Kuf = self.kernel.uf(block).to(self.dtype)
        V = self._whitened(Kuf)
        # t_i cannot be negative but for rounding.
        t = (self.kernel.ff(block) - V.square().sum(0)).clamp_min(0)
        return WhitenedChunk(block, Kuf, V, t)

    def _whitened(self, Kuf: Float[Tensor, "M B"]) -> Float[Tensor, "M B"]:
        if self._L_inverse is None:
            return solve_lower(self.L, Kuf)
        return lower_product(self._L_inverse.to(self.dtype), Kuf)


def _keep(blocks: RowBlocks) -> int:
    return blocks.free // 4 if blocks.device.type == "cuda" else KEEP


def _remembered(
    parts: Iterable[WhitenedChunk], memory: list[WhitenedChunk]
) -> Iterator[WhitenedChunk]:
    for part in parts:
        memory.append(part)
        yield part


def panels(M: int, size: int = PANEL) -> list[slice]:
    """Row panels that let a general product skip most of what a triangle does not need."""
    return [slice(start, min(start + size, M)) for start in range(0, M, size)]


def lower_product(L: Float[Tensor, "M M"], A: Float[Tensor, "M B"]) -> Float[Tensor, "M B"]:
    """L A of a lower-triangular L."""
    product = torch.empty_like(A)
    for panel in _panels_of(A):
        torch.mm(L[panel, : panel.stop], A[: panel.stop], out=product[panel])
    return product


def add_gram(total: Float[Tensor, "M M"], A: Float[Tensor, "M B"], V: Float[Tensor, "M B"]) -> None:
    """Add A Vᵀ, a symmetric matrix, to the lower panels of `total`; `from_panels` ends the sum."""
    for panel in _panels_of(V):
        add_product(total[panel, : panel.stop], A[panel], V[: panel.stop].mT)


def add_product(
    total: Float[Tensor, "m n"], A: Float[Tensor, "m B"], C: Float[Tensor, "B n"]
) -> None:
    """Add A C, which may be less precise than the sum is."""
    if A.dtype == total.dtype:
        total.addmm_(A, C)
    else:
        total.add_(A @ C)


def from_panels(total: Float[Tensor, "M M"]) -> Float[Tensor, "M M"]:
    """The symmetric matrix whose lower panels were summed."""
    return total.tril() + total.tril(-1).mT


def _panels_of(A: Float[Tensor, "M B"]) -> list[slice]:
    return panels(len(A), GPU_PANEL if A.is_cuda else PANEL)
