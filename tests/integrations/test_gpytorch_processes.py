"""Multitask GPyTorch models with inducing points of each process."""

from typing import Any

import pytest
import torch
from gpytorch import kernels, means
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import BernoulliLikelihood, MultitaskGaussianLikelihood
from gpytorch.models import ApproximateGP
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    IndependentMultitaskVariationalStrategy,
    LMCVariationalStrategy,
    VariationalStrategy,
)
from torch import Tensor
from torch.distributions import MultivariateNormal as Normal

from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.integrations.gpytorch import winnow_processes
from winnowgp.integrations.gpytorch.processes import _converted

X = torch.linspace(-3, 3, 40, dtype=torch.float64)[:, None]
WAVES = torch.cat([torch.sin(X), torch.sin(6 * X)], 1)


class Multitask(ApproximateGP):
    """Two processes of lengthscales 1.5 and 0.25, 25 inducing points each, and three tasks."""

    mean_module: Any
    covar_module: Any

    def __init__(self, lmc: bool) -> None:
        shape = torch.Size([2])
        Z = torch.linspace(-3, 3, 25, dtype=torch.float64)[:, None].repeat(2, 1, 1)
        q = CholeskyVariationalDistribution(25, batch_shape=shape)
        base = VariationalStrategy(self, Z, q)
        strategy: Any = (
            LMCVariationalStrategy(base, num_tasks=3, num_latents=2, latent_dim=-1)
            if lmc
            else IndependentMultitaskVariationalStrategy(base, num_tasks=2)
        )
        super().__init__(strategy)
        self.mean_module = means.ConstantMean(batch_shape=shape)
        self.covar_module = kernels.ScaleKernel(
            kernels.RBFKernel(batch_shape=shape), batch_shape=shape
        )
        self.double()
        lengthscale = torch.tensor([1.5, 0.25], dtype=torch.float64).reshape(2, 1, 1)
        self.covar_module.base_kernel.lengthscale = lengthscale
        self.covar_module.outputscale = torch.tensor([1.0, 0.8], dtype=torch.float64)
        with torch.no_grad():
            self.mean_module.constant.copy_(torch.tensor([0.5, -0.2]))
            if lmc:
                mixing = torch.tensor([[1.0, 0.5, 0.0], [0.2, -1.0, 0.7]])
                strategy.lmc_coefficients.copy_(mixing)

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def likelihood(tasks: int) -> Any:
    several: Any = MultitaskGaussianLikelihood(tasks).double()
    several.task_noises = torch.linspace(0.002, 0.004, tasks, dtype=torch.float64)
    several.noise = torch.tensor(0.001)
    return several


def targets(model: Multitask, tasks: int) -> Tensor:
    strategy: Any = model.variational_strategy
    W = strategy.lmc_coefficients.detach() if tasks == 3 else torch.eye(2).double()
    return (WAVES + model.mean_module.constant.detach()) @ W


@pytest.mark.parametrize("lmc", [True, False])
def test_conversion_has_the_prior_and_noise_of_the_model(lmc: bool) -> None:
    model, tasks = Multitask(lmc), 3 if lmc else 2
    several, Y = likelihood(tasks), targets(Multitask(lmc), tasks)
    gp, offset = _converted(model, several)
    strategy: Any = model.variational_strategy
    W = strategy.lmc_coefficients.detach().mT if lmc else torch.eye(2).double()
    K = model.covar_module(X).to_dense().detach()
    prior = torch.einsum("qij,pq,sq->ipjs", K, W, W).reshape(40 * tasks, -1)
    noise = (several.task_noises + several.noise).detach().repeat(40)
    torch.testing.assert_close(offset, W @ torch.tensor([0.5, -0.2]).double())
    expected = Normal(offset.repeat(40), prior + noise.diag()).log_prob(Y.flatten())
    torch.testing.assert_close(gp.dense_bound(Dataset.of(X, Y - offset))(), expected)


@pytest.mark.parametrize("lmc", [True, False])
def test_smooth_process_keeps_fewer_inducing_points(lmc: bool) -> None:
    model, tasks = Multitask(lmc), 3 if lmc else 2
    Y = targets(model, tasks)
    result = winnow_processes(model, likelihood(tasks), (X, Y), tolerance=0.02)
    assert 2 <= result.sizes[0] < result.sizes[1] - 5 <= 20
    assert 0 <= result.full_elbo - result.elbo <= 0.02 * Y.numel() + 1e-6
    assert (result.predict(X).mean - Y).abs().max() < 0.15
    missing = Y.clone()
    missing[::7, 0] = torch.nan
    assert sum(winnow_processes(model, likelihood(tasks), (X, missing)).sizes) > 5


def test_targets_of_other_shapes_are_refused() -> None:
    model = Multitask(lmc=False)
    Y = targets(model, 2)
    for wrong in (Y[:, :1], Y[:, 0], torch.cat([Y, Y], 1)):
        with pytest.raises(InputError, match=r"targets \[N 2\], a column for each task"):
            winnow_processes(model, likelihood(2), (X, wrong))


def test_other_models_are_refused() -> None:
    model = Multitask(True)
    with pytest.raises(InputError, match="`likelihood` must be Gaussian"):
        winnow_processes(model, BernoulliLikelihood(), (X, WAVES))
    with pytest.raises(InputError, match="must have the 3 tasks of `model`; got 2"):
        winnow_processes(model, likelihood(2), (X, WAVES[:, [0, 1, 0]]))
    model.mean_module = means.LinearMean(1)
    with pytest.raises(InputError, match="ZeroMean or ConstantMean"):
        winnow_processes(model, likelihood(3), (X, WAVES))
    strategy: Any = model.variational_strategy
    model.variational_strategy = strategy.base_variational_strategy
    with pytest.raises(InputError, match="Use `winnow` for models of one process"):
        winnow_processes(model, likelihood(3), (X, WAVES))
