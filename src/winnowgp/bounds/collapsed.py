"""The collapsed bound of Titsias (2009) and its variants for subsets."""

from dataclasses import dataclass
from math import log, pi

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from winnowgp.linalg import cholesky, definite_cholesky, half_log_det, solve_lower, squared_norm
from winnowgp.typing import Masks, Nats, Noise, Scalar, Weights

# What every Gaussian bound needs of the M points: V = L⁻¹ K_uf, and B = I + V W Vᵀ factorised.


@dataclass(frozen=True, slots=True)
class Projection:
    """Rows and targets seen through M whitened inducing values, W = diag(1 / variance).

    `Qff = Vᵀ V` is the prior covariance that the M points can explain.
    """

    V: Float[Tensor, "*batch M N"]
    """L⁻¹ K_uf, with K_uu = L Lᵀ."""
    LB: Float[Tensor, "*batch M M"]
    """Factor of B = I + V W Vᵀ."""
    c: Float[Tensor, "*batch M P"]
    """LB⁻¹ V W Y."""
    fit: Float[Tensor, "*batch"]
    """Σ_p y_pᵀ (Q_ff + W⁻¹)⁻¹ y_p."""
    log_det: Float[Tensor, "*batch"]
    """log |Q_ff + W⁻¹|."""

    def explained_variance(self) -> Float[Tensor, "*batch N"]:
        """q_ii = Σ_m V_mi², at most k_ii."""
        return self.V.square().sum(-2)

    def log_normal(self) -> Float[Tensor, "*batch"]:
        """Σ_p log N(y_p | 0, Q_ff + W⁻¹)."""
        N, P = self.V.shape[-1], self.c.shape[-1]
        return -0.5 * (N * P * log(2 * pi) + P * self.log_det + self.fit)


def project(
    Kuu: Float[Tensor, "*batch M M"],
    Kuf: Float[Tensor, "*batch M N"],
    Y: Float[Tensor, "N P"],
    variance: Float[Tensor, "*#batch N"],
) -> Projection:
    """Factorise the blocks; O(N M² + M³)."""
    V = solve_lower(cholesky(Kuu).L, Kuf)
    # A = V W^½, so that B = I + A Aᵀ; B ≥ I is safe to factorise without jitter.
    scale = variance.rsqrt()
    A = V * scale[..., None, :]
    Ys = Y * scale[..., :, None]
    eye = torch.eye(V.shape[-2], dtype=V.dtype, device=V.device)
    LB = definite_cholesky(eye + A @ A.mT)
    c = solve_lower(LB, A @ Ys)
    # Matrix inversion and determinant lemmas.
    fit = squared_norm(Ys) - squared_norm(c)
    log_det = variance.log().sum(-1) + 2 * half_log_det(LB)
    return Projection(V, LB, c, fit, log_det)


# What separates w equal observations from one of w times the precision.


def weight_correction(weights: Float[Tensor, " N"], noise: Scalar) -> Scalar:
    """Σ_i log [N(y_i | f_i, σ²)^w_i / N(y_i | f_i, σ²/w_i)], which depends on neither y nor f.

    = ½ Σ_i [(1 − w_i) log 2πσ² − log w_i]. A bound with noise σ²/w_i a row, plus this for each
    output, is the bound in which row i counts as w_i equal rows.
    """
    return 0.5 * ((1 - weights).sum() * (log(2 * pi) + noise.log()) - weights.log().sum())


# The collapsed bound of Titsias (2009): Gaussian noise, the best q(u) already put in.


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


# A collapsed bound that is never looser, for the same order of cost.


def tighter_bound(
    Kuu: Float[Tensor, "*batch M M"],
    Kuf: Float[Tensor, "*batch M N"],
    *,
    kff: Float[Tensor, " N"],
    Y: Float[Tensor, "N P"],
    noise: Noise,
) -> Float[Tensor, "*batch"]:
    """L⁺(Z) = Σ_p log N(y_p | 0, Q_ff + Σ) − (P/2) Σ_i log(1 + (k_ii − q_ii) / σ²_i).

    Titsias (2025) and Bui et al. (2025): the variational posterior may also shrink each row's
    conditional variance. Since log(1 + x) ≤ x, L ≤ L⁺ ≤ log p(y). It is not a quadratic form in the
    points, so scoring many subsets with it costs O(N M K) each step. O(N M²) here.

    Returns: nats, summed over rows and outputs, one number a batch element.
    """
    projection = project(Kuu, Kuf, Y, noise.expand(Y.shape[0]))
    # k_ii − q_ii cannot be negative but for rounding.
    unexplained = (kff - projection.explained_variance()).clamp_min(0) / noise
    return projection.log_normal() - 0.5 * Y.shape[1] * unexplained.log1p().sum(-1)


