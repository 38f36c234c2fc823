"""Linear algebra with no Gaussian process in sight."""

from dataclasses import dataclass
from math import isfinite

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from winnowgp.errors import NotPositiveDefiniteError

__all__ = [
    "Cholesky",
    "cholesky",
    "definite_cholesky",
    "half_log_det",
    "jitter_ladder",
    "rank_one_update",
    "residuals_and_duals",
    "solve_lower",
    "squared_norm",
    "subset_factors",
]


# The one Cholesky factorisation of the library, with a jitter that can be seen.
#
# Kernel matrices of close or duplicated points are singular to working precision. Each
# factorisation therefore adds `jitter · mean(diag A)` to the diagonal, starting at the foot of a
# ladder and climbing only where the factorisation fails. The jitter used is part of the result.
#
# The foot of the ladder is not zero: a factorisation that just succeeds at a condition number of
# 1e16 carries no correct digits, and a sparse GP whose inducing variables are observed with a
# little noise of their own is still a lower bound on the evidence. It is low, because the bound
# feels it: with smooth kernels, points close together carry information in differences as small as
# their conditional variance, and a jitter of 1e-8 can cost a tenth of a nat where 1e-12 costs 1e-5.


_LADDERS = {
    torch.float64: (1e-12, 1e-11, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5),
    torch.float32: (1e-6, 1e-5, 1e-4, 1e-3),
}


@dataclass(frozen=True, slots=True)
class Cholesky:
    """A lower factor `L Lᵀ = A + jitter · mean(diag A) · I` and the relative jitter it took."""

    L: Float[Tensor, "*batch M M"]
    jitter: Float[Tensor, "*batch"]


def jitter_ladder(dtype: torch.dtype) -> tuple[float, ...]:
    """Relative jitters tried for a dtype, smallest first.

    >>> jitter_ladder(torch.float64)[0]
    1e-12
    """
    return _LADDERS[dtype]


def cholesky(A: Float[Tensor, "*batch M M"]) -> Cholesky:
    """Lower Cholesky factor of a symmetric positive semi-definite matrix, O(M³).

    Only the batch elements that fail climb the ladder. Differentiable in `A`; the jitter is
    treated as a constant.

    Raises:
        NotPositiveDefiniteError: the last rung failed, or `A` is not finite.
    """
    M = A.shape[-1]
    scale = A.detach().diagonal(dim1=-2, dim2=-1).mean(-1) if M else A.new_ones(A.shape[:-2])
    if not torch.isfinite(scale).all():
        raise NotPositiveDefiniteError("a covariance matrix has entries that are not finite")
    eye = torch.eye(M, dtype=A.dtype, device=A.device)
    rungs = jitter_ladder(A.dtype)
    jitter = torch.full_like(scale, rungs[0])
    for rung in rungs:
        L, info = torch.linalg.cholesky_ex(A + (jitter * scale)[..., None, None] * eye)
        failed = info != 0
        if not failed.any():
            return Cholesky(L, jitter)
        jitter = torch.where(failed, 10 * rung, jitter)
    raise NotPositiveDefiniteError(
        f"a {M} by {M} covariance matrix could not be factorised with a jitter of {rungs[-1]:.0e} "
        "of its mean diagonal; are kernel variance and lengthscales finite and positive?"
    )


def definite_cholesky(A: Float[Tensor, "*batch M M"]) -> Float[Tensor, "*batch M M"]:
    """Lower factor of a matrix of the form I + V Vᵀ, which needs no jitter.

    Raises:
        NotPositiveDefiniteError: `A` is not finite, or not what it was said to be.
    """
    L, info = torch.linalg.cholesky_ex(A)
    # Read once: a GPU is waited for.
    pivots = L.diagonal(dim1=-2, dim2=-1).sum(-1).masked_fill(info != 0, torch.nan)
    if not isfinite(pivots.sum().item()):
        raise NotPositiveDefiniteError("a matrix of the form I + V Vᵀ is not finite")
    return L


# Three lines of triangular algebra that every bound shares.


def solve_lower(L: Float[Tensor, "*#batch M M"], A: Float[Tensor, "*#batch M C"]) -> Tensor:
    """`L⁻¹ A` for a lower-triangular `L`.

    As `(Aᵀ L⁻ᵀ)ᵀ`: LAPACK wants columns and `A` mostly comes in rows, so that solving from the left
    first copies it, a fifth of the time for 200 by 2048.
    """
    return torch.linalg.solve_triangular(L.mT, A.mT, upper=True, left=False).mT


