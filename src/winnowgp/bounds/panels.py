"""Products and solves with triangular and symmetric matrices, in panels of rows.

General products of panels skip most of the zeros of a triangle, or most of one half of a symmetric
matrix, and run at nearly the full rate of the device, which the routines for such matrices do not.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.linalg import solve_lower

# Rows of a panel: of 40, 48 and 64 the fastest for most M from 100 to 508, on one core with MKL; on
# an H200, of 256, 512, 1024 and all rows the fastest for M = 4096.
PANEL, GPU_PANEL = 48, 256
# Rows of the triangles that are inverted to solve with a larger one, and the number of rows from
# which cuBLAS takes longer than that.
_INVERTED, _MANY = 64, 2048


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


def inverse_of_factor(L: Float[Tensor, "M M"]) -> Float[Tensor, "M M"]:
    """Return (L Lᵀ)⁻¹ = L⁻ᵀ L⁻¹, symmetric."""
    return inverse_in_panels(L) if L.is_cuda else torch.cholesky_inverse(L)


def inverse_in_panels(L: Float[Tensor, "M M"]) -> Float[Tensor, "M M"]:
    """Return (L Lᵀ)⁻¹ by products of panels, two thirds of cuSOLVER's time for M = 4096."""
    inverse = solve_lower(L, torch.eye(len(L), dtype=L.dtype, device=L.device))
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


def whiten(L: Float[Tensor, "M M"], A: Float[Tensor, "M B"]) -> Float[Tensor, "M B"]:
    """Return L⁻¹ A for a lower-triangular L; may overwrite A.

    On a GPU many rows are solved for in panels: products with those before, then small triangles.
    """
    if not A.is_cuda or len(L) < _MANY:
        return solve_lower(L, A)
    return solve_in_panels(L, A.contiguous(), GPU_PANEL)


def solve_in_panels(
    L: Float[Tensor, "M M"], A: Float[Tensor, "M B"], size: int = PANEL
) -> Float[Tensor, "M B"]:
    """Return L⁻¹ A for a lower-triangular L, overwriting A.

    Triangles on the diagonal are inverted, and each product with an inverse T⁻¹ is refined once,

        V = T⁻¹ A,   V ← V + T⁻¹ (A − T V),

    without which candidates that nearly coincide cost digits: for 200 of them on a line and little
    noise the bound changes by 5e-5 (relative), refined by 5e-10.

    Args:
        size: rows of a panel.
    """
    inverses = _inverted_triangles(L)
    for panel in panels(len(L), max(size // _INVERTED, 1) * _INVERTED):
        if panel.start:
            A[panel].addmm_(L[panel, : panel.start], A[: panel.start], alpha=-1)
        _solve_triangles(L, A, inverses, panel.start // _INVERTED, -(-panel.stop // _INVERTED))
    return A


def _solve_triangles(
    L: Float[Tensor, "M M"],
    A: Float[Tensor, "M B"],
    inverses: list[Tensor],
    first: int,
    last: int,
) -> None:
    """Solve with the block of L that has these triangles on its diagonal, in place, by halves."""
    start, stop = first * _INVERTED, min(last * _INVERTED, len(L))
    if last - first == 1:
        inverse, own = inverses[first], A[start:stop]
        V = inverse @ own
        V.addmm_(inverse, own.addmm_(L[start:stop, start:stop], V, alpha=-1))
        own.copy_(V)
        return
    half = (first + last) // 2
    middle = half * _INVERTED
    _solve_triangles(L, A, inverses, first, half)
    A[middle:stop].addmm_(L[middle:stop, start:middle], A[start:middle], alpha=-1)
    _solve_triangles(L, A, inverses, half, last)


def _inverted_triangles(L: Float[Tensor, "M M"]) -> list[Tensor]:
    """Return the inverses of triangles of 64 rows on the diagonal of L, the last one smaller."""
    M = len(L)
    whole = M // _INVERTED
    triangles = [L[p, p] for p in panels(M, _INVERTED)]
    inverses: list[Tensor] = []
    if whole:
        eye = torch.eye(_INVERTED, dtype=L.dtype, device=L.device)
        stacked = torch.stack(triangles[:whole])
        inverses += torch.linalg.solve_triangular(stacked, eye, upper=False).unbind()
    for triangle in triangles[whole:]:
        eye = torch.eye(len(triangle), dtype=L.dtype, device=L.device)
        inverses.append(torch.linalg.solve_triangular(triangle, eye, upper=False))
    return inverses


def _panels_of(A: Float[Tensor, "M B"]) -> list[slice]:
    return panels(len(A), GPU_PANEL if A.is_cuda else PANEL)
