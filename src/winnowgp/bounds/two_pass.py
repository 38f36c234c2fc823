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

from dataclasses import dataclass
from math import log, pi

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds.repetition import repetition
from winnowgp.bounds.whitened_chunks import (
    CHUNK,
    JITTER,
    KEEP,
    ChunkedKernel,
    WhitenedChunk,
    WhitenedChunks,
    add_gram,
    from_panels,
)
from winnowgp.linalg import definite_cholesky, half_log_det


@dataclass(frozen=True, slots=True)
class TwoPass:
    """A bound in nats and its gradient."""

    value: Float[Tensor, ""]
    noise: Float[Tensor, ""]
    """With respect to the noise variance."""
    Y: Float[Tensor, "N P"]
    """With respect to the targets, for the parameters of a prior mean."""
    kernel: tuple[Tensor, ...]
    """With respect to the parameters of the kernel and the points, in the kernel's order."""


@dataclass(slots=True)
class _Sums:
    """What pass one accumulates."""

    C: Float[Tensor, "M M"]
    d: Float[Tensor, "M P"]
    trace: Float[Tensor, ""]
    """Σ t_i/σ², or Σ log(1 + t_i/σ²)."""
    trace_noise: Float[Tensor, ""]
    """Derivative of `trace` with respect to σ²."""
    weighted: Float[Tensor, "M M"]
    """V diag(1/σ²) Vᵀ, or V diag(1/(σ² + t)) Vᵀ."""


@dataclass(frozen=True, slots=True)
class _Back:
    """What pass two multiplies a chunk with."""

    L_inverse: Float[Tensor, "M M"]
    middle: Float[Tensor, "M M"]
    beta: Float[Tensor, "M P"]
    weighted: bool


@torch.no_grad()
def two_pass_bound(
    kernel: ChunkedKernel,
    *,
    Y: Float[Tensor, "N P"],
    noise: Float[Tensor, ""],
    weights: Float[Tensor, " N"] | None = None,
    tighter: bool = False,
    chunk: int = CHUNK,
    keep: int = KEEP,
) -> TwoPass:
    """The collapsed (or the tighter collapsed) bound and its gradient; O(N M²) time.

    Args:
        kernel: fresh, with a zero gradient.
        Y: targets less the prior mean.
        noise: σ².
        weights: how often each row counts; once if not given.
        tighter: the tighter collapsed bound.
        chunk: rows a pass holds at once.
        keep: numbers that may be kept between the passes.

    Raises:
        NotPositiveDefiniteError: K_uu or B cannot be factorised.
    """
    chunks = WhitenedChunks.for_gradients(kernel, Y.shape[0], chunk=chunk, keep=keep)
    sums = _accumulate(chunks, Y, noise, tighter, weights)
    (N, P), M, L_inverse = Y.shape, sums.C.shape[0], chunks.L_inverse
    count = N if weights is None else weights.sum()
    eye = torch.eye(M, dtype=Y.dtype, device=Y.device)
    LB = definite_cholesky(eye + sums.C / noise)
    B_inverse = torch.cholesky_inverse(LB)
    beta = torch.cholesky_solve(sums.d, LB) / noise
    square = (Y.square() if weights is None else weights[:, None] * Y.square()).sum()
    fit = (sums.d * beta).sum()
    value = -0.5 * (
        count * P * (log(2 * pi) + noise.log())
        + 2 * P * half_log_det(LB)
        + (square - fit) / noise
        + P * sums.trace
    )
    noise_gradient = 0.5 * (
        P * (M - B_inverse.diagonal().sum() - count) / noise
        + (square - fit) / noise**2
        - beta.square().sum() / noise
        - P * sums.trace_noise
    )
    # ∂F/∂K_uu = −½ L⁻ᵀ [P(C_w − I + B⁻¹) + ββᵀ] L⁻¹ with C_w the weighted Gram matrix
    inner = torch.addmm(P * (sums.weighted - eye + B_inverse), beta, beta.mT)
    Kuu_gradient = -0.5 * (L_inverse.mT @ (inner @ L_inverse))
    if M:
        Kuu_gradient.diagonal().add_(Kuu_gradient.diagonal().sum() * (JITTER / M))
    kernel.pull_uu(Kuu_gradient)
    # ∂F/∂K_uf = L⁻ᵀ [(P I − P B⁻¹ − ββᵀ) V + β Yᵀ] / σ²; the tighter bound weights P I row by row.
    middle = torch.addmm((0 if tighter else P) * eye - P * B_inverse, beta, beta.mT, alpha=-1)
    back = _Back(L_inverse, L_inverse.mT @ middle / noise, L_inverse.mT @ beta / noise, tighter)
    Y_gradient = torch.empty_like(Y)
    for part in chunks:
        y, w = Y[part.rows], None if weights is None else weights[part.rows]
        pull = (part.V.mT @ beta - y) / noise
        Y_gradient[part.rows] = pull if w is None else w[:, None] * pull
        _push_back(kernel, part, y, back=back, weight=P / (noise + part.t * tighter), counts=w)
    return TwoPass(value, noise_gradient, Y_gradient, kernel.gradient())


