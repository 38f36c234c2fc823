"""Latent functions, targets and likelihoods for tests of observation models."""

from collections.abc import Callable

import torch
from gpytorch.likelihoods import (
    Likelihood,
    SoftmaxLikelihood,
)
from torch import Tensor
from torch.distributions import Normal

from winnowgp.models.likelihoods import copy_likelihood

MEAN = torch.tensor([[-1.1, 0.2], [0.6, 1.4], [0.0, -0.4]], dtype=torch.float64)
VARIANCE = torch.tensor([[0.3, 0.05], [0.6, 0.2], [0.1, 0.4]], dtype=torch.float64)
REAL = torch.tensor([[-1.5, 0.9], [3.0, 1.1], [-2.0, 0.4]], dtype=torch.float64)


def built(likelihood: Likelihood, **parameters: float) -> Likelihood:
    """Return the copy that a model would own, in double precision."""
    ours = copy_likelihood(likelihood).double()
    for name, value in parameters.items():
        setattr(ours, name, value)
    return ours.requires_grad_(False)


def on_a_grid(integrand: Callable[[Tensor], Tensor]) -> Tensor:
    """Return E of a function of f under N(MEAN, VARIANCE), by 20,001 trapezia."""
    z = torch.linspace(-10, 10, 20_001, dtype=torch.float64)[:, None, None]
    density = Normal(0.0, 1.0).log_prob(z).exp()
    return torch.trapezoid(density * integrand(MEAN + VARIANCE.sqrt() * z), z, dim=0)


def softmax(mixing: bool) -> SoftmaxLikelihood:
    if not mixing:
        return SoftmaxLikelihood(num_classes=3, mixing_weights=False).double()
    likelihood = SoftmaxLikelihood(num_features=3, num_classes=4).double()
    g = torch.Generator().manual_seed(0)
    weights = torch.randn(4, 3, generator=g, dtype=torch.float64)
    likelihood.mixing_weights = torch.nn.Parameter(weights, requires_grad=False)
    return likelihood


def latents(N: int) -> tuple[Tensor, Tensor, Tensor]:
    """Means and variances of three latents, and a class for each row."""
    g = torch.Generator().manual_seed(N)
    mean = torch.randn(N, 3, generator=g, dtype=torch.float64)
    variance = 0.1 + 0.7 * torch.rand(N, 3, generator=g, dtype=torch.float64)
    return mean, variance, torch.arange(N, dtype=torch.float64)[:, None] % 3
