"""Predictions at uncertain inputs in closed form, for Gaussian noise and kernels with averages."""

from typing import final

import torch
from gpytorch.likelihoods import GaussianLikelihood
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds import pair_weights
from winnowgp.data import Entries
from winnowgp.linalg import solve_lower
from winnowgp.models.expected_kernel import expected_kernel
from winnowgp.models.latent_posterior import LatentPosterior
from winnowgp.models.observations import Prediction
from winnowgp.models.posterior import Posterior
from winnowgp.models.row_bound import ExpectedRowBound


@final
class ExpectedPosterior(LatentPosterior):
    """q(f) of a Gaussian latent-variable model, averaged over q(x) by psi statistics.

    With a_p = L⁻ᵀ m_p and A_p = a_p a_pᵀ + L⁻ᵀ (F_p F_pᵀ − I) L⁻¹, an input x ~ N(μ, diag s) has

        E f_p = ψ1ᵀ a_p,   E f_p² = ψ0 + ⟨Ψ2, A_p⟩.
    """

    second: Tensor

    def __init__(self, function: Posterior) -> None:
        super().__init__(function)
        F, L = function.q_factor, function.L
        eye = torch.eye(function.M, dtype=L.dtype, device=L.device)
        L_inverse = solve_lower(L, eye)
        a = function.weights.mT
        spread = L_inverse.mT @ (F @ F.mT - eye) @ L_inverse
        self.register_buffer("second", pair_weights(a[:, :, None] * a[:, None, :] + spread))

    @property
    def noise(self) -> Float[Tensor, " columns"]:
        """Noise variance of each column, or one for all."""
        assert isinstance(self.function.likelihood, GaussianLikelihood)
        return self.function.likelihood.noise

    def predict(
        self,
        mean: Float[Tensor, "N Q"],
        variance: Float[Tensor, "N Q"],
        *,
        observed: bool = False,
    ) -> Prediction:
        """Mean and variance of the functions at uncertain inputs; O(P M²) a row."""
        kernel, Z = expected_kernel(self.function.kernel, self.Q), self.function.Z
        first = kernel.psi1(mean, variance, Z=Z).mT @ self.function.weights
        pairs = kernel.psi2_rows(mean, variance, Z=Z) @ self.second.mT
        second = kernel.psi0(mean, variance)[:, None] + pairs
        spread = (second - first.square()).clamp_min(0)
        return Prediction(first, spread + self.noise if observed else spread)

    @torch.no_grad()
    def row_bound(self, table: Entries) -> ExpectedRowBound:
        """What each row of a table is worth as a function of its own q(x)."""
        noise = self.noise.expand(table.P)
        precision = table.observed / noise
        pattern, which = torch.unique(table.observed, dim=0, return_inverse=True)
        Y = table.filled()
        density = (2 * torch.pi * noise).log() * table.observed + Y.square() * precision
        return ExpectedRowBound(
            kernel=expected_kernel(self.function.kernel, self.Q),
            Z=self.function.Z,
            constant=-0.5 * density.sum(1),
            first=(Y * precision) @ self.function.weights.mT,
            second=(pattern / noise) @ self.second,
            pattern=which,
            precision=precision.sum(1),
        )
