"""Candidate inducing points by greedy conditional variance (Burt et al. 2020)."""

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float, Int
from torch import Tensor

from winnowgp.linalg import cholesky, solve_lower
from winnowgp.models.kernels import covariance, prior_variance

# Selection ends when the conditional variances are below this share of the prior variances, or
# below this many times the eps of the data type, which is more in float32.
LEAST, _ROUNDING = 1e-8, 100

ROWS = 4096


@torch.no_grad()
def greedy_variance(
    kernel: Kernel, X: Float[Tensor, "N D"], K: int, *, given: Float[Tensor, "M D"]
) -> Int[Tensor, " k"]:
    """Select up to K rows by the largest conditional variance given `given` and previous rows.

    This is a pivoted Cholesky factorisation with O(N K (K + M)) time and O(N (K + M)) memory; pass
    a sample of the rows if N is large. It stops early when all conditional variances are below 1e-8
    of the prior variance (1e-5 in float32), so that duplicates are never selected twice.

    Args:
        X: rows to select among.
        K: number of rows to select at most.
        given: inducing points that are there already.

    Returns: indices of the selected rows, in order of selection.
    """
    prior = prior_variance(kernel, X)
    L = cholesky(covariance(kernel, given, given)).L
    M, N = len(given), len(X)
    factor = X.new_empty(M + min(K, N), N)
    factor[:M] = solve_lower(L, covariance(kernel, given, X))
    residual = prior - factor[:M].square().sum(0)
    # A row without prior variance is never selected.
    whole = torch.where(prior > 0, prior, torch.inf)
    least = max(LEAST, _ROUNDING * torch.finfo(X.dtype).eps)
    selected: list[int] = []
    for k in range(M, len(factor)):
        # One synchronisation for both; in float32 a large index would be rounded.
        left, where = torch.stack([x.double() for x in (residual / whole).max(0)]).tolist()
        if left <= least:
            break
        pivot = int(where)
        row = covariance(kernel, X[pivot : pivot + 1], X)[0].to(factor)
        row = torch.addmv(row, factor[:k].mT, factor[:k, pivot], alpha=-1)
        torch.div(row, residual[pivot].sqrt(), out=factor[k])
        residual -= factor[k].square()
        residual[pivot] = 0
        selected.append(pivot)
    return torch.tensor(selected, dtype=torch.long, device=X.device)


@torch.no_grad()
def chunked_greedy_variance(
    kernel: Kernel, X: Float[Tensor, "N D"], K: int, *, rows: int = ROWS
) -> Int[Tensor, " k"]:
    """Select up to K rows by greedy conditional variance, in blocks of `rows` rows.

    Each block competes with the rows selected so far. With N ≤ `rows` this is `greedy_variance`;
    beyond, it is a greedy selection among greedy selections (GreeDi; Mirzasoleiman et al. 2013).
    O(N K²) time for K ≤ `rows`, and O(K (K + rows)) memory for any N.
    """
    selected = torch.empty(0, dtype=torch.long, device=X.device)
    for block in torch.arange(len(X), device=X.device).split(rows):
        pool = torch.cat([selected, block])
        selected = pool[greedy_variance(kernel, X[pool], K, given=X[:0])]
    return selected
