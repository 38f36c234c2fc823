"""Candidates of greatest conditional variance from any number of rows, in bounded memory."""

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float, Int
from torch import Tensor

from winnowgp.models.greedy_variance import greedy_variance

ROWS = 4096


@torch.no_grad()
def streamed_variance(
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
