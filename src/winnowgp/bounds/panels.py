"""Products and solves with triangular and symmetric matrices, in panels of rows.

General products of panels skip most of the zeros of a triangle, or most of one half of a symmetric
matrix, and run at nearly the full rate of the device, which the routines for such matrices do not.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.linalg import solve_lower

# Rows of a panel: of 40, 48 and 64 the fastest for most M from 100 to 508, on one core with MKL; on
# an H200, of 256, 512, 1024 and all rows the fastest for M = 4096.
PANEL, GPU_PANEL = 48, 256
# Rows of the triangles that are inverted to solve with a larger one; and the number of rows from
# which cuBLAS takes longer than that for many right-hand sides (of 1,024 rows and 131,072 columns
# 32 ms instead of 19 on a shared H200), and for an inverse.
_INVERTED, _MANY, _MANY_INVERTED = 128, 1024, 2048


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


def inverse_of_factor(L: Float[Tensor, "M M"]) -> Float[Tensor, "M M"]:
    """Return (L Lᵀ)⁻¹ = L⁻ᵀ L⁻¹, symmetric."""
    return inverse_in_panels(L) if L.is_cuda else torch.cholesky_inverse(L)


def inverse_in_panels(L: Float[Tensor, "M M"]) -> Float[Tensor, "M M"]:
    """Return (L Lᵀ)⁻¹ by products of panels."""
    inverse = inverted(L)
    total = torch.zeros_like(L)
    for panel in _panels_of(L):
        below = inverse[panel.start :]
        torch.mm(below[:, panel.start :].mT, below[:, panel], out=total[panel.start :, panel])
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


def squared_columns(V: Float[Tensor, "M B"]) -> Float[Tensor, " B"]:
    """Return ‖v_i‖² of each column; on a GPU without a matrix of squares."""
    return torch.linalg.vector_norm(V, dim=0).square() if V.is_cuda else V.square().sum(0)


def whiten(
    L: Float[Tensor, "M M"],
    A: Float[Tensor, "M B"],
    *,
    inverses: Float[Tensor, "n m m"] | None = None,
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
    return solve_in_panels(L, A.contiguous(), size=GPU_PANEL, inverses=inverses)


def triangle_inverses(L: Float[Tensor, "M M"]) -> Float[Tensor, "n m m"] | None:
    """Return inverses for `whiten`, once for any number of solves; None where they save no time."""
    return _inverted_triangles(L, _INVERTED) if L.is_cuda and len(L) >= _MANY else None


def solve_in_panels(
    L: Float[Tensor, "M M"],
    A: Float[Tensor, "M B"],
    *,
    size: int = PANEL,
    inverses: Float[Tensor, "n m m"] | None = None,
) -> Float[Tensor, "M B"]:
    """Return L⁻¹ A for a lower-triangular L, overwriting A.

    Triangles on the diagonal are inverted, and each product with an inverse T⁻¹ is refined once,

        V = T⁻¹ A,   V ← V + T⁻¹ (A − T V),

    without which candidates that nearly coincide cost digits: for 200 of them on a line and little
    noise the bound changes by 5e-5 (relative), refined by 5e-10.

    Args:
        size: rows of a panel.
        inverses: those of the triangles, if they are known.
    """
    V = torch.empty_like(A)
    triangles = (_inverted_triangles(L, _INVERTED) if inverses is None else inverses).unbind()
    for panel in panels(len(L), max(size // _INVERTED, 1) * _INVERTED):
        if panel.start:
            A[panel].addmm_(L[panel, : panel.start], V[: panel.start], alpha=-1)
        _solve_triangles(L, A, V, triangles, panel.start // _INVERTED, -(-panel.stop // _INVERTED))
    return V


def _solve_triangles(
    L: Float[Tensor, "M M"],
    A: Float[Tensor, "M B"],
    V: Float[Tensor, "M B"],
    inverses: Sequence[Tensor],
    first: int,
    last: int,
) -> None:
    """Solve with the block of L that has these triangles on its diagonal, into V, by halves."""
    start, stop = first * _INVERTED, min(last * _INVERTED, len(L))
    if last - first == 1:
        inverse, own = inverses[first][: stop - start, : stop - start], A[start:stop]
        solved = torch.mm(inverse, own, out=V[start:stop])
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


def invert_by_halves(L: Float[Tensor, "M M"], size: int = 512) -> Float[Tensor, "M M"]:
    """Return L⁻¹ for a lower-triangular L by products: its lower left is −L₂⁻¹ L₂₁ L₁⁻¹.

    Args:
        size: rows of the triangles that are inverted together.
    """
    inverse = torch.zeros_like(L)
    for start, triangle in zip(range(0, len(L), size), _inverted_triangles(L, size), strict=True):
        own = inverse[start : start + size, start : start + size]
        own.copy_(triangle[: len(own), : len(own)])
    while size < len(L):
        for middle in range(size, len(L), 2 * size):
            above, below = slice(middle - size, middle), slice(middle, middle + size)
            left = -inverse[below, below] @ L[below, above]
            torch.mm(left, inverse[above, above], out=inverse[below, above])
        size *= 2
    return inverse


def _inverted_triangles(L: Float[Tensor, "M M"], size: int) -> Float[Tensor, "n m m"]:
    """Return the inverses of triangles on the diagonal of L, the last one completed by ones.

    Triangles of 128 rows are solved for, and joined by products.
    """
    M = len(L)
    padded = torch.eye(-(-M // size) * size, dtype=L.dtype, device=L.device)
    padded[:M, :M] = L
    least = min(size, _INVERTED)
    small = _diagonal_blocks(padded, least)
    inverse = torch.linalg.solve_triangular(small, small.new_ones(least).diag(), upper=False)
    while inverse.shape[1] < size:
        inverse = _joined(padded, inverse)
    return inverse


def _joined(L: Float[Tensor, "M M"], inverse: Float[Tensor, "m h h"]) -> Tensor:
    """Return the inverses of triangles of twice the size, from those of each two of them."""
    half = inverse.shape[1]
    joined = _diagonal_blocks(L, 2 * half)
    first, second = inverse[0::2], inverse[1::2]
    below = -second @ joined[:, half:, :half] @ first
    joined[:, :half, :half], joined[:, half:, half:] = first, second
    joined[:, half:, :half] = below
    return joined


def _diagonal_blocks(L: Float[Tensor, "M M"], size: int) -> Float[Tensor, "n m m"]:
    """Return a copy of the blocks on the diagonal; `size` divides M."""
    blocks = L.unflatten(1, (-1, size)).unflatten(0, (-1, size)).diagonal(dim1=0, dim2=2)
    return blocks.permute(2, 0, 1).clone(memory_format=torch.contiguous_format)


def _panels_of(A: Float[Tensor, "M B"]) -> list[slice]:
    return panels(len(A), GPU_PANEL if A.is_cuda else PANEL)
