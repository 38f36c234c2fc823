"""The exact log evidence and an upper bound on it."""

from math import log, pi

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds.collapsed import project
from winnowgp.linalg import cholesky, half_log_det, solve_lower, squared_norm
from winnowgp.typing import Noise, Scalar

# The log evidence of the full Gaussian process, for problems small enough to afford it.


def exact_log_marginal(
    Kff: Float[Tensor, "N N"], *, Y: Float[Tensor, "N P"], noise: Noise
) -> Scalar:
    """log p(Y) = Σ_p log N(y_p | 0, K_ff + Σ), in nats; O(N³)."""
    N, P = Y.shape
    L = cholesky(Kff + torch.diag(noise.expand(N))).L
    fit = squared_norm(solve_lower(L, Y))
    return -0.5 * (N * P * log(2 * pi) + 2 * P * half_log_det(L) + fit)


# An upper bound on the log evidence: how much there is still to gain.


def upper_bound(
    Kuu: Float[Tensor, "*batch M M"],
    Kuf: Float[Tensor, "*batch M N"],
    *,
    kff: Float[Tensor, " N"],
    Y: Float[Tensor, "N P"],
    noise: Noise,
) -> Float[Tensor, "*batch"]:
    """U(Z) = −½ Σ_p [N log 2π + log |Q_ff + Σ| + y_pᵀ (Q_ff + Σ + t)⁻¹ y_p],  t = tr(K_ff − Q_ff).

    Titsias (2014): dropping K_ff − Q_ff ≥ 0 can only shrink the determinant, and t is at least its
    largest eigenvalue. Equal to the evidence when Z = X; loose where t exceeds the noise. O(N M²).

    Returns: nats, summed over rows and outputs, one number a batch element.
    """
    N, P = Y.shape
    variance = noise.expand(N)
    narrow = project(Kuu, Kuf, Y, variance)
    t = (kff - narrow.explained_variance()).clamp_min(0).sum(-1)
    widened = project(Kuu, Kuf, Y, variance + t[..., None])
    return -0.5 * (N * P * log(2 * pi) + P * narrow.log_det + widened.fit)
