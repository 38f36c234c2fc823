"""Choosing candidates by greedy conditional variance."""

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float, Int
from torch import Tensor

from winnowgp.linalg import cholesky, solve_lower
from winnowgp.models.kernels import covariance, prior_variance

# Candidates where the prior is least certain: greedy conditional variance (Burt et al. 2020).


# Of the prior variance: below it a row is known from the others. Nor is it told from rounding below
# so many times the eps of its dtype, which in float32 is more.
LEAST, _ROUNDING = 1e-8, 100


@torch.no_grad()
def greedy_variance(
    kernel: Kernel, X: Float[Tensor, "N D"], K: int, *, given: Float[Tensor, "M D"]
) -> Int[Tensor, " k"]:
    """Up to K rows of largest prior variance conditional on `given` and on the rows before them.

    A pivoted Cholesky factorisation: O(N K (K + M)) time and O(N (K + M)) memory, so hand in a part
    of the rows when N is large. Stops early once no row has a part in 1e8 of its variance left (1e5
    in float32), so duplicates are never chosen twice.
    """
    prior = prior_variance(kernel, X)
    L = cholesky(covariance(kernel, given, given)).L
    M, N = len(given), len(X)
    factor = X.new_empty(M + min(K, N), N)
    factor[:M] = solve_lower(L, covariance(kernel, given, X))
    residual = prior - factor[:M].square().sum(0)
    # A row without prior variance has nothing to add.
    whole = torch.where(prior > 0, prior, torch.inf)
    least = max(LEAST, _ROUNDING * torch.finfo(X.dtype).eps)
    chosen: list[int] = []
    for k in range(M, len(factor)):
        # Read together: a GPU is waited for once. float32 would round the number of a late row.
        left, where = torch.stack([part.double() for part in (residual / whole).max(0)]).tolist()
        if left <= least:
            break
        pivot = int(where)
        row = covariance(kernel, X[pivot : pivot + 1], X)[0].to(factor)
        row = torch.addmv(row, factor[:k].mT, factor[:k, pivot], alpha=-1)
        torch.div(row, residual[pivot].sqrt(), out=factor[k])
        residual -= factor[k].square()
        residual[pivot] = 0
        chosen.append(pivot)
    return torch.tensor(chosen, dtype=torch.long, device=X.device)


# Candidates of greatest conditional variance from any number of rows, in bounded memory.


ROWS = 4096


@torch.no_grad()
def chunked_greedy_variance(
    kernel: Kernel, X: Float[Tensor, "N D"], K: int, *, rows: int = ROWS
) -> Int[Tensor, " k"]:
    """Up to K rows: `greedy_variance` of the rows kept so far and of the next `rows` rows, in turn.

    With N ≤ `rows` this is `greedy_variance` itself; beyond it a greedy choice among greedy choices
    (GreeDi; Mirzasoleiman et al. 2013). O(N K²) time for K ≤ `rows`, O(K (K + rows)) memory
    whatever N is.
    """
    kept = torch.empty(0, dtype=torch.long, device=X.device)
    for part in torch.arange(len(X), device=X.device).split(rows):
        pool = torch.cat([kept, part])
        kept = pool[greedy_variance(kernel, X[pool], K, given=X[:0])]
    return kept
