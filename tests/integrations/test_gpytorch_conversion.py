"""Fitted models predict the same after conversion to GPyTorch, and multitask models from it."""

import sys
from typing import Any

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch import kernels, means
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, MultitaskGaussianLikelihood
from gpytorch.means import ConstantMean
from gpytorch.models import ApproximateGP
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    IndependentMultitaskVariationalStrategy,
    LMCVariationalStrategy,
    VariationalStrategy,
)
from torch import Tensor
from torch.distributions import MultivariateNormal as Normal

from helpers.gpytorch_models import curve, elbo, points, tasks, three_classes
from winnowgp import SparseGPClassifier, SparseGPRegressor, fit
from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.integrations.gpytorch import to_gpytorch, winnow, winnow_processes
from winnowgp.integrations.gpytorch.conversion import _converted_prior
from winnowgp.models import SparseGP, VariationalGP
from winnowgp.point_processes import SquaredCardinality
from winnowgp.training import PaperSchedule

# Short fits: only agreement of predictions is tested.
QUICK: Any = {
    "schedule": "paper",
    "alpha": 0.02,
    "epochs": (5, 2, 5),
    "n_candidates": 12,
    "random_state": 0,
}
rows = torch.linspace(-1, 7, 33, dtype=torch.float64)[:, None]


def predicted(model: Any, x: Any) -> Any:
    with torch.no_grad():
        return model(x)


@pytest.mark.parametrize("several", [False, True])
def test_to_gpytorch_posterior_has_same_moments(several: bool) -> None:
    x, Y = tasks(50)
    data = Dataset.of(x, Y if several else Y[:, 0])
    gp = SparseGP(ScaleKernel(MaternKernel()), x[:12], noise=0.02, mean=ConstantMean())
    posterior = gp.posterior(data)
    model, likelihood = to_gpytorch(posterior)
    assert not model.training
    f = predicted(model, rows)
    ours, covariance = posterior.predict(rows), posterior.covariance(rows)
    mean = f.mean if several else f.mean[:, None]
    torch.testing.assert_close(mean, ours.mean, rtol=0, atol=1e-6)
    if not several:
        torch.testing.assert_close(f.covariance_matrix, covariance[0], rtol=0, atol=1e-6)
    variance = f.variance if several else f.variance[:, None]
    torch.testing.assert_close(variance, ours.variance, rtol=0, atol=1e-6)
    with torch.no_grad():
        seen: Any = likelihood(f)
    observed = posterior.predict(rows, observed=True).variance
    variance = seen.variance if several else seen.variance[:, None]
    torch.testing.assert_close(variance, observed, rtol=0, atol=1e-6)


def test_to_gpytorch_accepts_fit_result() -> None:
    x, y = curve(60)
    gp = SparseGP(ScaleKernel(RBFKernel()), x[:20], noise=0.05)
    schedule = PaperSchedule(SquaredCardinality(20, 0.05), pre=3, joint=2, post=3)
    fitted = fit(gp, Dataset.of(x, y), schedule=schedule)
    model, _ = to_gpytorch(fitted)
    ours = fitted.posterior.predict_mean(rows)[:, 0]
    torch.testing.assert_close(predicted(model, rows).mean, ours, rtol=0, atol=1e-6)


