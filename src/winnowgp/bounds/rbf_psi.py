"""Psi statistics of the scaled RBF kernel with one lengthscale a dimension.

    Ψ1_mi  = v Π_q (1 + s/ℓ²)^−½ exp(−½ (μ − z)²/(s + ℓ²))
    Ψ2_imm' = v² Π_q (1 + 2s/ℓ²)^−½ exp(−(z − z')²/4ℓ² − (μ − z̄)²/(2s + ℓ²)),   z̄ = (z + z')/2

Both exponents are inner products of a row's features with a point's or a pair's, so Ψ2 is two thin
products around one exponential of N · T numbers, and its gradient two more.
"""

from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds.psi import ExpectedKernel, from_pairs, pairs

# Numbers of one chunk (small enough for a cache), and that may be kept for the gradient: 256 MiB.
CHUNK = 2**17
KEEP = 2**25


@final
@dataclass(frozen=True, slots=True)
class RBFPsi(ExpectedKernel):
    """k(x, z) = v exp(−½ Σ_q (x_q − z_q)²/ℓ_q²)."""

    variance: Float[Tensor, ""]
    lengthscales: Float[Tensor, " Q"]

    def uu(self, Z: Float[Tensor, "M Q"]) -> Float[Tensor, "M M"]:
        scaled = Z / self.lengthscales
        square = scaled.square().sum(1)
        distance = square[:, None] + square - 2 * scaled @ scaled.mT
        return self.variance * torch.exp(-0.5 * distance.clamp_min(0))

    def psi0(self, mean: Float[Tensor, "N Q"], variance: Float[Tensor, "N Q"]) -> Tensor:
        return self.variance.expand(len(mean))

    def psi1(
        self, mean: Float[Tensor, "N Q"], variance: Float[Tensor, "N Q"], *, Z: Tensor
    ) -> Float[Tensor, "M N"]:
        square = self.lengthscales.square()
        b = 1 / (variance + square)
        volume = self.variance.log() - 0.5 * (variance / square).log1p().sum(1)
        constant = volume - 0.5 * (b * mean.square()).sum(1)
        rows = torch.cat([constant[:, None], b * mean, -0.5 * b], 1)
        points = torch.cat([torch.ones_like(Z[:, :1]), Z, Z.square()], 1)
        return torch.exp(points @ rows.mT)

    def psi2_rows(
        self, mean: Float[Tensor, "N Q"], variance: Float[Tensor, "N Q"], *, Z: Tensor
    ) -> Float[Tensor, "N T"]:
        return torch.exp(self._rows(mean, variance) @ self._pairs(Z))

    def psi2(
        self,
        mean: Float[Tensor, "N Q"],
        variance: Float[Tensor, "N Q"],
        *,
        Z: Float[Tensor, "M Q"],
        weights: Float[Tensor, "G N"],
    ) -> Float[Tensor, "G M M"]:
        summed = WeightedExponentials.apply(self._rows(mean, variance), self._pairs(Z), weights)
        return from_pairs(summed, len(Z))

    def _rows(self, mean: Tensor, variance: Tensor) -> Float[Tensor, "N F"]:
        square = self.lengthscales.square()
        b = 1 / (2 * variance + square)
        volume = 2 * self.variance.log() - 0.5 * (2 * variance / square).log1p().sum(1)
        constant = volume - (b * mean.square()).sum(1)
        one = torch.ones_like(constant)
        return torch.cat([constant[:, None], one[:, None], 2 * b * mean, -b], 1)

    def _pairs(self, Z: Tensor) -> Float[Tensor, "F T"]:
        first, second = pairs(len(Z), Z.device)
        middle = 0.5 * (Z[first] + Z[second])
        apart = ((Z[first] - Z[second]) / self.lengthscales).square().sum(1)
        one = torch.ones_like(apart)
        return torch.cat([one[:, None], -0.25 * apart[:, None], middle, middle.square()], 1).mT


@final
class WeightedExponentials(torch.autograd.Function):
    """W exp(A B) for thin A `[N F]` and B `[F T]`, never holding more than it must.

    With E = exp(A B) and cotangent G, the gradient is ((Wᵀ G) ∘ E) Bᵀ and Aᵀ ((Wᵀ G) ∘ E). W is
    a constant. O(N T (F + G)); autograd alone would write and read N T numbers five times.
    """

    @staticmethod
    def forward(
        ctx: Any,
        A: Float[Tensor, "N F"],
        B: Float[Tensor, "F T"],
        W: Float[Tensor, "G N"],
    ) -> Float[Tensor, "G T"]:
        keeps = A.shape[0] * B.shape[1] <= KEEP and any(ctx.needs_input_grad)
        kept, parts = [], [W.new_zeros(len(W), 0)]
        for columns in B.split(max(1, CHUNK // max(len(A), 1)), dim=1):
            E = torch.mm(A, columns).exp_()
            parts.append(W @ E)
            if keeps:
                kept.append(E)
        ctx.save_for_backward(A, B, W)
        ctx.kept = kept
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, *output: Tensor) -> tuple[Tensor, Tensor, None]:
        A, B, W = ctx.saved_tensors
        size = max(1, CHUNK // max(len(A), 1))
        d_A, d_B = torch.zeros_like(A), [B.new_zeros(len(B), 0)]
        slices = zip(B.split(size, dim=1), output[0].split(size, dim=1), strict=True)
        for index, (columns, cotangent) in enumerate(slices):
            E = ctx.kept[index] if ctx.kept else torch.mm(A, columns).exp_()
            pulled = torch.mm(W.mT, cotangent).mul_(E)
            d_A.addmm_(pulled, columns.mT)
            d_B.append(A.mT @ pulled)
        return d_A, torch.cat(d_B, 1), None
