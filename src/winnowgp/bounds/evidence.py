"""The exact log evidence of a Gaussian process, its gradient, and an upper bound on it."""

from math import log, pi

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds.collapsed import project, weight_correction
from winnowgp.bounds.row_blocks import ChunkedKernel, RowBlock
from winnowgp.bounds.two_pass import BoundGradient, ChunkedMean
from winnowgp.linalg import cholesky, definite_cholesky, half_log_det, solve_lower, squared_norm
from winnowgp.typing import Noise, Scalar


def exact_log_marginal(
    Kff: Float[Tensor, "N N"], *, Y: Float[Tensor, "N P"], noise: Noise
) -> Scalar:
    """Return log p(Y) = Σ_p log N(y_p | 0, K_ff + Σ) in nats; O(N³)."""
    N, P = Y.shape
    L = cholesky(Kff + torch.diag(noise.expand(N))).L
    fit = squared_norm(solve_lower(L, Y))
    return -0.5 * (N * P * log(2 * pi) + 2 * P * half_log_det(L) + fit)


def upper_bound(
    Kuu: Float[Tensor, "*batch M M"],
    Kuf: Float[Tensor, "*batch M N"],
    *,
    kff: Float[Tensor, " N"],
    Y: Float[Tensor, "N P"],
    noise: Noise,
) -> Float[Tensor, "*batch"]:
    """Return an upper bound on the log evidence (Titsias 2014); O(N M²).

        U(Z) = −½ Σ_p [N log 2π + log |Q_ff + Σ| + y_pᵀ (Q_ff + Σ + t I)⁻¹ y_p]

    with t = tr(K_ff − Q_ff). Dropping K_ff − Q_ff ≥ 0 can only decrease the determinant, and t is
    at least its largest eigenvalue. The bound equals the evidence when Z = X and is loose where t
    exceeds the noise.

    Returns:
        Nats, summed over rows and outputs; one number per batch element.
    """
    N, P = Y.shape
    variance = noise.expand(N)
    narrow = project(Kuu, Kuf, Y, variance)
    t = (kff - narrow.explained_variance()).clamp_min(0).sum(-1)
    widened = project(Kuu, Kuf, Y, variance + t[..., None])
    return -0.5 * (N * P * log(2 * pi) + P * narrow.log_det + widened.fit)


@torch.no_grad()
def evidence_gradient(
    kernel: ChunkedKernel, block: RowBlock, *, mean: ChunkedMean, noise: Float[Tensor, ""]
) -> BoundGradient:
    """Return the exact log evidence and its gradient; O(N³).

        log p(Y) = −½ [NP log 2π + P log|A| + ⟨Y, α⟩],   A = K_ff + σ²I,  α = A⁻¹ Y
        ∂/∂A = ½ (ααᵀ − P A⁻¹),   ∂/∂Y = −α

    This is several times faster than differentiating the Cholesky factor by autograd. With weights
    the noise of row i is σ²/w_i, and `weight_correction` is added.

    Args:
        kernel: a kernel whose inducing points are the rows of `block`.
        block: all rows.
        mean: prior mean.
        noise: σ².

    Raises:
        NotPositiveDefiniteError: A cannot be factorised.
    """
    Y, weights = mean.centred(block), block.weights
    N, P = Y.shape
    A = kernel.uu()
    A.diagonal().add_(noise if weights is None else noise / weights)
    L = definite_cholesky(A)
    A_inverse = torch.cholesky_inverse(L)
    alpha = A_inverse @ Y
    value = -0.5 * (N * P * log(2 * pi) + 2 * P * half_log_det(L) + (Y * alpha).sum())
    gradient = A_inverse.mul_(-0.5 * P).addmm_(alpha, alpha.mT, alpha=0.5)
    noise_gradient = gradient.diagonal().sum()
    if weights is not None:
        value = value + P * weight_correction(weights, noise)
        slope = 0.5 * (N - weights.sum()) / noise
        noise_gradient = (gradient.diagonal() / weights).sum() + P * slope
    mean.pull(block, alpha)
    return BoundGradient(
        value, noise_gradient, mean.pulled(), kernel.gradient(kernel.pulled(), gradient)
    )
