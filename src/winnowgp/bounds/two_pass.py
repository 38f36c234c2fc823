"""The collapsed bound and its exact gradient in two passes over chunks of rows.

With K_uu = L Lᵀ, V = L⁻¹ K_uf, C = V Vᵀ, d = V Y, B = I + C/σ², β = B⁻¹ d/σ² and
t_i = k_ii − ‖v_i‖² the collapsed bound is

    F = −NP/2 log 2πσ² − P/2 log|B| − (‖Y‖² − ⟨d, β⟩)/(2σ²) − P/(2σ²) Σ_i t_i.

Pass one accumulates C, d, ‖Y‖² and Σ t_i. What is left has the size of K_uu and is differentiated
in closed form; pass two hands its share of the gradient to each chunk of the kernel:

    ∂F/∂K_uf = L⁻ᵀ [(P(I − B⁻¹) − ββᵀ) V + β Yᵀ] / σ²
    ∂F/∂K_uu = −½ L⁻ᵀ [P(B + B⁻¹ − 2I) + ββᵀ] L⁻¹
    ∂F/∂k_ii = −P/(2σ²),   ∂F/∂Y = −(Y − Vᵀβ)/σ²

The Cholesky factor itself is never differentiated. The tighter bound replaces t_i/σ² by
log(1 + t_i/σ²) and weights row i by 1/(σ² + t_i) instead of 1/σ²: pass one then also accumulates
V diag(1/(σ² + t)) Vᵀ. Memory is O(chunk · M + M²) at any N.

A row of weight w counts as w equal rows: it enters each of these sums w times, and its share of the
gradient is w times as large.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from math import log, pi

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds.collapsed import weight_correction
from winnowgp.bounds.row_blocks import (
    JITTER,
    ChunkedKernel,
    RowBlock,
    RowBlocks,
    Sums,
    WhitenedChunk,
    WhitenedChunks,
    add_gram,
    add_product,
    from_panels,
)
from winnowgp.linalg import definite_cholesky, half_log_det


class ChunkedMean(ABC):
    """A prior mean at fixed parameters, and the pull-back of its gradient onto those."""

    @abstractmethod
    def centred(self, block: RowBlock) -> Float[Tensor, "B P"]:
        """Targets of some rows less their prior mean."""

    @abstractmethod
    def pull(self, block: RowBlock, cotangent: Float[Tensor, "B P"]) -> None:
        """Add what ∂F/∂mean of some rows comes to."""

    @abstractmethod
    def pulled(self) -> Sums:
        """What was added since it was asked last, one tensor for each parameter."""


@dataclass(frozen=True, slots=True)
class BoundGradient:
    """A bound in nats and its gradient."""

    value: Float[Tensor, ""]
    noise: Float[Tensor, ""]
    """With respect to the noise variance."""
    mean: tuple[Tensor, ...]
    """With respect to the parameters of the prior mean."""
    kernel: tuple[Tensor, ...]
    """With respect to the parameters of the kernel and the points, in the kernel's order."""


@dataclass(frozen=True, slots=True)
class _Sums:
    """What pass one accumulates."""

    C: Float[Tensor, "M M"]
    d: Float[Tensor, "M P"]
    square: Float[Tensor, ""]
    trace: Float[Tensor, ""]
    """Σ t_i/σ², or Σ log(1 + t_i/σ²)."""
    trace_noise: Float[Tensor, ""]
    """Derivative of `trace` with respect to σ²."""
    weighted: Float[Tensor, "M M"]
    """V diag(1/σ²) Vᵀ, or V diag(1/(σ² + t)) Vᵀ."""


@dataclass(frozen=True, slots=True)
class _Back:
    """What pass two multiplies a chunk with."""

    L_inverse_T: Float[Tensor, "M M"]
    middle: Float[Tensor, "M M"]
    """L⁻ᵀ (P I − P B⁻¹ − ββᵀ) / σ²; without P I where rows are weighted one by one."""
    left: Float[Tensor, "M P"]
    """L⁻ᵀ β / σ²."""
    beta: Float[Tensor, "M P"]
    P: int
    noise: Float[Tensor, ""]
    tighter: bool


