"""The uncollapsed bound: an explicit q(u), any likelihood, minibatches (Hensman et al. 2013, 2015).

q(u) is stored in whitened coordinates u = L v with K_uu = L Lᵀ, where the prior is N(0, I):

    q(v_p) = N(m_p, F_p F_pᵀ),   p = 1..P outputs,   F square, not necessarily triangular
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds.collapsed import Subset, added_variance, masked_blocks
from winnowgp.linalg import cholesky, solve_lower
from winnowgp.typing import Masks, Weights


def marginals(
    V: Float[Tensor, "*S M N"],
    *,
    kff: Float[Tensor, "*#S N"],
    q_mean: Float[Tensor, "*#S M P"],
    q_factor: Float[Tensor, "*#S #P M M"],
) -> tuple[Float[Tensor, "*S N P"], Float[Tensor, "*S N P"]]:
    """Return mean and variance of q(f_ip) for each row and output; O(P N M²).

        mean V_iᵀ m_p,   variance k_ii − ‖V_i‖² + ‖F_pᵀ V_i‖²,   V = L⁻¹ K_uf

    In whitened coordinates these are β_i m and κ(x_i, x_i) − β_i (K − S) β_iᵀ of section 2.2 of the
    paper.
    """
    mean = V.mT @ q_mean
    # [*S P N]; outputs may share one covariance. One product of all outputs is the fastest.
    P, M = q_factor.shape[-3:-1]
    products = q_factor.mT.flatten(-3, -2) @ V
    spread = products.unflatten(-2, (P, M)).square().sum(-2)
    unexplained = (kff - V.square().sum(-2)).unsqueeze(-2)
    variance = (unexplained + spread).clamp_min(0)
    return mean, variance.mT.expand(mean.shape)


def whitened_kl(
    q_mean: Float[Tensor, "*S M P"],
    q_factor: Float[Tensor, "*S #P M M"],
    *,
    triangular: bool = False,
) -> Float[Tensor, "*S"]:
    """Return Σ_p KL[N(m_p, F_p F_pᵀ) ‖ N(0, I)] in nats.

        ½ Σ_p [‖F_p‖² + ‖m_p‖² − M − 2 log |det F_p|]

    Args:
        triangular: whether every F is, so that its determinant is that of its diagonal.
    """
    M, P = q_mean.shape[-2:]
    if triangular:
        log_det = q_factor.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)
    else:
        log_det = torch.linalg.slogdet(q_factor).logabsdet
    covariance = q_factor.square().sum((-2, -1)) - 2 * log_det - M
    shared = P // covariance.shape[-1]
    return 0.5 * (shared * covariance.sum(-1) + q_mean.square().sum((-2, -1)))


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
    """Return the ELBO of an explicit q(u), in nats.

        L = scale · Σ_i Σ_p E_q(f_ip)[log p(y_ip | f_ip)] − KL[q(u) ‖ p(u)]

    The sum is over the N data points; the equation in section 2.2 of the paper prints M as its
    upper limit. With B of N rows drawn at random and scale = N / B the result is an unbiased
    estimate of the bound on all rows.

    Args:
        q_mean: mean of the whitened q(v), with u = L v and K_uu = L Lᵀ.
        q_factor: factor F of its covariance F Fᵀ; one for all outputs, or one each.
        expected_log_prob: maps mean and variance of q(f), `[*S B P]`, to expected log-likelihoods
            of the same shape, in nats.
        scale: factor of the sum over rows, 1 for all rows.

    Returns:
        Nats, larger is better, never above the log evidence when scale is 1; one number per batch
        element.
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
    """Return q(u | Z) of S subsets: the marginal of q(u*) in u-space, whitened by its own K_ZZ.

        m* = L m,  S* = L F Fᵀ Lᵀ,  q(u | Z) = N(m*_Z, S*_ZZ)

    Section 3 of the paper takes the sub-vector and sub-matrix of q(u*) = N(m*, S*). Whitened
    coordinates must be transformed back to u before they are indexed: their sub-vectors define a
    different model. Padded entries have the prior N(0, 1) and add nothing to the KL divergence.
    O(S M K² + S M³).

    Returns:
        Whitened means and triangular factors; M is the size of the largest subset.
    """
    subset = Subset.of(mask)
    L = cholesky(Kuu).L
    LZ = cholesky(subset.square(Kuu)).L
    mean = solve_lower(LZ, subset.rows(L @ q_mean))
    # S_Z = A Aᵀ with A = L_Z⁻¹ (L F)_Z, extended by an identity for padded entries.
    rows = (L @ q_factor)[:, subset.index].transpose(0, 1) * subset.present[:, None, :, None]
    A = solve_lower(LZ[:, None], rows)
    pad = torch.diag_embed((~subset.present).to(A)).unsqueeze(1).expand(-1, A.shape[1], -1, -1)
    # The triangular factor of a QR has A Aᵀ = Rᵀ R without squaring the condition number. Mode "r"
    # would suffice but is not differentiable.
    return mean, torch.linalg.qr(torch.cat([A, pad], dim=-1).mT).R.mT


def masked_marginal(
    Kuu: Float[Tensor, "K K"],
    q_mean: Float[Tensor, "K P"],
    q_factor: Float[Tensor, "#P K K"],
    *,
    weights: Weights,
) -> tuple[Float[Tensor, "S K P"], Float[Tensor, "S #P K K"]]:
    """Return q(u*) with candidate k weighted by b_k ∈ [0, 1], whitened by `masked_blocks`; O(S K³).

        m̂ = b ∘ m*,  Ŝ = b bᵀ ∘ S* + diag((1 − b)(b κ + s))

    Masking adds the same variance to the prior and to q, so that a candidate of weight zero is
    N(0, s) under both and adds nothing to the KL divergence. Weights of 0 and 1 give the marginal
    of the subset.
    """
    L_all = cholesky(Kuu).L
    L = cholesky(masked_blocks(Kuu, Kuu[:, :0], weights)[0]).L
    rows = weights[:, None, :, None] * (L_all @ q_factor)
    half = solve_lower(L[:, None], rows @ rows.mT + added_variance(Kuu, weights)[:, None])
    covariance = solve_lower(L[:, None], half.mT)
    mean = solve_lower(L, weights[..., None] * (L_all @ q_mean))
    return mean, cholesky(0.5 * (covariance + covariance.mT)).L
