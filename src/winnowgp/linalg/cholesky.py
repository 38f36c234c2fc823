"""The one Cholesky factorisation of the library, with a jitter that can be seen.

Kernel matrices of close or duplicated points are singular to working precision. Each
factorisation therefore adds `jitter · mean(diag A)` to the diagonal, starting at the foot of a
ladder and climbing only where the factorisation fails. The jitter used is part of the result.

The foot of the ladder is not zero: a factorisation that just succeeds at a condition number of
1e16 carries no correct digits, and a sparse GP whose inducing variables are observed with a
little noise of their own is still a lower bound on the evidence. It is low, because the bound
feels it: with smooth kernels, points close together carry information in differences as small as
their conditional variance, and a jitter of 1e-8 can cost a tenth of a nat where 1e-12 costs 1e-5.
"""

from dataclasses import dataclass
from math import isfinite

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.errors import NotPositiveDefiniteError

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