@torch.no_grad()
def two_pass_bound(
    kernel: ChunkedKernel,
    blocks: RowBlocks,
    *,
    mean: ChunkedMean,
    noise: Float[Tensor, ""],
    tighter: bool = False,
    keep: int | None = None,
    dtype: torch.dtype | None = None,
) -> BoundGradient:
    """The collapsed (or the tighter collapsed) bound and its gradient; O(N M²) time.

    Args:
        blocks: the rows.
        mean: of the prior.
        noise: σ².
        tighter: the tighter collapsed bound.
        keep: numbers that may be kept between the passes; see `WhitenedChunks`.
        dtype: of what has as many columns as a block has rows. What they add up to has the dtype of
            the noise: float32 here and float64 there is quicker, and good to seven digits a row.

    Raises:
        NotPositiveDefiniteError: K_uu or B cannot be factorised.
    """
    chunks = WhitenedChunks.for_gradients(kernel, blocks, keep=keep, dtype=dtype)
    sums = _accumulated(chunks, mean, noise, tighter)
    P, M, L_inverse = sums.d.shape[1], sums.C.shape[0], chunks.L_inverse
    count = blocks.observations
    eye = torch.eye(M, dtype=noise.dtype, device=noise.device)
    LB = definite_cholesky(eye + sums.C / noise)
    B_inverse = torch.cholesky_inverse(LB)
    beta = torch.cholesky_solve(sums.d, LB) / noise
    rest = sums.square - (sums.d * beta).sum()
    value = -0.5 * (
        count * P * (log(2 * pi) + noise.log())
        + 2 * P * half_log_det(LB)
        + rest / noise
        + P * sums.trace
    )
    noise_gradient = 0.5 * (
        P * (M - B_inverse.diagonal().sum() - count) / noise
        + rest / noise**2
        - beta.square().sum() / noise
        - P * sums.trace_noise
    )
    # ∂F/∂K_uu = −½ L⁻ᵀ [P(C_w − I + B⁻¹) + ββᵀ] L⁻¹ with C_w the weighted Gram matrix
    inner = torch.addmm(P * (sums.weighted - eye + B_inverse), beta, beta.mT)
    Kuu_gradient = -0.5 * (L_inverse.mT @ (inner @ L_inverse))
    if M:
        Kuu_gradient.diagonal().add_(Kuu_gradient.diagonal().sum() * (JITTER / M))
    # ∂F/∂K_uf = L⁻ᵀ [(P I − P B⁻¹ − ββᵀ) V + β Yᵀ] / σ²; the tighter bound weights P I row by row.
    middle = torch.addmm((0 if tighter else P) * eye - P * B_inverse, beta, beta.mT, alpha=-1)
    rough = chunks.dtype
    back = _Back(
        L_inverse_T=L_inverse.mT.to(rough),
        middle=(L_inverse.mT @ middle / noise).to(rough),
        left=(L_inverse.mT @ beta / noise).to(rough),
        beta=beta.to(rough),
        P=P,
        noise=noise,
        tighter=tighter,
    )

    def pushed_back(parts: Iterable[WhitenedChunk]) -> Sums:
        for part in parts:
            _push_back(kernel, mean, part, back)
        return (*kernel.pulled(), *mean.pulled())

    pulled = chunks.summed(pushed_back)
    split = len(pulled) - len(mean.pulled())
    found = kernel.gradient(pulled[:split], Kuu_gradient)
    return BoundGradient(value, noise_gradient, pulled[split:], found)


def _accumulated(
    chunks: WhitenedChunks, mean: ChunkedMean, noise: Float[Tensor, ""], tighter: bool
) -> _Sums:
    """Pass one."""
    M, P, zero = len(chunks.L), chunks.blocks.P, noise.new_zeros(())

    def added(parts: Iterable[WhitenedChunk]) -> Sums:
        C, d, weighted = noise.new_zeros(M, M), noise.new_zeros(M, P), noise.new_zeros(M, M)
        square, trace, trace_noise = zero, zero, zero
        for part in parts:
            y, w, t = mean.centred(part.block), part.block.weights, part.t.to(noise.dtype)
            V, ones = (part.V, 1.0) if w is None else (part.V * w.to(part.V.dtype), w)
            add_gram(C, V, part.V)
            add_product(d, V, y.to(V.dtype))
            square = square + (y.square() if w is None else w[:, None] * y.square()).sum()
            if tighter:
                scale = (noise + t).reciprocal()
                add_product(weighted, V * scale.to(V.dtype), part.V.mT)
                trace = trace + (ones * (t / noise).log1p()).sum()
                trace_noise = trace_noise + (ones * (scale - 1 / noise)).sum()
            else:
                trace = trace + (ones * t).sum() / noise
        return C, d, square, trace, trace_noise, weighted if tighter else zero

    C, d, square, trace, trace_noise, weighted = chunks.summed(added)
    C = from_panels(C)
    if not tighter:
        weighted, trace_noise = C / noise, -trace / noise
    return _Sums(C, d, square, trace, trace_noise, weighted)


def _push_back(kernel: ChunkedKernel, mean: ChunkedMean, part: WhitenedChunk, back: _Back) -> None:
    """Pass two for one chunk."""
    block, V, dtype = part.block, part.V, part.V.dtype
    y, counts = mean.centred(block), block.weights
    pull = (y - V.mT @ back.beta) / back.noise
    # P/σ², or P/(σ² + t_i)
    weight = back.P / (back.noise + part.t.to(y.dtype) * back.tighter)
    gradient = (back.left @ y.mT.to(dtype)).addmm_(back.middle, V)
    if back.tighter:
        gradient.addmm_(back.L_inverse_T, V * weight.to(dtype))
    if counts is not None:
        gradient.mul_(counts.to(dtype))
        pull, weight = counts[:, None] * pull, counts * weight
    mean.pull(block, pull)
    kernel.pull_uf(block, gradient, part.Kuf)
    kernel.pull_ff(block, -0.5 * weight)


@torch.no_grad()
def evidence_gradient(
    kernel: ChunkedKernel, block: RowBlock, *, mean: ChunkedMean, noise: Float[Tensor, ""]
) -> BoundGradient:
    """The exact log evidence and its gradient, for a kernel whose points are the rows; O(N³).

        log p(Y) = −½ [NP log 2π + P log|A| + ⟨Y, α⟩],   A = K_ff + σ²I,  α = A⁻¹ Y
        ∂/∂A = ½ (ααᵀ − P A⁻¹),   ∂/∂Y = −α

    Several times quicker than differentiating a Cholesky factor by autograd. With weights the noise
    of row i is σ²/w_i, and `weight_correction` is added.

    Args:
        block: all rows.

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
