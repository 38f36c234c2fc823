"""Where mean, noise and variance of a latent function may start, for any likelihood."""

from dataclasses import dataclass

import torch
from gpytorch import Module
from gpytorch.likelihoods import (
    GaussianLikelihood,
    LaplaceLikelihood,
    Likelihood,
    NegativeBinomialLikelihood,
    PoissonLikelihood,
    StudentTLikelihood,
)
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.models import expected_log_prob, latent_functions

_ROWS = 1000


@dataclass(frozen=True, slots=True)
class NoiseParameter:
    """The noise variance that a likelihood learns, and the module that keeps it."""

    holder: Module
    value: Tensor
    """σ², detached."""


def noise_of(likelihood: Likelihood) -> NoiseParameter | None:
    """The likelihood's noise variance, if it has one that is to be learnt."""
    if not isinstance(likelihood, GaussianLikelihood | StudentTLikelihood | LaplaceLikelihood):
        return None
    holder = likelihood.noise_covar if isinstance(likelihood, GaussianLikelihood) else likelihood
    learnt = likelihood.raw_noise.requires_grad
    return NoiseParameter(holder, likelihood.noise.detach()) if learnt else None


@torch.no_grad()
def best_level(likelihood: Likelihood, data: Dataset) -> Tensor:
    """The constant latent function under which the targets are most probable, on a grid."""
    rows = data.part(slice(_ROWS))
    Y = rows.Y
    steps = torch.linspace(0, 1, 41, dtype=Y.dtype, device=Y.device)
    levels = torch.cat([8 * steps - 4, Y.quantile(steps), Y.mean()[None]])
    F = latent_functions(likelihood, data.P)
    flat = torch.zeros(len(Y), F, dtype=Y.dtype, device=Y.device)
    nats = [
        rows.weighted(expected_log_prob(likelihood, Y, flat + level, flat)).sum()
        for level in levels
    ]
    return levels[int(torch.stack(nats).nan_to_num(-torch.inf).argmax())]


def kernel_variances(likelihood: Likelihood, data: Dataset) -> tuple[float, ...]:
    """Prior variances of the latent function worth a start, where there is no noise to vary."""
    if isinstance(likelihood, PoissonLikelihood | NegativeBinomialLikelihood):
        # Beyond small counts GPyTorch's rate is the latent function itself.
        return (1.0, max(10.0, data.Y.var(correction=0).item()))
    return (1.0, 10.0)
