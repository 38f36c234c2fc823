"""Where rows may start: their principal components."""

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.data import Entries

_PASSES = 30


def principal_latents(
    table: Entries, Q: int, *, generator: torch.Generator
) -> Float[Tensor, "N Q"]:
    """The first Q principal components of a centred table, each of unit variance.

    Missing entries are filled in by the components themselves, in a few passes. Directions that the
    table does not have are drawn from a narrow normal. Signs make each column of loadings add up to
    something positive, so that equal tables start equally.
    """
    Y, rank = table.filled(), min(Q, *table.Y.shape)
    U, S, Vh = torch.linalg.svd(Y, full_matrices=False)
    for _ in range(0 if table.complete else _PASSES):
        low_rank = (U[:, :rank] * S[:rank]) @ Vh[:rank]
        U, S, Vh = torch.linalg.svd(torch.where(table.observed, Y, low_rank), full_matrices=False)
    X = 0.1 * torch.randn(table.N, Q, generator=generator, dtype=Y.dtype, device=generator.device)
    X = X.to(Y.device)
    present = int((S[:rank] > 1e-8 * S[0].clamp_min(1e-300)).sum())
    sign = torch.where(Vh[:present].sum(1) < 0, -1.0, 1.0)
    X[:, :present] = table.N**0.5 * U[:, :present] * sign
    return X