def half_log_det(L: Float[Tensor, "*batch M M"]) -> Float[Tensor, "*batch"]:
    """`½ log |L Lᵀ| = Σ log L_ii`."""
    return L.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def squared_norm(A: Float[Tensor, "*batch M C"]) -> Float[Tensor, "*batch"]:
    """Squared Frobenius norm `Σ_ij A_ij²`."""
    return A.square().sum((-2, -1))


# Row subsets of a lower-triangular L: orthonormal bases, residuals, duals, and their updates.
#
# With A = L Lᵀ, the rows l_k of L are vectors whose inner products are the entries of A. For a
# subset
# I of the rows this module answers: an orthonormal basis Q of span{l_i}; for k outside I the
# residual
# of l_k off that span; for k inside I the dual vector d_k, the one in the span with d_kᵀ l_j =
# δ_kj.
# Including or excluding one k changes every residual and dual by a multiple of one unit vector.


def subset_factors(
    L: Float[Tensor, "K K"],
    indices: Int[Tensor, "S M"],
    *,
    real: Bool[Tensor, "S M"],
    targets: Float[Tensor, "K P"] | None = None,
) -> tuple[Float[Tensor, "S M M"], Float[Tensor, "S M P"]]:
    """Lower-triangular T with T Tᵀ = (L Lᵀ)_II for S subsets at once, and Qᵀ targets, O(S K M²).

    By QR of the rows, (rows I of L)ᵀ = Q Tᵀ, so that a pivot is known to eps/pivot; a Cholesky
    factor of (L Lᵀ)_II knows it to eps/pivot², which showed as 2e-6 of a bound with two candidates
    close together. The targets ride along as further columns, so Q is never formed.

    Returns:
        Factors with an identity block as padding and free signs on the diagonal; and Qᵀ targets,
        zero in the padding (no columns when there are no targets).
    """
    rows = L[indices] * real[:, :, None]
    extra = L[:, :0] if targets is None else targets
    columns = torch.cat([rows.mT, extra.expand(len(indices), -1, -1)], dim=2)
    triangle = torch.linalg.qr(columns, mode="r").R
    M = indices.shape[1]
    factor = triangle[:, :M, :M].mT + torch.diag_embed((~real).to(L.dtype))
    return factor, triangle[:, :M, M:] * real[:, :, None]


def residual(rows: Float[Tensor, "J K"], Q: Float[Tensor, "M K"]) -> Float[Tensor, "J K"]:
    """Rows less their projection on the orthonormal rows of Q, subtracted twice, O(J K M).

    One subtraction leaves eps·‖row‖ inside the span, which is everything when the row nearly lies
    in it; the second leaves eps·‖residual‖.
    """
    once = rows - (rows @ Q.mT) @ Q
    return once - (once @ Q.mT) @ Q


def residuals_and_duals(
    L: Float[Tensor, "K K"], mask: Bool[Tensor, " K"]
) -> tuple[Float[Tensor, "K K"], Float[Tensor, "M K"]]:
    """Residual of row k for k outside the subset, dual of row k for k inside it, O(K² M).

    With the Householder QR (rows I)ᵀ = Qᵀ Tᵀ, the duals are the rows of T⁻ᵀ Q.

    Returns:
        The resolved rows, and the orthonormal rows Q that span the subset's.
    """
    Qt, Tt = torch.linalg.qr(L[mask].mT)
    Q = Qt.mT
    E = torch.empty_like(L)
    E[mask] = torch.linalg.solve_triangular(Tt, Q, upper=True)
    E[~mask] = residual(L[~mask], Q)
    return E, Q


def rank_one_update(
    L: Float[Tensor, "K K"],
    E: Float[Tensor, "J K"],
    *,
    rows: Int[Tensor, " J"],
    same: Bool[Tensor, " J"] | None,
    leaves: bool,
    at: int,
) -> tuple[Float[Tensor, " J"], Float[Tensor, " K"]]:
    """Rank-one change of the resolved rows when one of them changes sides: E becomes E + a qᵀ, O(J
    K).

    q = e/‖e‖ for the row e that flips. Rows on its own side lose their component along q; the
    flipped row turns from e into e/‖e‖² (residual into dual and back); across, a dual d_j loses
    (d_jᵀ l_k)/‖e‖ when k enters, a residual gains l_jᵀ q when k leaves.

    Args:
        L: all rows.
        E: resolved rows, of all K candidates or of some.
        rows: which row of L each row of E belongs to.
        same: which rows of E are on the side of the one that flips; None if all are.
        leaves: whether that side is the subset.
        at: position in E of the row that flips.
    """
    norm = torch.linalg.vector_norm(E[at])
    q = E[at] / norm
    a = -(E @ q)
    if same is not None:
        across = L[rows] @ q if leaves else -(E @ L[rows[at]]) / norm
        a = torch.where(same, a, across)
    a[at] = 1 / norm - norm
    return a, q
