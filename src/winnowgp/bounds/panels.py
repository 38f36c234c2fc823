"""Products and solves with triangular and symmetric matrices, in panels of rows.

General products of panels skip most of the zeros of a triangle, or most of one half of a symmetric
matrix, and run at nearly the full rate of the device, which the routines for such matrices do not.
"""

from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.linalg import solve_lower

# Rows of a panel: of 40, 48 and 64 the fastest for most M from 100 to 508, on one core with MKL; on
# an H200, of 256, 512, 1024 and all rows the fastest for M = 4096. More than 16 panels are larger.
PANEL, GPU_PANEL, _GPU_PANELS = 48, 256, 16
# Rows of the triangles that are inverted to solve with a larger one; and the number of rows from
# which cuBLAS takes longer than that for many right-hand sides (of 1,024 rows and 131,072 columns
# 32 ms instead of 19 on a shared H200), and for an inverse.
_INVERTED, _MANY, _MANY_INVERTED = 128, 1024, 2048
# Largest ‖|T| |T⁻¹|‖ of a triangle T up to which products with its inverse are not refined.
_WELL_CONDITIONED = 1e3


def panels(M: int, size: int = PANEL) -> list[slice]:
    """Return row panels with which a general product skips most of the zeros of a triangle."""
    return [slice(start, min(start + size, M)) for start in range(0, M, size)]


def lower_product(L: Float[Tensor, "M M"], A: Float[Tensor, "M B"]) -> Float[Tensor, "M B"]:
    """Return L A for a lower-triangular L."""
    product = torch.empty_like(A)
    for panel in _panels_of(A):
        torch.mm(L[panel, : panel.stop], A[: panel.stop], out=product[panel])
    return product


def upper_product(L: Float[Tensor, "M M"], A: Float[Tensor, "M B"]) -> Float[Tensor, "M B"]:
    """Return Lᵀ A for a lower-triangular L."""
    product = torch.empty(A.shape, dtype=A.dtype, device=A.device)
    for panel in _panels_of(A):
        torch.mm(L[panel.start :, panel].mT, A[panel.start :], out=product[panel])
    return product


