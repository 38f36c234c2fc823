"""Out-of-core passes over rows: blocks of rows, and K_uf whitened block by block.

`RowBlocks` cuts the rows of any source into blocks and sums over all processes that share it.
`WhitenedChunks` evaluates V = L⁻¹ K_uf block by block; the bounds of `collapsed` and `sites` are
sums over these chunks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import chain, pairwise
from math import ceil
from typing import Generic, TypeAlias, TypeVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds.panels import inverted, lower_product, squared_columns
from winnowgp.data import Dataset, Source
from winnowgp.data.noise import target_groups
from winnowgp.linalg import cholesky, definite_cholesky, parallel_map, solve_lower

# Rows of a block on a CPU: matrices with one column per row should stay in the caches.
CHUNK = 2048
# On a GPU: many rows, so that kernels run longer than their launches take. At most so many rows,
# since float32 sums over more of them lose digits; and so many elements of a matrix with one column
# per row.
_MAX_ROWS, _MAX_ELEMENTS = 262_144, 2**27
# A block may be so much longer if there is one block less then.
_LONGER = 1.25
# Groups that the blocks of a `Dataset` on a CPU are divided into, which threads may share; and the
# number of inducing points from which products are large enough to be shared instead.
_GROUPS, _MANY_POINTS = 8, 2048
# Elements of V Vᵀ summed over rows, N · M², from which threads share a pass. Smaller passes take
# milliseconds: two threads save a tenth of a fit with 64 points and 6,000 rows on a quiet machine,
# and beside busy processes each pass waits until the scheduler runs the last of its threads.
_SHARED = 2.5e8
# Matrices of M by the rows of a block that a pass holds in memory at once.
_MATRICES = 6
# Bytes that may be kept between passes to save another evaluation of the kernel; on a GPU a quarter
# of its free memory.
KEEP = 2**29
# Relative to the mean of diag K_uu. Part of the objective and of its gradient; with the 1e-12 of
# `linalg.cholesky` the gradient for close inducing points is mostly rounding error.
JITTER = 1e-8

_Chunk = TypeVar("_Chunk")

Sums: TypeAlias = tuple[Tensor, ...]
"""Sums over rows, which may be added over shards and processes."""


@dataclass(frozen=True, slots=True)
class RowBlock:
    """A block of consecutive rows."""

    rows: slice
    """Position of the block among the rows of this process."""
    X: Float[Tensor, "B D"]
    features: Float[Tensor, "B F"]
    """[x, x², 1] of the centred inputs: squared distances to any point are linear in them."""
    Y: Float[Tensor, "B P"]
    weights: Float[Tensor, " B"] | None
    noise: Float[Tensor, "B P"] | None = None
    """Known noise variances, if there are any."""

    def __len__(self) -> int:
        return len(self.X)


@final
class RowBlocks:
    """Repeatable iteration over the rows of a source in blocks.

    A `Dataset` is cut once. Other sources are read again in each pass, so that memory is that of
    one block for any number of rows. When several processes share a source, each of them passes
    over its own rows, and `summed` returns the sums over all rows to all of them.

    Args:
        source: the rows.
        device: device of the blocks.
        size: rows per block.
        groups: number of shards that a source without shards is divided into, for `parallel_map`.
    """

    def __init__(
        self,
        source: Source,
        *,
        device: torch.device,
        size: int,
        groups: int = 1,
    ) -> None:
        self.N, self.P, self.observations = source.N, source.P, source.observations
        self.groups = target_groups(source)
        self._source, self._device, self._size = source, device, size
        dataset = source.as_dataset()
        # Collective read: all processes centre by the same rows, whatever their memory.
        first = source.part(torch.arange(min(source.N, CHUNK))) if dataset is None else dataset
        self.centre = first.X.mean(0).to(device)
        self.in_memory = all(isinstance(shard, Dataset) for shard in source.shards())
        self._blocks = [list(shard) for shard in self._read_shards()] if self.in_memory else None
        if self._blocks is not None and len(self._blocks) == 1:
            self._blocks = _divided(self._blocks[0], groups)

    @classmethod
    def of(
        cls,
        source: Source,
        *,
        points: int = 0,
        device: torch.device | None = None,
        size: int | None = None,
    ) -> "RowBlocks":
        """Return blocks whose size suits the device and its free memory.

        Args:
            source: the rows.
            points: largest number of inducing points used with the blocks.
            device: device of the blocks; that of the source if None.
            size: rows per block, instead of the size chosen for the device.
        """
        device = source.device if device is None else device
        if size is None:
            size = block_size(device, points, source.D)
            if device.type == "cuda":
                # Blocks of equal length: a short last one would be slow for its rows.
                size = ceil(source.N / ceil(max(source.N, 1) / (_LONGER * size)))
        groups = _GROUPS if device.type == "cpu" and points < _MANY_POINTS else 1
        return cls(source, device=device, size=size, groups=groups)

    @cached_property
    def free(self) -> int:
        """Free bytes of the GPU when this property was first read."""
        return free_memory(self._device)

    @property
    def device(self) -> torch.device:
        """Device of the blocks."""
        return self._device

    def __iter__(self) -> Iterator[RowBlock]:
        return chain.from_iterable(self.shards())

    @cached_property
    def only(self) -> RowBlock | None:
        """The block of all rows of all processes, if there is a single one and it is in memory."""
        if self._blocks is None or self._source.process_group.world_size > 1:
            return None
        blocks = [block for shard in self._blocks for block in shard]
        return blocks[0] if len(blocks) == 1 else None

    def worth_sharing(self, points: int) -> bool:
        """Return whether a pass with so many inducing points is long enough for several threads."""
        return float(self.N) * points**2 >= _SHARED

    def shards(self) -> Iterator[Iterable[RowBlock]]:
        """Iterate over shards: runs of rows whose sums are formed separately (`Source.shards`)."""
        return self._read_shards() if self._blocks is None else iter(self._blocks)

    def summed(self, shards: Iterable[Sums]) -> Sums:
        """Return sums over the rows of all processes, from the sums of each shard of this one."""
        return self._source.process_group.all_reduce(*pairwise_sum(shards))

    def mapped(self, sums: Callable[[Iterable[RowBlock]], Sums], *, parallel: bool = True) -> Sums:
        """Return sums over the rows of all processes; `sums` forms those of one shard.

        Args:
            sums: called on several threads at once if the rows are in memory.
            parallel: whether it may be.
        """
        if self._blocks is None:
            return self.summed(map(sums, self.shards()))
        return self.summed(parallel_map(sums, self._blocks, parallel=parallel))

    def _read_shards(self) -> Iterator[Iterator[RowBlock]]:
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
            stop = first + len(X)
            yield RowBlock(slice(first, stop), X, features, rows.Y, rows.weights, rows.noise)
            first = stop


def _divided(blocks: list[RowBlock], groups: int) -> list[list[RowBlock]]:
    """Return consecutive blocks in at most so many groups of nearly equal length."""
    count = max(1, min(groups, len(blocks)))
    edges = [round(i * len(blocks) / count) for i in range(count + 1)]
    return [blocks[a:b] for a, b in pairwise(edges)]


def pairwise_sum(terms: Iterable[Sums]) -> Sums:
    """Return ((a + b) + (c + d)) + …, in the order of a balanced binary tree.

    The order makes sums over 1, 2, 4 or 8 processes equal to the last digit.
    """
    pending: list[tuple[int, Sums]] = []
    for term in terms:
        size = 1
        while pending and pending[-1][0] == size:
            term = _add(pending.pop()[1], term)
            size *= 2
        pending.append((size, term))
    return reduce(lambda late, early: _add(early[1], late), reversed(pending[:-1]), pending[-1][1])


def _add(a: Sums, b: Sums) -> Sums:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def rbf_features(X: Float[Tensor, "N D"]) -> Float[Tensor, "N F"]:
    """Return [x, x², 1] of each row; centre X first, since exponents are differences of these."""
    return torch.cat([X, X.square(), X.new_ones(X.shape[0], 1)], 1)


def block_size(device: torch.device, points: int, D: int) -> int:
    """Return the number of rows that are evaluated at once on a device."""
    if device.type != "cuda":
        return CHUNK
    return gpu_size(free_memory(device), points, D)


def gpu_size(free: int, points: int, D: int) -> int:
    """Return the rows of a block that use at most half of the free bytes of a GPU."""
    # Per row: the matrices of a pass for each inducing point; each input, its features and copies.
    numbers = _MATRICES * (points + D)
    width = max(points, D, 1)
    return max(CHUNK, min(_MAX_ROWS, _MAX_ELEMENTS // width, free // (2 * 8 * max(numbers, 1))))


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a GPU, including unused memory reserved by PyTorch."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


# K_uf of all rows in whitened coordinates.


class ChunkedKernel(ABC):
    """Kernel blocks at fixed parameters, with the pull-back of gradients onto these parameters.

    Methods may overwrite the cotangents that they receive.
    """

    parallel: bool = False
    """Whether forks may be used on several threads at once."""

    @abstractmethod
    def fork(self) -> "ChunkedKernel":
        """Return the same kernel with sums of its own, which are zero."""

    @abstractmethod
    def uu(self) -> Float[Tensor, "M M"]:
        """Return K_uu without jitter."""

    @abstractmethod
    def uf(self, block: RowBlock) -> Float[Tensor, "M B"]:
        """Return K_uf of a block."""

    @abstractmethod
    def ff(self, block: RowBlock) -> Float[Tensor, " B"]:
        """Return the prior variance of each row of a block."""

    @abstractmethod
    def pull_uf(
        self, block: RowBlock, cotangent: Float[Tensor, "M B"], Kuf: Float[Tensor, "M B"]
    ) -> None:
        """Add the pull-back of ∂F/∂K_uf of a block; `Kuf` is the result of `uf` for it."""

    @abstractmethod
    def pull_ff(self, block: RowBlock, cotangent: Float[Tensor, " B"]) -> None:
        """Add the pull-back of ∂F/∂k_ii of a block."""

    @abstractmethod
    def pulled(self) -> Sums:
        """Return the sums over rows accumulated since the last call."""

    @abstractmethod
    def gradient(self, pulled: Sums, uu: Float[Tensor, "M M"]) -> tuple[Tensor, ...]:
        """Return ∂F with respect to each parameter.

        Args:
            pulled: the sums of `pulled` over all rows.
            uu: ∂F/∂K_uu, symmetric.
        """


class DifferentiableChunks(ChunkedKernel):
    """A kernel whose derivatives in its parameters can be multiplied with vectors."""

    @abstractmethod
    def products(self, v: Float[Tensor, "M P"]) -> Float[Tensor, "q M P"]:
        """Return (∂K_uu/∂θ_i) v for each parameter θ_i, in the order of `gradient`."""


class KeptChunks(ABC, Generic[_Chunk]):
    """Chunks evaluated from blocks of rows, kept in memory after the first pass if it fits.

    Args:
        blocks: the rows.
        keep: whether to keep chunks of rows that are in memory.
        parallel: whether threads may share the shards of rows that are in memory.
    """

    def __init__(self, blocks: RowBlocks, *, keep: bool, parallel: bool) -> None:
        self.blocks, self._parallel = blocks, parallel
        self._keep = keep and blocks.in_memory
        self._shards: list[list[_Chunk]] | None = None

    @abstractmethod
    def _evaluate(self, block: RowBlock) -> _Chunk:
        """Evaluate a block."""

    def summed(self, sums: Callable[[Iterable[_Chunk]], Sums]) -> Sums:
        """Return sums over the rows of all processes; `sums` forms the sums of one shard."""
        if not self.blocks.in_memory:
            return self.blocks.summed(sums(shard) for shard in self._evaluated())
        try:
            shards = parallel_map(sums, self._evaluated(), parallel=self._parallel)
        except BaseException:
            # Chunks that were to be kept may be incomplete.
            self._shards = None
            raise
        return self.blocks.summed(shards)

    def _evaluated(self) -> Iterator[Iterable[_Chunk]]:
        if self._shards is not None:
            yield from self._shards
            return
        shards: list[list[_Chunk]] = []
        for shard in self.blocks.shards():
            chunks = map(self._evaluate, shard)
            if self._keep:
                shards.append([])
                chunks = _recorded(chunks, shards[-1])
            yield chunks
        if self._keep:
            self._shards = shards


def _recorded(chunks: Iterable[_Chunk], record: list[_Chunk]) -> Iterator[_Chunk]:
    for chunk in chunks:
        record.append(chunk)
        yield chunk


def keep_bytes(blocks: RowBlocks) -> int:
    """Return the bytes of chunks that may be kept in memory."""
    return blocks.free // 4 if blocks.device.type == "cuda" else KEEP


@dataclass(frozen=True, slots=True)
class WhitenedChunk:
    """V = L⁻¹ K_uf of a block, and the unexplained variance t_i = k_ii − ‖v_i‖² of its rows."""

    block: RowBlock
    Kuf: Float[Tensor, "M B"]
    V: Float[Tensor, "M B"]
    t: Float[Tensor, " B"]

    @property
    def rows(self) -> slice:
        """Position of the block among the rows of this process."""
        return self.block.rows


@final
class WhitenedChunks(KeptChunks[WhitenedChunk]):
    """The whitened chunks of all rows, kept in memory after the first pass if they fit.

    Args:
        kernel: kernel at fixed parameters.
        blocks: the rows.
        L: factor of K_uu.
        L_inverse: inverse of L, for whitening by products instead of solves. Products are two to
            three times faster, and as accurate only if the jitter is not small.
        keep: largest number of elements to keep if the rows are in memory; chosen for the device
            if None.
        dtype: dtype of the matrices with one column per row; that of L if None.
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
        self.kernel, self.L, self._L_inverse = kernel, L, L_inverse
        self.N, M = blocks.N, len(L)
        limit = keep_bytes(blocks) // self.dtype.itemsize if keep is None else keep
        parallel = kernel.parallel and blocks.worth_sharing(M)
        super().__init__(blocks, keep=limit >= 2 * self.N * M, parallel=parallel)

    @classmethod
    def for_gradients(
        cls,
        kernel: ChunkedKernel,
        blocks: RowBlocks,
        *,
        keep: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> "WhitenedChunks":
        """Return chunks for a bound and its gradient: jitter 1e-8, whitened by an inverse."""
        Kuu = kernel.uu()
        M = Kuu.shape[0]
        eye = torch.eye(M, dtype=Kuu.dtype, device=Kuu.device)
        shift = JITTER * Kuu.diagonal().mean() if M else 0.0
        L = definite_cholesky(Kuu + shift * eye)
        return cls(kernel, blocks, L=L, L_inverse=inverted(L), keep=keep, dtype=dtype)

    @classmethod
    def for_values(
        cls, kernel: ChunkedKernel, blocks: RowBlocks, *, keep: int | None = None
    ) -> "WhitenedChunks":
        """Return chunks for values only: the smallest jitter that works, whitened by solves."""
        return cls(kernel, blocks, L=cholesky(kernel.uu()).L, keep=keep)

    @classmethod
    def for_all_rows(cls, kernel: ChunkedKernel, blocks: RowBlocks) -> "WhitenedChunks":
        """Return the one chunk of rows that all are inducing points: V = Lᵀ, jitter 1e-8 and t = 0.

        Args:
            kernel: a kernel whose inducing points are the rows.
            blocks: one block.
        """
        K = kernel.uu()
        K.diagonal().add_(JITTER * K.diagonal().mean())
        chunks = cls(kernel, blocks, L=definite_cholesky(K))
        (block,) = blocks
        t = torch.zeros_like(block.X[:, 0])
        chunks._shards = [[WhitenedChunk(block, K, chunks.L.mT, t)]]
        return chunks

    def followed_by(self, V: Float[Tensor, "M R"]) -> "WhitenedChunks":
        """Return these chunks, in memory, followed by R rows that are a function of u alone.

        They are combinations of the inducing values, with weights V in whitened coordinates.
        """
        longer = WhitenedChunks(self.kernel, self.blocks, L=self.L, L_inverse=self._L_inverse)
        rows, nothing = slice(self.N, self.N + V.shape[1]), V.new_zeros(V.shape[1], 0)
        block = RowBlock(rows, nothing, nothing, nothing, None)
        last = WhitenedChunk(block, V, V, V.new_zeros(V.shape[1]))
        longer._shards = [*map(list, self._evaluated()), [last]]
        longer.N = rows.stop
        return longer

    @property
    def L_inverse(self) -> Float[Tensor, "M M"]:
        """Inverse of L, which must have been passed to the constructor."""
        assert self._L_inverse is not None
        return self._L_inverse

    def __iter__(self) -> Iterator[WhitenedChunk]:
        return chain.from_iterable(self._evaluated())

    def _evaluate(self, block: RowBlock) -> WhitenedChunk:
        Kuf = self.kernel.uf(block).to(self.dtype)
        if self._L_inverse is None:
            V = solve_lower(self.L, Kuf)
        else:
            V = lower_product(self._L_inverse.to(self.dtype), Kuf)
        # t_i is non-negative up to rounding.
        t = (self.kernel.ff(block) - squared_columns(V)).clamp_min(0)
        return WhitenedChunk(block, Kuf, V, t)
