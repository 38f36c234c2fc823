"""The log evidence of the full Gaussian process, for problems small enough to afford it."""

from math import log, pi

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.linalg import cholesky, half_log_det, solve_lower, squared_norm
from winnowgp.typing import Noise, Scalar


def exact_log_marginal(
    Kff: Float[Tensor, "N N"], *, Y: Float[Tensor, "N P"], noise: Noise
) -> Scalar:
    """log p(Y) = Σ_p log N(y_p | 0, K_ff + Σ), in nats; O(N³)."""
    N, P = Y.shape
    L = cholesky(Kff + torch.diag(noise.expand(N))).L
    fit = squared_norm(solve_lower(L, Y))
    return -0.5 * (N * P * log(2 * pi) + 2 * P * half_log_det(L) + fit)
