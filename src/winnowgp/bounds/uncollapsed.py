"""The uncollapsed bound: an explicit q(u), any likelihood, minibatches (Hensman et al. 2013, 2015).

q is kept in whitened coordinates u = L v with K_uu = L Lᵀ, where the prior is N(0, I):

    q(v_p) = N(m_p, F_p F_pᵀ),   p = 1..P outputs,   F square, not necessarily triangular
"""

from collections.abc import Callable
from math import log, pi

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds.subset import Subset
from winnowgp.linalg import cholesky, solve_lower
from winnowgp.typing import Masks, Noise, Scalar


def marginals(
    V: Float[Tensor, "M N"],
    *,
    kff: Float[Tensor, " N"],
    q_mean: Float[Tensor, "M P"],
    q_factor: Float[Tensor, "#P M M"],
) -> tuple[Float[Tensor, "N P"], Float[Tensor, "N P"]]:
    """q(f_ip) of each row: mean V_iᵀ m_p, variance k_ii − ‖V_i‖² + ‖F_pᵀ V_i‖², with V = L⁻¹ K_uf.

    The same as β_i m and κ(x_i, x_i) − β_i (K − S) β_iᵀ of section 2.2. O(P N M²).
    """
    mean = V.mT @ q_mean
    # [P N]: one covariance may serve all outputs.
    spread = (q_factor.mT @ V).square().sum(-2)
    variance = (kff - V.square().sum(-2) + spread).clamp_min(0)
    return mean, variance.mT.expand(mean.shape)


def whitened_kl(q_mean: Float[Tensor, "M P"], q_factor: Float[Tensor, "#P M M"]) -> Scalar:
    """Σ_p KL[N(m_p, F_p F_pᵀ) ‖ N(0, I)] = ½ Σ_p [‖F_p‖² + ‖m_p‖² − M − 2 log |det F_p|]."""
    M, P = q_mean.shape
    covariance = q_factor.square().sum((-2, -1)) - 2 * torch.linalg.slogdet(q_factor).logabsdet - M
    return 0.5 * (covariance.expand(P).sum() + q_mean.square().sum())


def gaussian_expected_log_prob(
    Y: Float[Tensor, "N P"],
    mean: Float[Tensor, "N P"],
    variance: Float[Tensor, "N P"],
    *,
    noise: Noise,
) -> Float[Tensor, "N P"]:
    """E_q(f)[log N(y | f, σ²)] = log N(y | mean, σ²) − variance / (2 σ²)."""
    noise = noise.expand(Y.shape[0])[:, None]
    return -0.5 * (log(2 * pi) + noise.log() + ((Y - mean).square() + variance) / noise)


def uncollapsed_bound(
    Kuu: Float[Tensor, "M M"],
    Kuf: Float[Tensor, "M B"],
    *,
    kff: Float[Tensor, " B"],
    q_mean: Float[Tensor, "M P"],
    q_factor: Float[Tensor, "#P M M"],
    expected_log_prob: Callable[[Tensor, Tensor], Tensor],
    scale: float = 1.0,
) -> Scalar:
    """L = scale · Σ_i Σ_p E_q(f_ip)[log p(y_ip | f_ip)] − KL[q(u) ‖ p(u)].

    The sum is over rows (slip 4 of the text). With B of N rows drawn at random and scale = N / B it
    is an unbiased estimate of the bound on all rows.

    Args:
        expected_log_prob: from q's mean and variance `[B P]` to nats, one a row or one a row and
            output.

    Returns: nats, larger is better, never above the log evidence when scale is 1.
    """
    V = solve_lower(cholesky(Kuu).L, Kuf)
    mean, variance = marginals(V, kff=kff, q_mean=q_mean, q_factor=q_factor)
    return scale * expected_log_prob(mean, variance).sum() - whitened_kl(q_mean, q_factor)


def subset_marginal(
    Kuu: Float[Tensor, "K K"],
    q_mean: Float[Tensor, "K P"],
    q_factor: Float[Tensor, "#P K K"],
    *,
    mask: Masks,
) -> tuple[Float[Tensor, "S M P"], Float[Tensor, "S #P M M"]]:
    """q(u | Z) of S subsets: the *marginal* of q(u*) in u-space, whitened anew by its own K_ZZ.

        m* = L m,  S* = L F Fᵀ Lᵀ,  q(u | Z) = N(m*_Z, S*_ZZ)

    Taking sub-vectors of the whitened coordinates instead would be another model (slip 9). Padded
    places hold the prior N(0, 1) and so add nothing to a KL. O(S M K² + S M³).

    Returns: whitened means `[S M P]` and triangular factors `[S P M M]`, M the largest subset.
    """
    subset = Subset.of(mask)
    L = cholesky(Kuu).L
    LZ = cholesky(subset.square(Kuu)).L
    mean = solve_lower(LZ, subset.rows(L @ q_mean))
    # S_Z = A Aᵀ with A = L_Z⁻¹ (L F)_Z, widened by an identity where a place is padding.
    rows = (L @ q_factor)[:, subset.index].transpose(0, 1) * subset.present[:, None, :, None]
    A = solve_lower(LZ[:, None], rows)
    pad = torch.diag_embed((~subset.present).to(A)).unsqueeze(1).expand(-1, A.shape[1], -1, -1)
    # The triangular factor of a QR has A Aᵀ = Rᵀ R without squaring the condition number.
    R = torch.linalg.qr(torch.cat([A, pad], dim=-1).mT, mode="r").R
    return mean, R.mT
