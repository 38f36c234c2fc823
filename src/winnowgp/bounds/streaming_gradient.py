"""The gradient of the bound of a stream in closed form.

The bound of a batch and of a memory whose points are among the candidates is that of
`bounds.two_pass` with more sums. With K_uu = L Lᵀ, S the columns of I at the points of the memory,
C_m = (LᵀSA)(LᵀSA)ᵀ, d_m = LᵀSA y for the memory, C_b = V W Vᵀ, d_b = V W Y for the batch,
B = I + (C_m + C_b)/σ² and β = B⁻¹ (d_m + d_b)/σ²,

    F = −NP/2 log 2πσ² − P/2 log|B| − (s − ⟨d, β⟩ + P Σ w_i t_i)/(2σ²),
    s = Σ w‖Y‖² + ‖y‖² + residual,   d = d_m + d_b,   t_i = k_ii − ‖v_i‖².

The memory depends on K_uu through Lᵀ, and the batch through L⁻¹. F does not depend on the root L of
K_uu that is taken, so that dL = ½ dK L⁻ᵀ in both:

    ∂F/∂K_uu = ½ L⁻ᵀ sym[P(I − B⁻¹) − ββᵀ − P C_b/σ² − 2 (P C_m B⁻¹ + (C_m β − d_m) βᵀ)/σ²] L⁻¹
             = ½ L⁻ᵀ sym[ββᵀ − P(I − B⁻¹) − P C_b/σ² + 2 (P C_b B⁻¹ − (d_b − C_b β) βᵀ)/σ²] L⁻¹,

the latter because C_m = σ²(B − I) − C_b: products with the rows of a batch, which are fewer than
the candidates, instead of those with the memory. The other derivatives are those of `two_pass`.
"""

from math import log, pi

import torch
from jaxtyping import Int
from torch import Tensor

from winnowgp.bounds.row_blocks import JITTER, ChunkedKernel, RowBlocks
from winnowgp.bounds.streaming import Memory, observed_combinations
from winnowgp.bounds.two_pass import BoundGradient
from winnowgp.linalg import definite_cholesky, half_log_det, solve_lower
from winnowgp.typing import Scalar


@torch.no_grad()
def streaming_gradient(
    kernel: ChunkedKernel,
    blocks: RowBlocks,
    memory: Memory,
    *,
    match: Int[Tensor, " M"],
    noise: Scalar,
) -> BoundGradient:
    """Return the bound of batch and memory in nats, and its gradient; O(K³) and O(n K²).

    The prior mean is zero, all outputs share σ², and no noise is known.

    Args:
        kernel: kernel at fixed parameters.
        blocks: the batch.
        memory: what is remembered of earlier rows; one A for all outputs.
        match: the candidate that each point of the memory is.
        noise: σ².

    Raises:
        NotPositiveDefiniteError: K_uu or B cannot be factorised.
    """
    solve, Kuu = torch.linalg.solve_triangular, kernel.uu()
    K, P = len(Kuu), memory.P
    Kuu.diagonal().add_(JITTER * Kuu.diagonal().mean())
    L = definite_cholesky(Kuu)
    # Rows of LᵀS below those of the memory are zero, and so are those of C_m and d_m.
    m = int(match.max()) + 1 if len(match) else 0
    root, C_m = observed_combinations(L[match, :m].mT, memory.A[0])
    d_m = root @ memory.y
    C, d = torch.zeros_like(Kuu), Kuu.new_zeros(K, P)
    square, trace = memory.y.square().sum() + memory.residual, noise.new_zeros(())
    chunks = []
    for block in blocks:
        Kuf = kernel.uf(block)
        V = solve_lower(L, Kuf)
        w = torch.ones_like(block.X[:, 0]) if block.weights is None else block.weights
        VW = V * w
        C.addmm_(VW, V.mT)
        d.addmm_(VW, block.Y)
        square = square + (w[:, None] * block.Y.square()).sum()
        trace = trace + w @ (kernel.ff(block) - V.square().sum(0))
        chunks.append((block, Kuf, V, w))
    N = memory.N + blocks.observations
    C[:m, :m] += C_m
    d[:m] += d_m
    C.div_(noise).diagonal().add_(1.0)
    LB = definite_cholesky(C)
    inverse = torch.cholesky_inverse(LB)
    beta = inverse @ d / noise
    residual = square - (d * beta).sum()
    value = -0.5 * (
        N * P * (log(2 * pi) + noise.log())
        + 2 * P * half_log_det(LB)
        + (residual + P * trace) / noise
    )
    slope = 0.5 * (
        P * (K - inverse.diagonal().sum() - N) / noise
        + (residual + P * trace) / noise**2
        - beta.square().sum() / noise
    )
    # inner = ββᵀ − P(I − B⁻¹) − P C_b/σ² + 2 (P C_b B⁻¹ − (d_b − C_b β) βᵀ)/σ², by blocks of rows.
    explained = [inverse @ V for _, _, V, _ in chunks]
    inner = inverse.mul_(P)
    inner.diagonal().sub_(P)
    inner.addmm_(beta, beta.mT)
    for (block, Kuf, V, w), BV in zip(chunks, explained, strict=True):
        VW = V * (w / noise)
        inner.addmm_(VW, (2 * BV - V).mT, alpha=P)
        error = block.Y - V.mT @ beta
        inner.addmm_(VW @ error, beta.mT, alpha=-2)
        # (P(I − B⁻¹) V + β (Y − Vᵀβ)ᵀ) W/σ²
        cotangent = (P * (V - BV)).addmm_(beta, error.mT).mul_(w / noise)
        kernel.pull_uf(block, solve(L.mT, cotangent, upper=True), Kuf)
        kernel.pull_ff(block, -0.5 * P / noise * w)
    gradient = solve(L.mT, (inner + inner.mT).mul_(0.25), upper=True)
    gradient = solve(L, gradient, upper=False, left=False)
    gradient.diagonal().add_(gradient.diagonal().sum() * (JITTER / max(K, 1)))
    return BoundGradient(value, slope, (), kernel.gradient(kernel.pulled(), gradient))
