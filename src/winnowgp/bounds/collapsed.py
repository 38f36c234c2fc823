"""The collapsed bound (Titsias 2009), its moments, exact evidence and upper bound; subsets.

All functions here are pure: they take kernel blocks and targets and return nats, summed over rows
and outputs. M inducing points Z and N rows X with P outputs that share one kernel have the blocks

| argument | shape      | meaning                                       |
|----------|------------|-----------------------------------------------|
| `Kuu`    | `[M M]`    | prior covariance of the inducing values       |
| `Kuf`    | `[M N]`    | prior cross-covariance to the rows            |
| `kff`    | `[N]`      | prior variance of each row                    |
| `Y`      | `[N P]`    | targets minus the prior mean                  |
| `noise`  | `[]`/`[N]` | noise variance, shared or one value per row   |

`Kuu` and `Kuf` may carry leading batch axes, one element per subset. M = 0 is the empty subset.

With K_** + jitter·I = L Lᵀ, V = L⁻¹ K_*f and W = diag(w), where row i has noise variance 1/w_i, a
collapsed bound depends on the data through sums over rows alone: C = V W Vᵀ, D = V W Y and four
scalars (`Moments`). Sums over chunks, over processes or over time can be added.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import log, pi
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from winnowgp.bounds import row_blocks
from winnowgp.bounds.panels import add_gram, from_panels, inverted, triangle_inverses, whiten
from winnowgp.linalg import cholesky, definite_cholesky, half_log_det, solve_lower, squared_norm
from winnowgp.typing import Masks, Nats, Noise, Scalar, Weights


@dataclass(frozen=True, slots=True)
class Projection:
    """The factorisations that every Gaussian bound with M inducing points needs.

    W = diag(1 / variance), and `Q_ff = Vᵀ V` is the prior covariance that the inducing points
    explain.
    """

    V: Float[Tensor, "*batch M N"]
    """L⁻¹ K_uf, with K_uu = L Lᵀ."""
    LB: Float[Tensor, "*batch M M"]
    """Cholesky factor of B = I + V W Vᵀ."""
    c: Float[Tensor, "*batch M P"]
    """LB⁻¹ V W Y."""
    fit: Float[Tensor, "*batch"]
    """Σ_p y_pᵀ (Q_ff + W⁻¹)⁻¹ y_p."""
    log_det: Float[Tensor, "*batch"]
    """log |Q_ff + W⁻¹|."""

    def explained_variance(self) -> Float[Tensor, "*batch N"]:
        """Return the explained prior variance q_ii = Σ_m V_mi² of each row, at most k_ii."""
        return self.V.square().sum(-2)

    def log_normal(self) -> Float[Tensor, "*batch"]:
        """Return Σ_p log N(y_p | 0, Q_ff + W⁻¹), in nats."""
        N, P = self.V.shape[-1], self.c.shape[-1]
        return -0.5 * (N * P * log(2 * pi) + P * self.log_det + self.fit)


def project(
    Kuu: Float[Tensor, "*batch M M"],
    Kuf: Float[Tensor, "*batch M N"],
    Y: Float[Tensor, "N P"],
    variance: Float[Tensor, "*#batch N"],
) -> Projection:
    """Return the factorisations that Gaussian bounds with M inducing points need; O(N M² + M³).

    Args:
        variance: noise variance of each row.
    """
    V = solve_lower(cholesky(Kuu).L, Kuf)
    # A = V W^½, so that B = I + A Aᵀ; B ≥ I needs no jitter.
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


def collapsed_bound(
    Kuu: Float[Tensor, "*batch M M"],
    Kuf: Float[Tensor, "*batch M N"],
    *,
    kff: Float[Tensor, " N"],
    Y: Float[Tensor, "N P"],
    noise: Noise,
) -> Float[Tensor, "*batch"]:
    """Return the ELBO for Gaussian noise at the optimal q(u), in nats.

        L(Z) = Σ_p log N(y_p | 0, Q_ff + Σ) − (P/2) Σ_i (k_ii − q_ii) / σ²_i

    The bound never exceeds the log evidence and equals it when Z = X; O(N M²). It is also defined
    for the empty subset, which the paper excludes: there q(f) = p(f), and
    L(∅) = log N(y | 0, Σ) − tr(K_ff Σ⁻¹)/2. Equation 1 of the paper.

    Returns:
        Nats, summed over rows and outputs; one number per batch element.
    """
    projection = project(Kuu, Kuf, Y, noise.expand(Y.shape[0]))
    unexplained = (kff - projection.explained_variance()) / noise
    return projection.log_normal() - 0.5 * Y.shape[1] * unexplained.sum(-1)


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


def optimal_posterior(
    LB: Float[Tensor, "*batch M M"], D: Float[Tensor, "*batch M P"]
) -> tuple[Float[Tensor, "*batch M P"], Float[Tensor, "*batch M M"]]:
    """Return the optimal q(v_p) = N(B⁻¹ D_p, B⁻¹) of whitened inducing values u = L v; O(M³).

    With V = L⁻¹ K_uf, B = I + V W Vᵀ and D = V W Y this is the q(u) of section 2.2 of the paper, in
    coordinates where the prior is N(0, I). The covariance is the same for every output.

    Args:
        LB: Cholesky factor of B.
        D: one column per output.

    Returns:
        The means, and the square factor F = LB⁻ᵀ of the covariance F Fᵀ.
    """
    if LB.dim() == 2:
        F = inverted(LB).mT
    else:
        F = solve_lower(LB, torch.eye(LB.shape[-1], dtype=LB.dtype, device=LB.device)).mT
    return F @ (F.mT @ D), F


def weight_correction(weights: Float[Tensor, " N"], noise: Noise) -> Scalar:
    """Return the difference between w_i repeated observations and one with noise σ²/w_i, in nats.

        Σ_i log [N(y_i | f_i, σ²)^w_i / N(y_i | f_i, σ²/w_i)] = ½ Σ_i [(1 − w_i) log 2πσ² − log w_i]

    The difference depends on neither y nor f. A bound with noise σ²/w_i in row i, plus this for
    each output, is the bound in which row i counts as w_i equal rows.

    Args:
        weights: w.
        noise: σ², one for all rows or one each.
    """
    log_noise = log(2 * pi) + noise.log()
    return 0.5 * (((1 - weights) * log_noise).sum() - weights.log().sum())


# The bound of rows that come in chunks: its sufficient statistics.


@dataclass(frozen=True, slots=True)
class Moments:
    """Moments of the data in whitened candidate coordinates, summed over rows.

    Attributes:
        C: V W Vᵀ.
        D: V W Y.
        square: Σ_i w_i ‖y_i‖², over all P outputs.
        diagonal: Σ_i w_i k(x_i, x_i).
        constant: Σ_i ½ log(w_i / 2π), the log-normaliser of each output's density.
        N: number of observations; with sample weights, their sum. Missing targets count as well.
    """

    C: Float[Tensor, "K K"]
    D: Float[Tensor, "K P"]
    square: Float[Tensor, ""]
    diagonal: Float[Tensor, ""]
    constant: Float[Tensor, ""]
    N: int | float

    @property
    def sums(self) -> tuple[Tensor, ...]:
        """C, D, Σ w‖y‖² and Σ w k_ii."""
        return self.C, self.D, self.square, self.diagonal

    def __add__(self, other: "Moments") -> "Moments":
        """Return the moments of the rows of both; they must share L."""
        return Moments(
            C=self.C + other.C,
            D=self.D + other.D,
            square=self.square + other.square,
            diagonal=self.diagonal + other.diagonal,
            constant=self.constant + other.constant,
            N=self.N + other.N,
        )


GroupedChunk: TypeAlias = tuple[
    Float[Tensor, "K B"],
    Float[Tensor, " B"],
    Sequence[tuple[Float[Tensor, "B p"], Float[Tensor, " B"]]],
]
"""K(candidates, rows), the diagonal of K(rows, rows), and targets and noise precisions of groups of
targets in some rows; a precision is zero where targets are missing."""


def grouped_sums(L: Float[Tensor, "K K"], chunks: Iterable[GroupedChunk]) -> row_blocks.Sums:
    """Return C = V W Vᵀ, D = V W Y, Σ w y² of each target and Σ w k_ii, one after another.

    There are four tensors for each group of targets; O(N K²) time for each, and the memory of one
    chunk. The kernel is whitened once, by a solve before it is squared. Squaring first and
    whitening the sum from both sides multiplies the rounding error by cond(K_**). Whitening by
    products with an inverse is faster, but at a condition number of 1e18 it changes the bound by up
    to 2e-4 (relative); a solve changes it by 3e-8. See `panels.whiten` for a GPU.

    Args:
        L: factor of the candidates' covariance, jitter included.
        chunks: all chunks have the same groups.
    """
    totals: list[list[Tensor]] = []
    inverses = triangle_inverses(L)
    for Kuf, kff, groups in chunks:
        # Weights that are one number for all rows scale L instead of V.
        scaled = len(groups) == 1 and len(Kuf.mT) > 1 and groups[0][1].stride(0) == 0
        if scaled:
            root = groups[0][1][0].sqrt()
            V = whiten(L / root, Kuf, inverses=None if inverses is None else inverses.times(root))
        else:
            V = whiten(L, Kuf, inverses=inverses)
        if not totals:
            totals = [_empty_sums(L, Y.shape[1]) for Y, _ in groups]
        for total, (Y, weights) in zip(totals, groups, strict=True):
            scale = weights.sqrt()
            # In place where no other group needs V.
            own = V if scaled else V.mul_(scale) if len(groups) == 1 else V * scale
            add_gram(total[0], own, own)
            total[1].addmm_(own, scale[:, None] * Y)
            total[2] = total[2] + (weights[:, None] * Y.square()).sum(0)
            total[3] = total[3] + weights @ kff
    return tuple(t for C, *others in totals for t in (from_panels(C), *others))


def _empty_sums(L: Float[Tensor, "K K"], P: int) -> list[Tensor]:
    return [torch.zeros_like(L), L.new_zeros(len(L), P), L.new_zeros(P), L.new_zeros(())]


def moment_bound(moments: Moments) -> Float[Tensor, ""]:
    """Return the collapsed bound of all K candidates in nats; O(K³).

    −½ [NP log 2π + P log|I + C| − P Σ log w + Σ w‖y‖² − Dᵀ(I + C)⁻¹D + P (Σ w k_ii − tr C)]
    """
    P, LB = moments.D.shape[1], _factor(moments.C)
    unexplained = moments.diagonal - moments.C.diagonal().sum()
    fit = moments.square - squared_norm(solve_lower(LB, moments.D))
    return P * (moments.constant - half_log_det(LB) - 0.5 * unexplained) - 0.5 * fit


def moment_upper_bound(moments: Moments) -> Float[Tensor, ""]:
    """Return an upper bound on the log evidence (Titsias 2014); O(K³).

    With Σ = W⁻¹ and t = Σ w k_ii − tr C, the trace of Σ^{-½} (K_ff − Q_ff) Σ^{-½}, the evidence has
    K_ff + Σ ⪯ Q_ff + (1 + t) Σ in its quadratic term. Widening the noise to (1 + t) Σ multiplies C,
    D and Σ w‖y‖² by r = 1/(1 + t). With noise shared by all rows it is `upper_bound`.
    """
    # t is non-negative up to rounding.
    r = 1 / (1 + (moments.diagonal - moments.C.diagonal().sum()).clamp_min(0))
    fit = r * moments.square - squared_norm(solve_lower(_factor(r * moments.C), r * moments.D))
    log_scale = moments.constant - half_log_det(_factor(moments.C))
    return moments.D.shape[1] * log_scale - 0.5 * fit


def moment_posterior(*moments: Moments) -> tuple[Float[Tensor, "K P"], Float[Tensor, "#P K K"]]:
    """Return the optimal q(v) of whitened inducing values (`optimal_posterior`); O(K³) each.

    Args:
        moments: moments of all outputs, or of groups of outputs, in this order.

    Returns:
        Means, and the factor of the covariance, one for each output if there are several moments.
    """
    posteriors = [optimal_posterior(_factor(m.C), m.D) for m in moments]
    means = torch.cat([mean for mean, _ in posteriors], 1)
    if len(moments) == 1:
        return means, posteriors[0][1][None]
    return means, torch.stack([F for mean, F in posteriors for _ in range(mean.shape[1])])


def prior_moments(moments: Moments) -> Moments:
    """Return moments whose bounds are K times those expected for targets drawn from the prior.

    A bound depends on the targets through D Dᵀ and Σ w y² alone. For y ~ N(0, Q_** + W⁻¹), the
    prior explained by all K candidates, with C = V W Vᵀ = U diag(s) Uᵀ,

        E[D Dᵀ] = V W (VᵀV + W⁻¹) W Vᵀ = C² + C,   E[Σ w y²] = tr C + N.

    The K columns of √K U diag(s (s + 1))^½ are such a D for K outputs, so that the collapsed bound
    of any subset, divided by K, is exactly its expectation; O(K³).

    Args:
        moments: moments of the rows; their targets are not used.
    """
    K = len(moments.C)
    s, U = torch.linalg.eigh(moments.C)
    s = s.clamp_min(0)  # non-negative up to rounding
    return replace(
        moments,
        D=U * (K * s * (s + 1)).sqrt(),
        square=K * (moments.C.diagonal().sum() + moments.N),
    )


def _factor(C: Float[Tensor, "K K"]) -> Float[Tensor, "K K"]:
    """Return the Cholesky factor of B = I + C."""
    return definite_cholesky(C + torch.eye(len(C), dtype=C.dtype, device=C.device))


# Subsets of the candidates: padded batches, and weights in [0, 1] (appendix B.1 of the paper).


@dataclass(frozen=True, slots=True)
class Subset:
    """Indices of S subsets of the candidates, padded to the size of the largest subset."""

    index: Int[Tensor, "S M"]
    """Candidates of each subset in increasing order, followed by padding."""
    present: Bool[Tensor, "S M"]
    """False where an entry of `index` is padding."""

    @classmethod
    def of(cls, mask: Masks) -> "Subset":
        """Return the indices of the candidates that each mask includes."""
        widest = int(mask.sum(-1).max()) if mask.numel() else 0
        index = torch.argsort(mask.int(), dim=-1, descending=True, stable=True)[:, :widest]
        return cls(index, torch.gather(mask, 1, index))

    def rows(self, A: Float[Tensor, "K C"]) -> Float[Tensor, "S M C"]:
        """Return the rows of `A` that belong to each subset; padded rows are zero."""
        return A[self.index] * self.present[..., None]

    def square(self, A: Float[Tensor, "K K"]) -> Float[Tensor, "S M M"]:
        """Return the sub-matrices of `A`; padding is diagonal with the mean variance of `A`."""
        return self.block(A) + torch.diag_embed((~self.present) * A.diagonal().mean().detach())

    def block(self, A: Float[Tensor, "*G K K"]) -> Float[Tensor, "S *G M M"]:
        """Return the sub-matrices of one or several `A`; padded rows and columns are zero."""
        both = self.present[:, :, None] & self.present[:, None, :]
        blocks = A[..., self.index[:, :, None], self.index[:, None, :]] * both
        return blocks.movedim(-3, 0)


def subset_blocks(
    Kuu: Float[Tensor, "K K"], Kuf: Float[Tensor, "K N"], mask: Masks
) -> tuple[Float[Tensor, "S M M"], Float[Tensor, "S M N"]]:
    """Return the kernel blocks of S subsets of the candidates, padded to the largest subset.

    A padded entry is an inducing value independent of the data, so any bound of the padded blocks
    is the bound of the subset. Memory is S · N · max|Z| numbers instead of S · N · K.

    Args:
        mask: S subsets of the candidates.
    """
    subset = Subset.of(mask)
    return subset.square(Kuu), subset.rows(Kuf)


def masked_blocks(
    Kuu: Float[Tensor, "K K"], Kuf: Float[Tensor, "K N"], weights: Weights
) -> tuple[Float[Tensor, "S K K"], Float[Tensor, "S K N"]]:
    """Return the kernel blocks of a prior in which candidate k has weight b_k ∈ [0, 1].

        κ̂(z_j, z_k) = b_j b_k κ(z_j, z_k) for j ≠ k,   κ̂(z_k, z_k) = b_k (κ(z_k, z_k) − s) + s,
        κ̂(z_k, x) = b_k κ(z_k, x)

    A candidate of weight zero becomes an independent N(0, s). The paper (appendix B.1) has s = 1;
    the mean prior variance suits any kernel, and with weights 0 and 1 the bound does not depend on
    s. The result is positive definite, since (1 − b)(b κ + s) ≥ 0 is added to the diagonal of
    b bᵀ ∘ K.
    """
    scaled = weights[:, :, None] * weights[:, None, :] * Kuu
    return scaled + added_variance(Kuu, weights), weights[:, :, None] * Kuf


def added_variance(Kuu: Float[Tensor, "K K"], weights: Weights) -> Float[Tensor, "S K K"]:
    """Return diag((1 − b)(b κ + s)), which `masked_blocks` adds to b bᵀ ∘ K."""
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
    """Return L̂(Z*; b), the collapsed bound with weights b on the candidates, in nats.

    The prior covariance of different candidates is b_j b_k κ(z_j, z_k), and that of a candidate and
    a row b_k κ(z_k, x); a candidate of weight zero is independent of the function. With
    b ∈ {0, 1}^K the bound equals L(Z). In between it is smooth, so that the relaxed gradient can
    differentiate it. The cost is O(S N K²) for any weights.

    Args:
        weights: weights b of the candidates, `[S K]`.
    """
    return collapsed_bound(*masked_blocks(Kuu, Kuf, weights), kff=kff, Y=Y, noise=noise)
