"""Row subsets of a lower-triangular L: orthonormal bases, residuals, duals, and their updates.

With A = L Lᵀ, the rows l_k of L are vectors whose inner products are the entries of A. For a subset
I of the rows this module answers: an orthonormal basis Q of span{l_i}; for k outside I the residual
of l_k off that span; for k inside I the dual vector d_k, the one in the span with d_kᵀ l_j = δ_kj.
Including or excluding one k changes every residual and dual by a multiple of one unit vector.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def triangular_rows(
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


def resolved_rows(
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


def flip_step(
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
