"""The collapsed bound of rows that come in chunks: its sufficient statistics and its gradient.

With K_** + jitter·I = L Lᵀ, V = L⁻¹ K_*f and W = diag(w), where row i has noise variance 1/w_i, a
collapsed bound depends on the data through sums over rows alone: C = V W Vᵀ, D = V W Y and four
scalars (`Moments`). Sums over chunks, over processes or over time can be added.

The gradient (`two_pass_bound`) takes two passes. With K_uu = L Lᵀ, V = L⁻¹ K_uf, C = V Vᵀ,
d = V Y, B = I + C/σ², β = B⁻¹ d/σ² and t_i = k_ii − ‖v_i‖² the collapsed bound is

    F = −NP/2 log 2πσ² − P/2 log|B| − (‖Y‖² − ⟨d, β⟩)/(2σ²) − P/(2σ²) Σ_i t_i.

Pass one accumulates C, d, ‖Y‖² and Σ t_i. The remaining terms have the size of K_uu and are
differentiated in closed form; pass two propagates the gradient to each chunk of the kernel:

    ∂F/∂K_uf = L⁻ᵀ [(P(I − B⁻¹) − ββᵀ) V + β Yᵀ] / σ²
    ∂F/∂K_uu = −½ L⁻ᵀ [P(B + B⁻¹ − 2I) + ββᵀ] L⁻¹
    ∂F/∂k_ii = −P/(2σ²),   ∂F/∂Y = −(Y − Vᵀβ)/σ²

The Cholesky factor itself is not differentiated. Memory is O(chunk · M + M²) for any N. A row of
weight w counts as w equal rows: its terms of these sums and of the gradient are multiplied by w.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import log, pi
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds import row_blocks
from winnowgp.bounds.collapsed import optimal_posterior, weight_correction
from winnowgp.errors import InputError
from winnowgp.linalg import definite_cholesky, half_log_det, solve_lower, squared_norm


@dataclass(frozen=True, slots=True)
class Moments:
    """Moments of the data in whitened candidate coordinates, summed over rows.

    Attributes:
        C: V W Vᵀ.
        D: V W Y.
        square: Σ_i w_i ‖y_i‖², over all P outputs.
        diagonal: Σ_i w_i k(x_i, x_i).
        constant: Σ_i ½ log(w_i / 2π), the log-normaliser of each output's density.
        N: number of observations; with sample weights, their sum.
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


KernelChunk: TypeAlias = tuple[
    Float[Tensor, "K B"], Float[Tensor, " B"], Float[Tensor, "B P"], Float[Tensor, " B"]
]
"""K(candidates, rows), the diagonal of K(rows, rows), targets and noise precisions of some rows."""


def chunked_moments(L: Float[Tensor, "K K"], chunks: Iterable[KernelChunk]) -> Moments:
    """Return the moments of rows that come in chunks; O(N K²) time and the memory of one chunk.

    Each block is whitened by a solve before it is squared. Squaring first and whitening the sum
    from both sides multiplies the rounding error by cond(K_**). Whitening by products with an
    inverse is faster, but at a condition number of 1e18 it changes the bound by up to 2e-4
    (relative) with the inverse of L and by 5e-6 with inverses of its diagonal blocks of thirty
    rows; a solve changes it by 3e-8.

    Args:
        L: factor of the candidates' covariance, jitter included.
        chunks: at least one row in total; precisions are positive.
    """
    C, D, N = torch.zeros_like(L), None, 0
    square = diagonal = constant = L.new_zeros(())
    for Kuf, kff, Y, weights in chunks:
        scale = weights.sqrt()
        V = solve_lower(L, Kuf).mul_(scale)
        row_blocks.add_gram(C, V, V)
        D = L.new_zeros(len(L), Y.shape[1]) if D is None else D
        D.addmm_(V, scale[:, None] * Y)
        square = square + (weights[:, None] * Y.square()).sum()
        diagonal = diagonal + weights @ kff
        constant = constant + 0.5 * (weights / (2 * pi)).log().sum()
        N += len(Y)
    if D is None or not N:
        raise InputError("`chunks` must hold at least one row in total; got none.")
    if not bool(torch.isfinite(constant)):
        raise InputError(
            "`weights` must be positive and finite noise precisions; some are zero, negative or "
            "not finite."
        )
    return Moments(
        C=row_blocks.from_panels(C), D=D, square=square, diagonal=diagonal, constant=constant, N=N
    )


