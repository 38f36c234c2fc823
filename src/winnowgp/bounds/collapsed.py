"""The collapsed bound of Titsias (2009): Gaussian noise, the best q(u) already put in."""

from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds.projection import project
from winnowgp.linalg import solve_lower
from winnowgp.typing import Noise


def collapsed_bound(
    Kuu: Float[Tensor, "*batch M M"],
    Kuf: Float[Tensor, "*batch M N"],
    *,
    kff: Float[Tensor, " N"],
    Y: Float[Tensor, "N P"],
    noise: Noise,
) -> Float[Tensor, "*batch"]:
    """L(Z) = Σ_p log N(y_p | 0, Q_ff + Σ) − (P/2) Σ_i (k_ii − q_ii) / σ²_i.

    Never above the log evidence; equal to it when Z = X. With M = 0 it is
    log N(y | 0, Σ) − tr(K_ff Σ⁻¹)/2 (slip 3 of the text). O(N M²).

    Returns: nats, summed over rows and outputs, one number a batch element.
    """
    projection = project(Kuu, Kuf, Y, noise.expand(Y.shape[0]))
    unexplained = (kff - projection.explained_variance()) / noise
    return projection.log_normal() - 0.5 * Y.shape[1] * unexplained.sum(-1)


def collapsed_posterior(
    Kuu: Float[Tensor, "M M"],
    Kuf: Float[Tensor, "M N"],
    *,
    Y: Float[Tensor, "N P"],
    noise: Noise,
) -> tuple[Float[Tensor, "M P"], Float[Tensor, "1 M M"]]:
    """The optimal q(v) of whitened inducing values u = L v: q(v_p) = N(m_p, F Fᵀ).

        F Fᵀ = B⁻¹,  m = B⁻¹ V W Y,  B = I + V W Vᵀ

    Section 2.2 of the paper, in coordinates where the prior is N(0, I). The covariance is the same
    for every output, hence the leading axis of one.

    Returns: the mean `[M P]` and a square factor `F` of the covariance `[1 M M]`.
    """
    p = project(Kuu, Kuf, Y, noise.expand(Y.shape[0]))
    eye = p.LB.new_ones(p.LB.shape[-1]).diag()
    # B⁻¹ = LB⁻ᵀ LB⁻¹, so F = LB⁻ᵀ.
    F = solve_lower(p.LB, eye).mT
    return F @ p.c, F[None]
