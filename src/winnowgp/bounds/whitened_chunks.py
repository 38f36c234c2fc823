"""K_uf of all rows in whitened coordinates, one chunk of rows after another."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.linalg import cholesky, definite_cholesky, solve_lower

CHUNK = 2048
# Numbers that may be kept between passes to save another evaluation of the kernel: 512 MiB.
KEEP = 2**26
# Relative to the mean of diag K_uu. Part of the objective and of its gradient; at the 1e-12 of
# `linalg.cholesky` the gradient of close points is mostly rounding.
JITTER = 1e-8
# Rows of a panel: of 40, 48 and 64 the quickest for most M from 100 to 508, on one core with MKL.
PANEL = 48


class ChunkedKernel(ABC):
    """Blocks of a kernel at fixed parameters, and the pull-back of their gradients onto those.

    `pull_*` adds to what `gradient` returns; a cotangent passed to it may be overwritten.
    """

    @abstractmethod
    def uu(self) -> Float[Tensor, "M M"]:
        """K_uu without jitter."""

    @abstractmethod
    def uf(self, rows: slice) -> Float[Tensor, "M B"]:
        """K_uf of some rows."""

    @abstractmethod
    def ff(self, rows: slice) -> Float[Tensor, " B"]:
        """Prior variance of some rows."""

    @abstractmethod
    def pull_uu(self, cotangent: Float[Tensor, "M M"]) -> None:
        """Take ∂F/∂K_uu."""

    @abstractmethod
    def pull_uf(
        self, rows: slice, cotangent: Float[Tensor, "M B"], Kuf: Float[Tensor, "M B"]
    ) -> None:
        """Take ∂F/∂K_uf of some rows; `Kuf` is what `uf` returned for them."""

    @abstractmethod
    def pull_ff(self, rows: slice, cotangent: Float[Tensor, " B"]) -> None:
        """Take ∂F/∂k_ii of some rows."""

    @abstractmethod
    def gradient(self) -> tuple[Tensor, ...]:
        """What the pull-backs added up to, one tensor for each parameter."""


@dataclass(frozen=True, slots=True)
class WhitenedChunk:
    """Some rows: V = L⁻¹ K_uf, and t_i = k_ii − ‖v_i‖², the variance that the points leave open."""

    rows: slice
    Kuf: Float[Tensor, "M B"]
    V: Float[Tensor, "M B"]
    t: Float[Tensor, " B"]


@final
class WhitenedChunks:
    """The chunks of N rows, kept after the first pass over them if they are small enough together.

    Args:
        kernel: at fixed parameters.
        N: number of rows.
        L: factor of K_uu.
        L_inverse: its inverse, for whitening by products instead of solves: two to three times
            quicker, and as good only where the jitter is not small.
        chunk: rows held at once.
        keep: numbers that may be kept.
    """

    def __init__(
        self,
        kernel: ChunkedKernel,
        N: int,
        *,
        L: Float[Tensor, "M M"],
        L_inverse: Float[Tensor, "M M"] | None = None,
        chunk: int = CHUNK,
        keep: int = KEEP,
    ) -> None:
        self.kernel, self.N, self.L, self._L_inverse = kernel, N, L, L_inverse
        self._chunk = chunk
        self._keeps = 2 * N * L.shape[0] <= keep
        self._kept: tuple[WhitenedChunk, ...] | None = None

    @classmethod
    def for_gradients(
        cls, kernel: ChunkedKernel, N: int, *, chunk: int = CHUNK, keep: int = KEEP
    ) -> "WhitenedChunks":
        """With the jitter that gradients need, 1e-8, and an inverse."""
        Kuu = kernel.uu()
        M = Kuu.shape[0]
        eye = torch.eye(M, dtype=Kuu.dtype, device=Kuu.device)
        shift = JITTER * Kuu.diagonal().mean() if M else 0.0
        L = definite_cholesky(Kuu + shift * eye)
        return cls(kernel, N, L=L, L_inverse=solve_lower(L, eye), chunk=chunk, keep=keep)

    @classmethod
    def for_values(
        cls, kernel: ChunkedKernel, N: int, *, chunk: int = CHUNK, keep: int = KEEP
    ) -> "WhitenedChunks":
        """With the smallest jitter that serves, and solves."""
        return cls(kernel, N, L=cholesky(kernel.uu()).L, chunk=chunk, keep=keep)

    @property
    def L_inverse(self) -> Float[Tensor, "M M"]:
        """Only where it was given."""
        assert self._L_inverse is not None
        return self._L_inverse

    def __iter__(self) -> Iterator[WhitenedChunk]:
        if self._kept is not None:
            yield from self._kept
            return
        kept: list[WhitenedChunk] = []
        for start in range(0, self.N, self._chunk):
            part = self._evaluate(slice(start, min(start + self._chunk, self.N)))
            if self._keeps:
                kept.append(part)
            yield part
        if self._keeps:
            self._kept = tuple(kept)

    def _evaluate(self, rows: slice) -> WhitenedChunk:
        Kuf = self.kernel.uf(rows)
        V = self._whitened(Kuf)
        # t_i cannot be negative but for rounding.
        t = (self.kernel.ff(rows) - V.square().sum(0)).clamp_min(0)
        return WhitenedChunk(rows, Kuf, V, t)

    def _whitened(self, Kuf: Float[Tensor, "M B"]) -> Float[Tensor, "M B"]:
        if self._L_inverse is None:
            return solve_lower(self.L, Kuf)
        return lower_product(self._L_inverse, Kuf)


def panels(M: int) -> list[slice]:
    """Row panels that let a general product skip most of what a triangle does not need."""
    return [slice(start, min(start + PANEL, M)) for start in range(0, M, PANEL)]


def lower_product(L: Float[Tensor, "M M"], A: Float[Tensor, "M B"]) -> Float[Tensor, "M B"]:
    """L A of a lower-triangular L."""
    product = torch.empty_like(A)
    for panel in panels(len(A)):
        torch.mm(L[panel, : panel.stop], A[: panel.stop], out=product[panel])
    return product


def add_gram(total: Float[Tensor, "M M"], A: Float[Tensor, "M B"], V: Float[Tensor, "M B"]) -> None:
    """Add A Vᵀ, a symmetric matrix, to the lower panels of `total`; `from_panels` ends the sum."""
    for panel in panels(V.shape[0]):
        total[panel, : panel.stop].addmm_(A[panel], V[: panel.stop].mT)


def from_panels(total: Float[Tensor, "M M"]) -> Float[Tensor, "M M"]:
    """The symmetric matrix whose lower panels were summed."""
    return total.tril() + total.tril(-1).mT
