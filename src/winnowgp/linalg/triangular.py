"""Three lines of triangular algebra that every bound shares."""

import torch
from jaxtyping import Float
from torch import Tensor


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
