"""The collapsed bound of rows that fit in one block, and its gradient, with few operations.

They are those of `two_pass`, in the case of most small tables: all rows in one block, targets
without known noise of which none is missing, one noise variance and rows of weight one. For few
rows and inducing points the number of operations decides, not their size.
"""

from dataclasses import dataclass
from math import log, pi
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds import panels
from winnowgp.bounds.row_blocks import JITTER, ChunkedKernel, RowBlock, RowBlocks
from winnowgp.linalg import definite_cholesky, half_log_det
from winnowgp.typing import TargetNoise

# Elements of K_uf up to which a product of all rows is quicker than one in panels.
_SMALL = 40_000


def one_block(blocks: RowBlocks, noise: TargetNoise) -> RowBlock | None:
    """Return the block of all rows if `OneBlockBound` has their bound, else None."""
    block, (group, *others) = blocks.only, blocks.groups
    if block is None or block.weights is not None or noise.dim() or noise.is_cuda:
        return None
    return block if group.plain and not others else None


@final
@dataclass(frozen=True, slots=True)
class OneBlockBound:
    """The collapsed bound of the rows of a block, and what its gradient needs.

    The symbols and formulas are those of `two_pass`.
    """

    kernel: ChunkedKernel
    block: RowBlock
    Y: Float[Tensor, "N P"]
    """Targets minus the prior mean."""
    noise: float
    value: float
    """The bound in nats."""
    misfit: float
    """‖Y‖² − ⟨d, β⟩ + P Σ t_i."""
    L_inverse: Float[Tensor, "M M"]
    Kuf: Float[Tensor, "M N"]
    V: Float[Tensor, "M N"]
    C: Float[Tensor, "M M"]
    """V Vᵀ/σ²."""
    LB: Float[Tensor, "M M"]
    beta: Float[Tensor, "M P"]

    @classmethod
    def of(
        cls, kernel: ChunkedKernel, block: RowBlock, Y: Float[Tensor, "N P"], *, noise: float
    ) -> "OneBlockBound":
        """Return the bound at fixed parameters; O(N M² + M³).

        Args:
            kernel: kernel at fixed parameters, whose sums are zero.
            block: all rows.
            Y: targets minus the prior mean.
            noise: σ².

        Raises:
            NotPositiveDefiniteError: K_uu or B cannot be factorised.
        """
        (N, P), Kuu = Y.shape, kernel.uu()
        if len(Kuu):
            Kuu.diagonal().add_(JITTER * Kuu.diagonal().mean())
        L_inverse, Kuf = panels.inverted(definite_cholesky(Kuu)), kernel.uf(block)
        is_small = Kuf.numel() <= _SMALL
        V = L_inverse @ Kuf if is_small else panels.lower_product(L_inverse, Kuf)
        C = V @ V.mT if is_small else _gram(V)
        d = V @ Y
        # Non-negative up to rounding.
        trace = max((kernel.ff(block).sum() - C.diagonal().sum()).item(), 0.0)
        C.div_(noise)
        B = C.clone()
        B.diagonal().add_(1.0)
        LB = definite_cholesky(B)
        beta = torch.cholesky_solve(d, LB).div_(noise)
        misfit = (Y.square().sum() - (d * beta).sum()).item() + P * trace
        log_det = N * log(2 * pi * noise) + 2 * half_log_det(LB).item()
        value = -0.5 * (P * log_det + misfit / noise)
        return cls(kernel, block, Y, noise, value, misfit, L_inverse, Kuf, V, C, LB, beta)

    def gradient(self) -> tuple[float, Float[Tensor, "N P"], tuple[Tensor, ...]]:
        """Return ∂F/∂σ², ∂F/∂mean, and the gradient in the kernel; once, as it overwrites."""
        (N, P), M, noise, beta = self.Y.shape, len(self.C), self.noise, self.beta
        B_inverse = panels.inverse_of_factor(self.LB)
        shrunk = M - B_inverse.diagonal().sum().item() - N
        slope = 0.5 * (P * shrunk + self.misfit / noise - beta.square().sum().item()) / noise
        # ∂F/∂K_uf = L⁻ᵀ [(P I − P B⁻¹ − ββᵀ) V + β Yᵀ] / σ²
        outer = beta @ beta.mT
        middle = torch.add(outer, B_inverse, alpha=P).neg_()
        middle.diagonal().add_(P)
        middle = panels.upper_product(self.L_inverse, middle).div_(noise)
        left = (self.L_inverse.mT @ beta).div_(noise)
        # ∂F/∂K_uu = −½ L⁻ᵀ [P(C/σ² − I + B⁻¹) + ββᵀ] L⁻¹
        inner = outer.add_(self.C.add_(B_inverse), alpha=P)
        inner.diagonal().sub_(P)
        half = panels.upper_product(self.L_inverse, inner)
        Kuu_gradient = panels.upper_product(self.L_inverse, half.mT).mul_(-0.5)
        if M:
            Kuu_gradient.diagonal().add_(Kuu_gradient.diagonal().sum() * (JITTER / M))
        Kuf_gradient = (left @ self.Y.mT).addmm_(middle, self.V)
        kernel, block = self.kernel, self.block
        kernel.pull_uf(block, Kuf_gradient, self.Kuf)
        kernel.pull_ff(block, self.Y.new_full((1,), -0.5 * P / noise))
        mean_gradient = torch.addmm(self.Y, self.V.mT, beta, alpha=-1).div_(noise)
        return slope, mean_gradient, kernel.gradient(kernel.pulled(), Kuu_gradient)


def _gram(V: Float[Tensor, "M N"]) -> Float[Tensor, "M M"]:
    total = V.new_zeros(len(V), len(V))
    panels.add_gram(total, V, V)
    return panels.from_panels(total)