def moment_bound(moments: Moments) -> Float[Tensor, ""]:
    """Return the collapsed bound of all K candidates in nats; O(K³).

    −½ [NP log 2π + P log|I + C| − P Σ log w + Σ w‖y‖² − Dᵀ(I + C)⁻¹D + P (Σ w k_ii − tr C)]
    """
    P, LB = moments.D.shape[1], _factor(moments.C)
    unexplained = moments.diagonal - moments.C.diagonal().sum()
    fit = moments.square - squared_norm(solve_lower(LB, moments.D))
    return P * (moments.constant - half_log_det(LB) - 0.5 * unexplained) - 0.5 * fit


def moment_upper_bound(moments: Moments) -> Float[Tensor, ""]:
    """Return the upper bound of `evidence.upper_bound` for noise shared by all rows; O(K³).

    With w = 1/σ² the trace is t = σ² (Σ w k_ii − tr C), and widening the noise by t multiplies C, D
    and Σ w‖y‖² by r = σ²/(σ² + t).
    """
    # t is non-negative up to rounding.
    r = 1 / (1 + (moments.diagonal - moments.C.diagonal().sum()).clamp_min(0))
    fit = r * moments.square - squared_norm(solve_lower(_factor(r * moments.C), r * moments.D))
    log_scale = moments.constant - half_log_det(_factor(moments.C))
    return moments.D.shape[1] * log_scale - 0.5 * fit


def moment_posterior(*moments: Moments) -> tuple[Float[Tensor, "K P"], Float[Tensor, "#P K K"]]:
    """Return the optimal q(v) of whitened inducing values (`optimal_posterior`); O(K³) each.

    Args:
        moments: moments of all outputs, or of one output each.

    Returns:
        Means, and one factor of the covariance for each of the moments.
    """
    posteriors = [optimal_posterior(_factor(m.C), m.D) for m in moments]
    return torch.cat([mean for mean, _ in posteriors], 1), torch.stack([F for _, F in posteriors])


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


class ChunkedMean(ABC):
    """A prior mean at fixed parameters, with the pull-back of gradients onto these parameters."""

    @abstractmethod
    def fork(self) -> "ChunkedMean":
        """Return the same mean with sums of its own, which are zero."""

    @abstractmethod
    def centred(self, block: row_blocks.RowBlock) -> Float[Tensor, "B P"]:
        """Return the targets of a block minus their prior mean."""

    @abstractmethod
    def pull(self, block: row_blocks.RowBlock, cotangent: Float[Tensor, "B P"]) -> None:
        """Add the pull-back of ∂F/∂mean of a block to the gradient of the parameters."""

    @abstractmethod
    def pulled(self) -> row_blocks.Sums:
        """Return the gradient accumulated since the last call, one tensor per parameter."""


@dataclass(frozen=True, slots=True)
class BoundGradient:
    """A bound in nats and its gradient."""

    value: Float[Tensor, ""]
    noise: Float[Tensor, ""]
    """Gradient with respect to the noise variance."""
    mean: tuple[Tensor, ...]
    """Gradient with respect to the parameters of the prior mean."""
    kernel: tuple[Tensor, ...]
    """Gradient with respect to kernel parameters and inducing points, in the kernel's order."""


