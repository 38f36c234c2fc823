"""The uncollapsed bound: an explicit q(u), any likelihood, minibatches (Hensman et al. 2013, 2015).

q is kept in whitened coordinates u = L v with K_uu = L Lᵀ, where the prior is N(0, I):

    q(v_p) = N(m_p, F_p F_pᵀ),   p = 1..P outputs,   F square, not necessarily triangular
"""

from collections.abc import Callable
from math import log, pi

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds.collapsed import Subset, added_variance, masked_blocks
from winnowgp.linalg import cholesky, solve_lower
from winnowgp.typing import Masks, Noise, Weights


def marginals(
    V: Float[Tensor, "*S M N"],
    *,
    kff: Float[Tensor, "*#S N"],
    q_mean: Float[Tensor, "*#S M P"],
    q_factor: Float[Tensor, "*#S #P M M"],
) -> tuple[Float[Tensor, "*S N P"], Float[Tensor, "*S N P"]]:
    """q(f_ip) of each row: mean V_iᵀ m_p, variance k_ii − ‖V_i‖² + ‖F_pᵀ V_i‖², with V = L⁻¹ K_uf.

    The same as β_i m and κ(x_i, x_i) − β_i (K − S) β_iᵀ of section 2.2. O(P N M²).
    """
    mean = V.mT @ q_mean
    # [*S P N]: one covariance may serve all outputs.
    spread = (q_factor.mT @ V.unsqueeze(-3)).square().sum(-2)
    open_variance = (kff - V.square().sum(-2)).unsqueeze(-2)
    variance = (open_variance + spread).clamp_min(0)
    return mean, variance.mT.expand(mean.shape)


def whitened_kl(
    q_mean: Float[Tensor, "*S M P"], q_factor: Float[Tensor, "*S #P M M"]
) -> Float[Tensor, "*S"]:
    """Σ_p KL[N(m_p, F_p F_pᵀ) ‖ N(0, I)] = ½ Σ_p [‖F_p‖² + ‖m_p‖² − M − 2 log |det F_p|]."""
    M, P = q_mean.shape[-2:]
    covariance = q_factor.square().sum((-2, -1)) - 2 * torch.linalg.slogdet(q_factor).logabsdet - M
    shared = P // covariance.shape[-1]
    return 0.5 * (shared * covariance.sum(-1) + q_mean.square().sum((-2, -1)))


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
    Kuu: Float[Tensor, "*S M M"],
    Kuf: Float[Tensor, "*S M B"],
    *,
    kff: Float[Tensor, " B"],
    q_mean: Float[Tensor, "*S M P"],
    q_factor: Float[Tensor, "*S #P M M"],
    expected_log_prob: Callable[[Tensor, Tensor], Tensor],
    scale: float = 1.0,
) -> Float[Tensor, "*S"]:
    """L = scale · Σ_i Σ_p E_q(f_ip)[log p(y_ip | f_ip)] − KL[q(u) ‖ p(u)].

    The sum is over rows (slip 4 of the text). With B of N rows drawn at random and scale = N / B it
    is an unbiased estimate of the bound on all rows.

    Args:
        expected_log_prob: from q's mean and variance `[*S B P]` to nats of each row and target.

    Returns: nats, larger is better, never above the log evidence when scale is 1; one number a
        batch element.
    """
    V = solve_lower(cholesky(Kuu).L, Kuf)
    mean, variance = marginals(V, kff=kff, q_mean=q_mean, q_factor=q_factor)
    nats = expected_log_prob(mean, variance).sum((-2, -1))
    return scale * nats - whitened_kl(q_mean, q_factor)


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
    # The triangular factor of a QR has A Aᵀ = Rᵀ R without squaring the condition number. Mode "r"
    # would do, but has no derivative.
    return mean, torch.linalg.qr(torch.cat([A, pad], dim=-1).mT).R.mT


def masked_marginal(
    Kuu: Float[Tensor, "K K"],
    q_mean: Float[Tensor, "K P"],
    q_factor: Float[Tensor, "#P K K"],
    *,
    weights: Weights,
) -> tuple[Float[Tensor, "S K P"], Float[Tensor, "S #P K K"]]:
    """q(u*) with candidate k weighted by b_k ∈ [0, 1], whitened by its own `masked_blocks`.

        m̂ = b ∘ m*,  Ŝ = b bᵀ ∘ S* + diag((1 − b)(b κ + s))

    What masking adds to the prior's variance it adds to q's, so that a candidate switched off is
    the same N(0, s) under both and costs no KL: weights of 0 and 1 give the subset's marginal.
    O(S K³).
    """
    L_all = cholesky(Kuu).L
    L = cholesky(masked_blocks(Kuu, Kuu[:, :0], weights)[0]).L
    rows = weights[:, None, :, None] * (L_all @ q_factor)
    half = solve_lower(L[:, None], rows @ rows.mT + added_variance(Kuu, weights)[:, None])
    covariance = solve_lower(L[:, None], half.mT)
    mean = solve_lower(L, weights[..., None] * (L_all @ q_mean))
    return mean, cholesky(0.5 * (covariance + covariance.mT)).L
