"""Psi statistics of the linear kernel: the second moments of the inputs, seen from the points."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds.psi import ExpectedKernel, pairs


@final
@dataclass(frozen=True, slots=True)
class LinearPsi(ExpectedKernel):
    """k(x, z) = Σ_q v_q x_q z_q.

    E[x xᵀ] = μ μᵀ + diag s, so Ψ2 = Z̃ (Σ_i w_i E[x_i x_iᵀ]) Z̃ᵀ with Z̃ = Z diag v. Prior and
    posterior have rank Q: more than Q points add nothing.
    """

    variances: Float[Tensor, " Q"]

    def uu(self, Z: Float[Tensor, "M Q"]) -> Float[Tensor, "M M"]:
        return (Z * self.variances) @ Z.mT

    def psi0(self, mean: Float[Tensor, "N Q"], variance: Float[Tensor, "N Q"]) -> Tensor:
        return (mean.square() + variance) @ self.variances

    def psi1(
        self, mean: Float[Tensor, "N Q"], variance: Float[Tensor, "N Q"], *, Z: Tensor
    ) -> Float[Tensor, "M N"]:
        return (Z * self.variances) @ mean.mT

    def psi2_rows(
        self, mean: Float[Tensor, "N Q"], variance: Float[Tensor, "N Q"], *, Z: Tensor
    ) -> Float[Tensor, "N T"]:
        scaled = Z * self.variances
        first, second = pairs(len(Z), Z.device)
        known = mean @ scaled.mT
        return known[:, first] * known[:, second] + variance @ (scaled[first] * scaled[second]).mT

    def psi2(
        self,
        mean: Float[Tensor, "N Q"],
        variance: Float[Tensor, "N Q"],
        *,
        Z: Float[Tensor, "M Q"],
        weights: Float[Tensor, "G N"],
    ) -> Float[Tensor, "G M M"]:
        scaled = Z * self.variances
        weighted = weights[:, :, None] * mean
        moments = weighted.mT @ mean + torch.diag_embed(weights @ variance)
        return scaled @ moments @ scaled.mT