def _accumulate(
    chunks: WhitenedChunks,
    Y: Float[Tensor, "N P"],
    noise: Float[Tensor, ""],
    tighter: bool,
    weights: Float[Tensor, " N"] | None,
) -> _Sums:
    """Pass one."""
    M, zero = len(chunks.L), Y.new_zeros(())
    sums = _Sums(Y.new_zeros(M, M), Y.new_zeros(M, Y.shape[1]), zero, zero, Y.new_zeros(M, M))
    for part in chunks:
        w = 1.0 if weights is None else weights[part.rows]
        V = part.V if weights is None else part.V * w
        add_gram(sums.C, V, part.V)
        sums.d.addmm_(V, Y[part.rows])
        ratio = part.t / noise
        sums.trace = sums.trace + (w * (ratio.log1p() if tighter else ratio)).sum()
        if tighter:
            scale = (noise + part.t).reciprocal()
            sums.weighted.addmm_(V * scale, part.V.mT)
            sums.trace_noise = sums.trace_noise + (w * (scale - 1 / noise)).sum()
        else:
            sums.trace_noise = sums.trace_noise - (w * ratio).sum() / noise
    sums.C = from_panels(sums.C)
    if not tighter:
        sums.weighted = sums.C / noise
    return sums


def _push_back(
    kernel: ChunkedKernel,
    part: WhitenedChunk,
    y: Float[Tensor, "B P"],
    *,
    back: _Back,
    weight: Float[Tensor, ""] | Float[Tensor, " B"],
    counts: Float[Tensor, " B"] | None,
) -> None:
    """Pass two for one chunk; `weight` is P/σ², or P/(σ² + t_i)."""
    gradient = torch.addmm(back.beta @ y.mT, back.middle, part.V)
    if back.weighted:
        gradient.addmm_(back.L_inverse.mT, part.V * weight)
    if counts is not None:
        gradient.mul_(counts)
        weight = counts * weight
    kernel.pull_uf(part.rows, gradient, part.Kuf)
    kernel.pull_ff(part.rows, -0.5 * weight)


@torch.no_grad()
def evidence_gradient(
    kernel: ChunkedKernel,
    *,
    Y: Float[Tensor, "N P"],
    noise: Float[Tensor, ""],
    weights: Float[Tensor, " N"] | None = None,
) -> TwoPass:
    """The exact log evidence and its gradient, for a kernel whose points are the rows; O(N³).

        log p(Y) = −½ [NP log 2π + P log|A| + ⟨Y, α⟩],   A = K_ff + σ²I,  α = A⁻¹ Y
        ∂/∂A = ½ (ααᵀ − P A⁻¹),   ∂/∂Y = −α

    Several times quicker than differentiating a Cholesky factor by autograd. With weights the noise
    of row i is σ²/w_i, and `repetition` is added.

    Raises:
        NotPositiveDefiniteError: A cannot be factorised.
    """
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
        value = value + P * repetition(weights, noise)
        slope = 0.5 * (N - weights.sum()) / noise
        noise_gradient = (gradient.diagonal() / weights).sum() + P * slope
    kernel.pull_uu(gradient)
    return TwoPass(value, noise_gradient, -alpha, kernel.gradient())