def test_to_gpytorch_nearly_singular_points_predict_the_same() -> None:
    """Forty points a hundredth of a lengthscale apart."""
    x, y = curve(50)
    Z = points(40)
    kernel = ScaleKernel(RBFKernel())
    kernel.base_kernel.lengthscale = torch.tensor(15.0)
    posterior = SparseGP(kernel, Z, noise=0.1).posterior(Dataset.of(x, y))
    f = predicted(to_gpytorch(posterior)[0], rows)
    ours = posterior.predict(rows)
    torch.testing.assert_close(f.mean, ours.mean[:, 0], rtol=0, atol=1e-6)
    torch.testing.assert_close(f.variance, ours.variance[:, 0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("likelihood", ["gaussian", "student-t"])
@pytest.mark.parametrize("several", [False, True])
def test_to_gpytorch_regressor_is_in_units_of_data(likelihood: str, several: bool) -> None:
    x, Y = tasks(60)
    X = 100 * x.numpy() - 40
    y = (Y.numpy() * [3.0, 0.01, 500.0] + 7) if several else 30 * Y[:, 0].numpy() + 7
    if several and likelihood != "gaussian":
        regressor = SparseGPRegressor(likelihood=likelihood, **QUICK)
        with pytest.raises(InputError, match=r"pass `fitted.posterior_`"):
            to_gpytorch(regressor.fit(X, y))
        return
    regressor = SparseGPRegressor(likelihood=likelihood, **QUICK).fit(X, y)
    model, noise = to_gpytorch(regressor)
    f = predicted(model, torch.tensor(X))
    mean, sd = regressor.predict(X, return_std=True, observed=False)
    np.testing.assert_allclose(f.mean.numpy(), mean, rtol=1e-6)
    np.testing.assert_allclose(f.stddev.numpy(), sd, rtol=1e-5)
    if likelihood == "gaussian":
        with torch.no_grad():
            seen: Any = noise(f)
        np.testing.assert_allclose(
            seen.stddev.numpy(), regressor.predict(X, return_std=True)[1], rtol=1e-6
        )
    else:
        found: Any = noise
        np.testing.assert_allclose(found.noise.detach().numpy(), regressor.noise_, rtol=1e-9)


@pytest.mark.parametrize("classes", [2, 3])
def test_to_gpytorch_classifier_has_same_probabilities(classes: int) -> None:
    x, y = curve(60)
    labels = (y > 0).long() if classes == 2 else three_classes(y)
    names = np.array(["a", "b", "c"])[labels.numpy()]
    classifier = SparseGPClassifier(**QUICK).fit(x.numpy(), names)
    model, likelihood = to_gpytorch(classifier)
    with torch.no_grad(), gpytorch.settings.num_likelihood_samples(20_000):
        torch.manual_seed(0)
        seen: Any = likelihood(model(x))
    ours = classifier.predict_proba(x.numpy())
    if classes == 2:
        np.testing.assert_allclose(seen.mean.numpy(), ours[:, 1], atol=1e-6)
    else:
        # GPyTorch's softmax draws samples: the sd of 20,000 is below 0.004.
        np.testing.assert_allclose(seen.probs.mean(0).numpy(), ours, atol=0.02)


def test_to_gpytorch_model_can_be_trained_and_winnowed() -> None:
    x, y = curve(60)
    gp = VariationalGP(ScaleKernel(RBFKernel()), x[:20], likelihood=BernoulliLikelihood())
    data = Dataset.of(x, (y > 0).double())
    model, likelihood = to_gpytorch(gp.with_best_q(data).posterior(data))
    bound, labels = elbo(likelihood, model.train(), 60), (y > 0).double()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(20):
        optimiser.zero_grad()
        loss = -bound(model(x), labels)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.01
    result = winnow(model, likelihood, (x, labels))
    assert result.n_inducing < 20
    assert torch.equal(result.model.x_shift, model.x_shift)


def test_integration_does_not_shadow_gpytorch() -> None:
    """The subpackage and the library are both called gpytorch; imports are absolute."""
    door = sys.modules[to_gpytorch.__module__.rpartition(".")[0]]
    assert door.__name__ == "winnowgp.integrations.gpytorch"
    assert gpytorch is sys.modules["gpytorch"]
    assert not gpytorch.__name__.startswith("winnowgp")


def test_to_gpytorch_other_types_raise() -> None:
    linear: Any = torch.nn.Linear(1, 1)
    with pytest.raises(InputError, match=r"`fitted` must be .* got Linear"):
        to_gpytorch(linear)


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
    gp, offset = _converted_prior(model, several)
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