# Appendix B.1 of the paper: a bound on all K candidates that weights can switch off smoothly.


def masked_blocks(
    Kuu: Float[Tensor, "K K"], Kuf: Float[Tensor, "K N"], weights: Weights
) -> tuple[Float[Tensor, "S K K"], Float[Tensor, "S K N"]]:
    """Blocks of the prior in which candidate k is weighted by b_k ∈ [0, 1].

        κ̂(z_j, z_k) = b_j b_k κ(z_j, z_k) for j ≠ k,   κ̂(z_k, z_k) = b_k (κ(z_k, z_k) − s) + s,
        κ̂(z_k, x) = b_k κ(z_k, x)

    A switched-off candidate becomes an independent N(0, s). The paper has s = 1; the mean prior
    variance serves any kernel, and with weights of 0 and 1 every s gives the same bound. The result
    stays positive definite, since (1 − b)(b κ + s) ≥ 0 is added to the diagonal of b bᵀ ∘ K.
    """
    scaled = weights[:, :, None] * weights[:, None, :] * Kuu
    return scaled + added_variance(Kuu, weights), weights[:, :, None] * Kuf


def added_variance(Kuu: Float[Tensor, "K K"], weights: Weights) -> Float[Tensor, "S K K"]:
    """(1 − b)(b κ + s) on the diagonal: what weighting adds to b bᵀ ∘ K."""
    k = Kuu.diagonal()
    return torch.diag_embed((1 - weights) * (weights * k + k.mean()))


def masked_bound(
    Kuu: Float[Tensor, "K K"],
    Kuf: Float[Tensor, "K N"],
    *,
    weights: Weights,
    kff: Float[Tensor, " N"],
    Y: Float[Tensor, "N P"],
    noise: Noise,
) -> Nats:
    """L̂(Z*; b): the collapsed bound under the weighted prior.

    With b ∈ {0, 1}^K it is exactly L(Z); in between it is smooth, and the relaxed gradient
    differentiates it. Costs O(S N K²) whatever the weights.
    """
    return collapsed_bound(*masked_blocks(Kuu, Kuf, weights), kff=kff, Y=Y, noise=noise)


# S subsets of different sizes as one batch of equally large blocks.


@dataclass(frozen=True, slots=True)
class Subset:
    """Where the points of S subsets stand in a padded batch as wide as the largest of them."""

    index: Int[Tensor, "S M"]
    """Candidates of each subset in their order, then padding."""
    present: Bool[Tensor, "S M"]
    """False where a place is padding."""

    @classmethod
    def of(cls, mask: Masks) -> "Subset":
        """The places of the candidates that each mask includes."""
        widest = int(mask.sum(-1).max()) if mask.numel() else 0
        index = torch.argsort(mask.int(), dim=-1, descending=True, stable=True)[:, :widest]
        return cls(index, torch.gather(mask, 1, index))

    def rows(self, A: Float[Tensor, "K C"]) -> Float[Tensor, "S M C"]:
        """Rows of `A` that belong to each subset, zero where a place is padding."""
        return A[self.index] * self.present[..., None]

    def square(self, A: Float[Tensor, "K K"]) -> Float[Tensor, "S M M"]:
        """Sub-matrices of `A`; padding is independent of everything and of average variance."""
        return self.block(A) + torch.diag_embed((~self.present) * A.diagonal().mean().detach())

    def block(self, A: Float[Tensor, "*G K K"]) -> Float[Tensor, "S *G M M"]:
        """Sub-matrices of one or several `A`, zero where a place is padding."""
        both = self.present[:, :, None] & self.present[:, None, :]
        blocks = A[..., self.index[:, :, None], self.index[:, None, :]] * both
        return blocks.movedim(-3, 0)


def subset_blocks(
    Kuu: Float[Tensor, "K K"], Kuf: Float[Tensor, "K N"], mask: Masks
) -> tuple[Float[Tensor, "S M M"], Float[Tensor, "S M N"]]:
    """Kernel blocks of S subsets of the candidates, padded to the largest of them.

    A padded place is an inducing value that is independent of the data, so any bound of the padded
    blocks is the bound of the subset. S · N · max|Z| numbers instead of S · N · K.
    """
    subset = Subset.of(mask)
    return subset.square(Kuu), subset.rows(Kuf)
