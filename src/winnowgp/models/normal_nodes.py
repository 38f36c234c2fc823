"""Points that stand for a Gaussian of several dimensions."""

from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.linalg import cholesky, solve_lower


@lru_cache(maxsize=16)
def normal_nodes(count: int, dimension: int) -> Float[Tensor, "T D"]:
    """Sobol points mapped to N(0, I), each with its reflection, and of covariance I exactly.

    Sums over them are exact for polynomials of degree three.
    """
    # Kept for later calls, which may want gradients.
    with torch.inference_mode(False):
        return _made(max(count, 2 * dimension), dimension)


def _made(count: int, dimension: int) -> Float[Tensor, "T D"]:
    uniform = torch.quasirandom.SobolEngine(dimension, scramble=True, seed=0).draw(
        count, dtype=torch.float64
    )
    # Scrambled points may touch the ends, where the normal's quantile is infinite.
    half = torch.special.ndtri(uniform.clamp(1e-6, 1 - 1e-6))
    root = cholesky(half.mT @ half / count).L
    half = solve_lower(root, half.mT).mT
    return torch.cat([half, -half])
