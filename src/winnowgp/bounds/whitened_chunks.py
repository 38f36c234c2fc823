"""K_uf of all rows in whitened coordinates, one chunk of rows after another."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds.row_blocks import RowBlock, RowBlocks, Sums
from winnowgp.linalg import cholesky, definite_cholesky, solve_lower

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
        return self.blocks.summed(add(lane) for lane in self._lanes())

    def _lanes(self) -> Iterator[Iterable[WhitenedChunk]]:
        if self._kept is not None:
            yield from self._kept
            return
        kept: list[list[WhitenedChunk]] = []
        for lane in self.blocks.lanes():
            parts = map(self._evaluate, lane)
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
