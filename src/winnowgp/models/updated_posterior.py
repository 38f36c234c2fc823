"""A posterior that has seen more rows."""

import torch
from gpytorch.likelihoods import GaussianLikelihood
from jaxtyping import Float
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.linalg import definite_cholesky, solve_lower
from winnowgp.models.kernel_blocks import covariance, prior_mean
from winnowgp.models.posterior import Posterior


@torch.no_grad()
def updated_posterior(posterior: Posterior, data: Dataset) -> Posterior:
    """q(f) after N more rows with Gaussian noise, through the same M points.

    With V = L⁻¹ K_uf and q(v) = N(m, F Fᵀ), precisions and their products with means add up:

        (F Fᵀ)'⁻¹ = (F Fᵀ)⁻¹ + V Vᵀ/σ²,   m' = m + (F Fᵀ)' V (y − Vᵀm)/σ²,

    computed as F' = F R⁻ᵀ with R Rᵀ = I + FᵀV VᵀF/σ². For the best q(u) of a `SparseGP` the result
    is that of all rows together at the same parameters. O(P M² (M + N)); the rows are forgotten.
    """
    noise = _noise(posterior)  # [P] or [1]
    if data.P != posterior.P:
        raise InputError(f"`data` must have {posterior.P} target columns; got {data.P}.")
    V = solve_lower(posterior.L, covariance(posterior.kernel, posterior.Z, data.X))
    F = posterior.q_factor
    A = F.mT @ V / noise.sqrt()[:, None, None]
    eye = torch.eye(posterior.M, dtype=V.dtype, device=V.device)
    R = definite_cholesky(eye + A @ A.mT)
    new_factor = solve_lower(R, F.mT).mT
    missed = data.Y - prior_mean(posterior.mean, data.X) - V.mT @ posterior.q_mean
    # One column an output: [P M 1] = [#P M M] @ [P M 1].
    pull = (V @ missed / noise).mT[..., None]
    step = new_factor @ (new_factor.mT @ pull)
    return Posterior(
        posterior.kernel,
        posterior.Z,
        mean=posterior.mean,
        likelihood=posterior.likelihood,
        q_mean=posterior.q_mean + step[..., 0].mT,
        q_factor=new_factor,
        L=posterior.L,
    )


def _noise(posterior: Posterior) -> Float[Tensor, " #P"]:
    if not isinstance(posterior.likelihood, GaussianLikelihood):
        raise InputError(
            "only a posterior with Gaussian noise takes more rows in closed form; this one has a "
            f"{type(posterior.likelihood).__name__}. Fit again instead."
        )
    return posterior.likelihood.noise.reshape(-1)