@torch.no_grad()
def two_pass_bound(
    kernel: row_blocks.ChunkedKernel,
    blocks: row_blocks.RowBlocks,
    *,
    mean: ChunkedMean,
    noise: Float[Tensor, ""],
    keep: int | None = None,
    dtype: torch.dtype | None = None,
) -> BoundGradient:
    """Return the collapsed bound and its gradient; O(N M²) time.

    Args:
        kernel: kernel at fixed parameters.
        blocks: the rows.
        mean: prior mean.
        noise: σ².
        keep: largest number of elements to keep in memory between the passes; see `WhitenedChunks`.
        dtype: dtype of the matrices with one column per row; their sums have the dtype of `noise`.
            float32 matrices with float64 sums are faster, and accurate to seven digits per row.

    Raises:
        NotPositiveDefiniteError: K_uu or B cannot be factorised.
    """
    chunks = row_blocks.WhitenedChunks.for_gradients(kernel, blocks, keep=keep, dtype=dtype)
    C, d, square, trace = _accumulate(chunks, mean, noise)
    P, M, L_inverse = d.shape[1], C.shape[0], chunks.L_inverse
    N = blocks.observations
    eye = torch.eye(M, dtype=noise.dtype, device=noise.device)
    LB = definite_cholesky(eye + C / noise)
    B_inverse = torch.cholesky_inverse(LB)
    beta = torch.cholesky_solve(d, LB) / noise
    residual = square - (d * beta).sum()
    value = -0.5 * (
        N * P * (log(2 * pi) + noise.log())
        + 2 * P * half_log_det(LB)
        + residual / noise
        + P * trace
    )
    noise_gradient = 0.5 * (
        P * (M - B_inverse.diagonal().sum() - N) / noise
        + residual / noise**2
        - beta.square().sum() / noise
        + P * (trace / noise)
    )
    # ∂F/∂K_uu = −½ L⁻ᵀ [P(C/σ² − I + B⁻¹) + ββᵀ] L⁻¹
    inner = torch.addmm(P * (C / noise - eye + B_inverse), beta, beta.mT)
    Kuu_gradient = -0.5 * (L_inverse.mT @ (inner @ L_inverse))
    if M:
        Kuu_gradient.diagonal().add_(Kuu_gradient.diagonal().sum() * (row_blocks.JITTER / M))
    # ∂F/∂K_uf = L⁻ᵀ [(P I − P B⁻¹ − ββᵀ) V + β Yᵀ] / σ²
    middle = torch.addmm(P * eye - P * B_inverse, beta, beta.mT, alpha=-1)
    middle = (L_inverse.mT @ middle / noise).to(chunks.dtype)
    left = (L_inverse.mT @ beta / noise).to(chunks.dtype)
    beta = beta.to(chunks.dtype)

    def pull_back(shard: Iterable[row_blocks.WhitenedChunk]) -> row_blocks.Sums:
        own_kernel, own_mean = kernel.fork(), mean.fork()
        for chunk in shard:
            V, Y, weights = chunk.V, mean.centred(chunk.block), chunk.block.weights
            Y_gradient = (Y - V.mT @ beta) / noise
            kff_gradient = (P / noise).expand(len(Y))
            Kuf_gradient = (left @ Y.mT.to(V.dtype)).addmm_(middle, V)
            if weights is not None:
                Kuf_gradient.mul_(weights.to(V.dtype))
                Y_gradient = weights[:, None] * Y_gradient
                kff_gradient = weights * kff_gradient
            own_mean.pull(chunk.block, Y_gradient)
            own_kernel.pull_uf(chunk.block, Kuf_gradient, chunk.Kuf)
            own_kernel.pull_ff(chunk.block, -0.5 * kff_gradient)
        return (*own_kernel.pulled(), *own_mean.pulled())

    pulled = chunks.summed(pull_back)
    split = len(pulled) - len(mean.pulled())
    gradient = kernel.gradient(pulled[:split], Kuu_gradient)
    return BoundGradient(value, noise_gradient, pulled[split:], gradient)


def _accumulate(
    chunks: row_blocks.WhitenedChunks, mean: ChunkedMean, noise: Float[Tensor, ""]
) -> row_blocks.Sums:
    """Return C, d, ‖Y‖² and Σ t_i/σ² of all rows: pass one."""
    M, P = len(chunks.L), chunks.blocks.P

    def sums(shard: Iterable[row_blocks.WhitenedChunk]) -> row_blocks.Sums:
        C, d = noise.new_zeros(M, M), noise.new_zeros(M, P)
        square = trace = noise.new_zeros(())
        for chunk in shard:
            Y, w, t = mean.centred(chunk.block), chunk.block.weights, chunk.t.to(noise.dtype)
            V = chunk.V if w is None else chunk.V * w.to(chunk.V.dtype)
            row_blocks.add_gram(C, V, chunk.V)
            row_blocks.add_product(d, V, Y.to(V.dtype))
            square = square + (Y.square() if w is None else w[:, None] * Y.square()).sum()
            trace = trace + (t if w is None else w * t).sum() / noise
        return C, d, square, trace

    C, d, square, trace = chunks.summed(sums)
    return row_blocks.from_panels(C), d, square, trace


@torch.no_grad()
def evidence_gradient(
    kernel: row_blocks.ChunkedKernel,
    block: row_blocks.RowBlock,
    *,
    mean: ChunkedMean,
    noise: Float[Tensor, ""],
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
