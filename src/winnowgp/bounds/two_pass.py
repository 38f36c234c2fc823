"""The collapsed bound and its exact gradient in two passes over chunks of rows.

With K_uu = L Lᵀ, V = L⁻¹ K_uf, C = V Vᵀ, d = V Y, B = I + C/σ², β = B⁻¹ d/σ² and
t_i = k_ii − ‖v_i‖² the collapsed bound is

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
from dataclasses import dataclass
from math import log, pi

import torch
from jaxtyping import Float
from torch import Tensor

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
    """A prior mean at fixed parameters, with the pull-back of gradients onto these parameters."""

    @abstractmethod
    def centred(self, block: RowBlock) -> Float[Tensor, "B P"]:
        """Return the targets of a block minus their prior mean."""

    @abstractmethod
    def pull(self, block: RowBlock, cotangent: Float[Tensor, "B P"]) -> None:
        """Add the pull-back of ∂F/∂mean of a block to the gradient of the parameters."""

    @abstractmethod
    def pulled(self) -> Sums:
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
    kernel: ChunkedKernel,
    blocks: RowBlocks,
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
    chunks = WhitenedChunks.for_gradients(kernel, blocks, keep=keep, dtype=dtype)
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
        Kuu_gradient.diagonal().add_(Kuu_gradient.diagonal().sum() * (JITTER / M))
    # ∂F/∂K_uf = L⁻ᵀ [(P I − P B⁻¹ − ββᵀ) V + β Yᵀ] / σ²
    middle = torch.addmm(P * eye - P * B_inverse, beta, beta.mT, alpha=-1)
    middle = (L_inverse.mT @ middle / noise).to(chunks.dtype)
    left = (L_inverse.mT @ beta / noise).to(chunks.dtype)
    beta = beta.to(chunks.dtype)

    def pull_back(shard: Iterable[WhitenedChunk]) -> Sums:
        for chunk in shard:
            V, Y, weights = chunk.V, mean.centred(chunk.block), chunk.block.weights
            Y_gradient = (Y - V.mT @ beta) / noise
            kff_gradient = (P / noise).expand(len(Y))
            Kuf_gradient = (left @ Y.mT.to(V.dtype)).addmm_(middle, V)
            if weights is not None:
                Kuf_gradient.mul_(weights.to(V.dtype))
                Y_gradient = weights[:, None] * Y_gradient
                kff_gradient = weights * kff_gradient
            mean.pull(chunk.block, Y_gradient)
            kernel.pull_uf(chunk.block, Kuf_gradient, chunk.Kuf)
            kernel.pull_ff(chunk.block, -0.5 * kff_gradient)
        return (*kernel.pulled(), *mean.pulled())

    pulled = chunks.summed(pull_back)
    split = len(pulled) - len(mean.pulled())
    gradient = kernel.gradient(pulled[:split], Kuu_gradient)
    return BoundGradient(value, noise_gradient, pulled[split:], gradient)


def _accumulate(chunks: WhitenedChunks, mean: ChunkedMean, noise: Float[Tensor, ""]) -> Sums:
    """Return C, d, ‖Y‖² and Σ t_i/σ² of all rows: pass one."""
    M, P = len(chunks.L), chunks.blocks.P

    def sums(shard: Iterable[WhitenedChunk]) -> Sums:
        C, d = noise.new_zeros(M, M), noise.new_zeros(M, P)
        square = trace = noise.new_zeros(())
        for chunk in shard:
            Y, w, t = mean.centred(chunk.block), chunk.block.weights, chunk.t.to(noise.dtype)
            V = chunk.V if w is None else chunk.V * w.to(chunk.V.dtype)
            add_gram(C, V, chunk.V)
            add_product(d, V, Y.to(V.dtype))
            square = square + (Y.square() if w is None else w[:, None] * Y.square()).sum()
            trace = trace + (t if w is None else w * t).sum() / noise
        return C, d, square, trace

    C, d, square, trace = chunks.summed(sums)
    return from_panels(C), d, square, trace