def triangular_product(
    U: Float[Tensor, "M M"], W: Float[Tensor, "M M"], *, count: int = 8
) -> Float[Tensor, "M M"]:
    """Return U W for upper-triangular matrices, in a third of the time of a dense product."""
    product = torch.zeros_like(W)
    for panel in panels(len(U), max(-(-len(U) // count), PANEL)):
        after = slice(panel.start, None)
        torch.mm(U[panel, after], W[after, after], out=product[panel, after])
    return product


def triangular_gram(U: Float[Tensor, "M M"], *, count: int = 8) -> Float[Tensor, "M M"]:
    """Return U Uᵀ for an upper-triangular matrix, in a quarter of the time of a dense product."""
    product = torch.empty_like(U)
    for panel in panels(len(U), max(-(-len(U) // count), PANEL)):
        rows = product[panel, : panel.stop]
        torch.mm(U[panel, panel.start :], U[: panel.stop, panel.start :].mT, out=rows)
        product[: panel.start, panel] = rows[:, : panel.start].mT
    return product


def inverse_of_factor(L: Float[Tensor, "M M"], *, overwrite: bool = False) -> Float[Tensor, "M M"]:
    """Return (L Lᵀ)⁻¹ = L⁻ᵀ L⁻¹, symmetric.

    Args:
        overwrite: whether the inverse takes the place of L, which is stored by columns; that saves
            memory.
    """
    if L.is_cuda:
        return inverse_in_panels(L, overwrite=overwrite)
    return torch.cholesky_inverse(L, out=L).mT if overwrite else torch.cholesky_inverse(L)


def inverse_in_panels(L: Float[Tensor, "M M"], *, overwrite: bool = False) -> Float[Tensor, "M M"]:
    """Return (L Lᵀ)⁻¹ by products of panels, in M³ operations with the inverse of L.

    cuSOLVER solves for the unit matrix, in seven times as many.
    """
    inverse = inverted(L)
    total = L.mT if overwrite else torch.empty_like(inverse)
    for panel in _panels_of(inverse):
        below, rows = inverse[panel.start :], total[panel, : panel.stop]
        torch.mm(below[:, panel].mT, below[:, : panel.stop], out=rows)
    return mirrored(total) if overwrite else from_panels(total)


def congruence(W: Float[Tensor, "M M"], S: Float[Tensor, "M M"]) -> Float[Tensor, "M M"]:
    """Return Wᵀ S W for a lower-triangular W and a symmetric S; of the result, half is computed."""
    half, total = upper_product(W, S), torch.empty_like(W, memory_format=torch.contiguous_format)
    for panel in _panels_of(W):
        after = slice(panel.start, None)
        rows = total[panel, : panel.stop]
        torch.mm(W[after, panel].mT, half[: panel.stop, after].mT, out=rows)
    return from_panels(total)


def add_gram(total: Float[Tensor, "M M"], A: Float[Tensor, "M B"], V: Float[Tensor, "M B"]) -> None:
    """Add the symmetric A Vᵀ to the lower panels of `total`; finish with `from_panels`."""
    for panel in _panels_of(V):
        add_product(total[panel, : panel.stop], A[panel], V[: panel.stop].mT)


def add_product(
    total: Float[Tensor, "m n"], A: Float[Tensor, "m B"], C: Float[Tensor, "B n"]
) -> None:
    """Add A C to `total`, which may have a higher precision."""
    if A.dtype == total.dtype:
        total.addmm_(A, C)
    else:
        total.add_(A @ C)


def from_panels(total: Float[Tensor, "M M"]) -> Float[Tensor, "M M"]:
    """Return the symmetric matrix whose lower panels were summed."""
    return total.tril() + total.tril(-1).mT


def mirrored(total: Float[Tensor, "M M"]) -> Float[Tensor, "M M"]:
    """Complete a symmetric matrix from its lower panels as `from_panels`, but in place."""
    for panel in _panels_of(total):
        total[: panel.start, panel] = total[panel, : panel.start].mT
        own = total[panel, panel]
        own.copy_(from_panels(own))
    return total


def squared_columns(V: Float[Tensor, "M B"]) -> Float[Tensor, " B"]:
    """Return ‖v_i‖² of each column; on a GPU without a matrix of squares."""
    return torch.linalg.vector_norm(V, dim=0).square() if V.is_cuda else V.square().sum(0)


@final
@dataclass(frozen=True, slots=True)
class TriangleInverses:
    """Inverses of the triangles of 128 rows on the diagonal of a factor L, for `whiten`."""

    inverses: Float[Tensor, "n m m"]
    refined: bool
    """Whether a product with an inverse T⁻¹ is refined once."""

    @classmethod
    def of(cls, L: Float[Tensor, "M M"]) -> "TriangleInverses":
        """Invert the triangles, and look at their condition numbers.

        The residual of T⁻¹ A is up to ‖|T| |T⁻¹|‖ times that of a solve. Triangles of candidates
        that nearly coincide have a norm of 1e6 and more; those of other candidates are well
        conditioned even if L is not.
        """
        inverses = _inverted_triangles(L, _INVERTED)
        triangles = _triangles(L, _INVERTED)
        condition = (triangles.abs() @ inverses.abs()).sum(2).amax() if len(L) else 0.0
        return cls(inverses, not bool(condition <= _WELL_CONDITIONED))

    def times(self, factor: Float[Tensor, ""]) -> "TriangleInverses":
        """Return the inverses for L divided by a factor."""
        return replace(self, inverses=self.inverses * factor)


def whiten(
    L: Float[Tensor, "M M"],
    A: Float[Tensor, "M B"],
    *,
    inverses: TriangleInverses | None = None,
) -> Float[Tensor, "M B"]:
    """Return L⁻¹ A for a lower-triangular L; may overwrite A.

    Args:
        L: the factor.
        A: the right-hand sides.
        inverses: `triangle_inverses` of L, from which many rows are solved for in panels: products
            with those before, then small triangles.
    """
    if inverses is None:
        return solve_lower(L, A)
    return solve_in_panels(L, A.contiguous(), size=_gpu_panel(len(L)), inverses=inverses)


def triangle_inverses(L: Float[Tensor, "M M"]) -> TriangleInverses | None:
    """Return inverses for `whiten`, once for any number of solves; None where they save no time."""
    return TriangleInverses.of(L) if L.is_cuda and len(L) >= _MANY else None


def solve_in_panels(
    L: Float[Tensor, "M M"],
    A: Float[Tensor, "M B"],
    *,
    size: int = PANEL,
    inverses: TriangleInverses | None = None,
) -> Float[Tensor, "M B"]:
    """Return L⁻¹ A for a lower-triangular L, overwriting A.

    Triangles on the diagonal are inverted. Unless all are well conditioned, each product with an
    inverse T⁻¹ is refined once,

        V = T⁻¹ A,   V ← V + T⁻¹ (A − T V),

    without which candidates that nearly coincide cost digits: for 200 of them on a line and little
    noise the bound changes by 5e-5 (relative), refined by 5e-10.

    Args:
        size: rows of a panel.
        inverses: those of the triangles, if they are known.
    """
    V = torch.empty_like(A)
    inverses = TriangleInverses.of(L) if inverses is None else inverses
    for panel in panels(len(L), max(size // _INVERTED, 1) * _INVERTED):
        if panel.start:
            A[panel].addmm_(L[panel, : panel.start], V[: panel.start], alpha=-1)
        _solve_triangles(L, A, V, inverses, panel.start // _INVERTED, -(-panel.stop // _INVERTED))
    return V


def _solve_triangles(
    L: Float[Tensor, "M M"],
    A: Float[Tensor, "M B"],
    V: Float[Tensor, "M B"],
    inverses: TriangleInverses,
    first: int,
    last: int,
) -> None:
    """Solve with the block of L that has these triangles on its diagonal, into V, by halves."""
    start, stop = first * _INVERTED, min(last * _INVERTED, len(L))
    if last - first == 1:
        inverse = inverses.inverses[first, : stop - start, : stop - start]
        own = A[start:stop]
        solved = torch.mm(inverse, own, out=V[start:stop])
        if inverses.refined:
            solved.addmm_(inverse, own.addmm_(L[start:stop, start:stop], solved, alpha=-1))
        return
    half = (first + last) // 2
    middle = half * _INVERTED
    _solve_triangles(L, A, V, inverses, first, half)
    A[middle:stop].addmm_(L[middle:stop, start:middle], V[start:middle], alpha=-1)
    _solve_triangles(L, A, V, inverses, half, last)


def inverted(L: Float[Tensor, "M M"]) -> Float[Tensor, "M M"]:
    """Return L⁻¹ for a lower-triangular L."""
    if L.is_cuda and len(L) >= _MANY_INVERTED:
        return invert_by_halves(L)
    return solve_lower(L, torch.eye(len(L), dtype=L.dtype, device=L.device))


def invert_by_halves(L: Float[Tensor, "M M"], size: int = 1024) -> Float[Tensor, "M M"]:
    """Return L⁻¹ for a lower-triangular L by products: its lower left is −L₂⁻¹ L₂₁ L₁⁻¹.

    Args:
        size: rows of the triangles that are inverted together, and of the panels of larger ones.
            With smaller ones, a GPU waits for launches.
    """
    inverse, half = torch.zeros_like(L), size
    for start, triangle in zip(range(0, len(L), size), _inverted_triangles(L, size), strict=True):
        own = inverse[start : start + size, start : start + size]
        own.copy_(triangle[: len(own), : len(own)])
    while half < len(L):
        for middle in range(half, len(L), 2 * half):
            above, below = slice(middle - half, middle), slice(middle, middle + half)
            first, second = inverse[above, above], inverse[below, below]
            left, corner = torch.empty_like(L[below, above]), inverse[below, above]
            for panel in panels(len(second), size):
                rows = L[below, above][: panel.stop]
                torch.mm(second[panel, : panel.stop], rows, out=left[panel])
            left.neg_()
            for panel in panels(half, size):
                after = slice(panel.start, None)
                torch.mm(left[:, after], first[after, panel], out=corner[:, panel])
        half *= 2
    return inverse


def _inverted_triangles(L: Float[Tensor, "M M"], size: int) -> Float[Tensor, "n m m"]:
    """Return the inverses of triangles on the diagonal of L, the last one completed by ones.

    Triangles of 128 rows are solved for, and joined by products.
    """
    least, blocks = min(size, _INVERTED), _triangles(L, size)
    inverse = _diagonal_blocks(blocks, least)
    eye = inverse.new_ones(least).diag()
    inverse = torch.linalg.solve_triangular(inverse, eye, upper=False)
    while inverse.shape[1] < size:
        inverse = _joined(blocks, inverse)
    return inverse


def _triangles(L: Float[Tensor, "M M"], size: int) -> Float[Tensor, "n m m"]:
    """Return the triangles on the diagonal of L, the last one completed by ones."""
    whole = len(L) // size * size
    blocks = _diagonal_blocks(L[None, :whole, :whole], size)
    if whole == len(L):
        return blocks
    last, rest = torch.eye(size, dtype=L.dtype, device=L.device), L[whole:, whole:]
    last[: len(rest), : len(rest)] = rest
    return torch.cat([blocks, last[None]])


def _joined(L: Float[Tensor, "n m m"], inverse: Float[Tensor, "k h h"]) -> Tensor:
    """Return the inverses of triangles of twice the size, from those of each two of them."""
    half = inverse.shape[1]
    joined = _diagonal_blocks(L, 2 * half)
    first, second = inverse[0::2], inverse[1::2]
    below = -second @ joined[:, half:, :half] @ first
    joined[:, :half, :half], joined[:, half:, half:] = first, second
    joined[:, half:, :half] = below
    return joined


def _diagonal_blocks(L: Float[Tensor, "n m m"], size: int) -> Float[Tensor, "k s s"]:
    """Return a copy of the blocks on the diagonals; `size` divides m."""
    shape = (L.shape[2] // size, size)
    blocks = L.unflatten(2, shape).unflatten(1, shape).diagonal(dim1=1, dim2=3)
    blocks = blocks.permute(0, 3, 1, 2).clone(memory_format=torch.contiguous_format)
    return blocks.flatten(0, 1)


def _panels_of(A: Float[Tensor, "M B"]) -> list[slice]:
    return panels(len(A), _gpu_panel(len(A)) if A.is_cuda else PANEL)


def _gpu_panel(M: int) -> int:
    """Return the rows of a panel on a GPU, a multiple of 256."""
    return GPU_PANEL * max(M // (GPU_PANEL * _GPU_PANELS), 1)
