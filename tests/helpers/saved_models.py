"""One model or posterior of each kind that can be saved."""

from collections.abc import Callable
from typing import Any

import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import PoissonLikelihood

from helpers.deep_problems import deep
from winnowgp import Dataset, LatentVariableGP, MaskedMatrix, SparseGP, VariationalGP
from winnowgp.models import SampledLatentGP
from winnowgp.models.gplvm import Latents

X = torch.linspace(0, 6, 40, dtype=torch.float64)[:, None]
DATA = Dataset.of(X, torch.stack([torch.sin(X[:, 0]), torch.cos(X[:, 0])], 1))


def sparse(M: int, dtype: torch.dtype = torch.float64) -> SparseGP:
    kernel = ScaleKernel(RBFKernel()) + MaternKernel(nu=2.5)
    return SparseGP(kernel, X[:: max(40 // max(M, 1), 1)][:M].to(dtype), noise=0.1)


def closed() -> tuple[LatentVariableGP, MaskedMatrix]:
    """Return a GP-LVM with one noise variance per column, and a table with a missing entry."""
    Y = DATA.Y.clone()
    Y[3, 1] = torch.nan
    noise = torch.tensor([0.1, 0.3], dtype=torch.float64)
    latents = Latents(X - 3, variance=0.1 + 0.01 * X)
    kernel = ScaleKernel(RBFKernel())
    model = LatentVariableGP(kernel, latents, candidates=X[::6] - 3, noise=noise)
    return model, MaskedMatrix.of(Y)


def sampled() -> tuple[SampledLatentGP, MaskedMatrix]:
    """Return a GP-LVM with a Poisson likelihood, and a table of counts."""
    kernel, likelihood = ScaleKernel(MaternKernel(nu=1.5)), PoissonLikelihood()
    function = VariationalGP(kernel, X[::6] - 3, likelihood=likelihood, targets=2)
    function.q_mean.data.copy_(torch.sin(X[::6]).expand(-1, 2))
    latents = Latents(X - 3, variance=0.1 + 0.01 * X)
    return SampledLatentGP(function, latents), MaskedMatrix.of((DATA.Y.exp()).round())


SAVED: dict[str, Callable[[], Any]] = {
    "Posterior": lambda: sparse(5).posterior(DATA),
    "VariationalGP": lambda: sampled()[0].function,
    "DeepGP": lambda: deep("softmax"),
    "DeepPosterior": lambda: deep("gaussian").posterior(samples=10),
    "LatentVariableGP": lambda: closed()[0],
    "ExpectedPosterior": lambda: closed()[0].posterior(closed()[1]),
    "SampledLatentGP": lambda: sampled()[0],
    "SampledPosterior": lambda: sampled()[0].posterior(sampled()[1]),
}
