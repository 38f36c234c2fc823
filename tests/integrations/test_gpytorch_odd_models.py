"""Odd but reasonable models go through the door, and GPyTorch's own bound agrees."""

from importlib import import_module
from math import log, pi
from typing import Any

import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood, PoissonLikelihood
from gpytorch.models.gplvm import MAPLatentVariable, PointLatentVariable
from gpytorch.priors import NormalPrior
from gpytorch.variational import (
    BatchDecoupledVariationalStrategy,
    IndependentMultitaskVariationalStrategy,
    LargeBatchVariationalStrategy,
    LMCVariationalStrategy,
    UnwhitenedVariationalStrategy,
    VariationalStrategy,
)
from torch import Tensor, nn

from helpers.gpytorch_models import (
    Latent,
    Model,
    curve,
    elbo,
    gaussian,
    points,
    task_noise,
    tasks,
    with_random_q,
)
from winnowgp.errors import ConvergenceWarning
from winnowgp.integrations.gpytorch import winnow
from winnowgp.integrations.gpytorch.selection import Winnowed

# Shapes are checked by the tests of ordinary models.
pytestmark = pytest.mark.unchecked
N = 20


def own_bound(model: Any, likelihood: Any, x: Tensor, y: Tensor) -> float:
    """GPyTorch's bound of all functions together, in the model's own precision."""
    kind = next(model.parameters()).dtype
    with torch.no_grad():
        f = model.train()(x.to(kind))
        return N * elbo(likelihood.train(), model, N)(f, y.to(kind)).sum().item()


def agreed(model: Any, likelihood: Any, x: Tensor, y: Tensor, *, within: float) -> Winnowed[Any]:
    """Sent through for five points a set, its bounds before and after compared with GPyTorch's."""
    result = winnow(model, likelihood, (x, y), max_points=5)
    assert all(each.n_inducing == 5 for each in result.sets)
    after = own_bound(result.model, likelihood, x, y)
    assert result.bound == pytest.approx(after, abs=within)
    assert result.original == pytest.approx(own_bound(model, likelihood, x, y), abs=within)
    assert result.original < result.reference
    return result


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_winnow_ignores_torch_grad_modes(mode: Any) -> None:
    x, y = curve(N)
    model = with_random_q(Model(points(8)))
    outside = winnow(model, gaussian(), (x, y), max_points=5)
    with mode():
        inside = winnow(model, gaussian(), (x, y), max_points=5)
    assert inside.bound == outside.bound
    assert torch.equal(inside.inclusion, outside.inclusion)
    # The result can be trained further.
    smaller = inside.model.train()
    elbo(gaussian(), smaller, N)(smaller(x), y).backward()
    assert all(p.grad is not None for p in smaller.parameters())


def test_winnow_accepts_inference_tensors() -> None:
    """Counts are saved for the gradient that sites are."""
    model, likelihood = with_random_q(Model(points(6))), PoissonLikelihood()
    x, y = curve(N)
    expected = winnow(model, likelihood, (x, y.exp().round()), max_points=3).bound
    with torch.inference_mode():
        data = (x.clone(), y.exp().round())
    assert winnow(model, likelihood, data, max_points=3).bound == expected


@pytest.mark.parametrize(("kind", "shared"), [("point", False), ("map", True)])
def test_winnow_accepts_point_latent_inputs(kind: str, shared: bool) -> None:
    x, Y = tasks(N)
    model = Latent(x / 3 - 1, 3, 6)
    start = nn.Parameter(model.X.q_mu.detach().clone())
    prior = NormalPrior(torch.zeros_like(start), torch.ones_like(start))
    model.X = (
        PointLatentVariable(N, 1, start)
        if kind == "point"
        else MAPLatentVariable(N, 1, start, prior)
    )
    if shared:
        model.variational_strategy.inducing_points = nn.Parameter(points(6) / 3 - 1)
    model = with_random_q(model)
    likelihood = GaussianLikelihood(batch_shape=torch.Size([3])).double()
    result = winnow(model, likelihood, Y, max_points=4)
    assert [each.n_inducing for each in result.sets] == [4] * (1 if shared else 3)
    smaller: Any = result.model.train()
    assert torch.equal(smaller.X.X, start)
    with torch.no_grad():
        nats = likelihood.expected_log_prob(Y.mT, smaller(smaller.sample_latent_variable()))
        bound = nats.sum() - smaller.variational_strategy.kl_divergence().sum()
    assert result.bound == pytest.approx(bound.item(), abs=1e-6)


def test_winnow_leaves_prediction_cache_of_model() -> None:
    """In eval mode GPyTorch remembers factors, here with a history."""
    x, y = curve(N)
    model, likelihood = with_random_q(Model(points(8))).eval(), gaussian().eval()
    before = model(x).mean
    before.sum().backward()
    result = winnow(model, likelihood, (x, y), max_points=5)
    assert not result.model.training
    assert not model.training
    assert not likelihood.training
    assert torch.equal(model(x).mean, before)
    q = result.model(x)
    noise = likelihood.noise.item()
    off = (y - q.mean).square() + q.variance
    nats = -0.5 * (log(2 * pi * noise) + off / noise).sum()
    kl = result.model.variational_strategy.kl_divergence()
    assert result.bound == pytest.approx((nats - kl).item(), abs=1e-5)


@pytest.mark.parametrize(
    ("model_kind", "likelihood_kind", "data_kind"),
    [
        (torch.float32, torch.float32, torch.float64),
        (torch.float64, torch.float32, torch.float64),
        (torch.float64, torch.float64, torch.float32),
    ],
)
def test_winnow_accepts_mixed_precision(
    model_kind: torch.dtype, likelihood_kind: torch.dtype, data_kind: torch.dtype
) -> None:
    x, y = curve(N, dtype=data_kind)
    model = with_random_q(Model(points(8).to(model_kind)))
    result = agreed(model, gaussian(0.1, likelihood_kind), x, y, within=5e-3)
    assert {p.dtype for p in result.model.parameters()} == {model_kind}


def test_winnow_accepts_kernels_on_some_columns() -> None:
    x, y = curve(N)
    x = torch.cat([x, x.roll(1), x.roll(2).square()], dim=1)
    model = Model(x[:8])
    parts = RBFKernel(active_dims=(0,)) + MaternKernel(active_dims=(1, 2), ard_num_dims=2)
    model.covar_module = ScaleKernel(parts).double()
    agreed(with_random_q(model), gaussian(), x, y, within=1e-6)


def two_mixed(strategy: Any) -> LMCVariationalStrategy:
    wrapped = LMCVariationalStrategy(strategy, num_tasks=3, num_latents=2)
    wrapped.lmc_coefficients.data = torch.tensor([[1.0, 0.3, -0.5], [0.2, 1.0, 0.4]])
    return wrapped


def independent(strategy: Any) -> IndependentMultitaskVariationalStrategy:
    return IndependentMultitaskVariationalStrategy(strategy, num_tasks=3)


class Loud(IndependentMultitaskVariationalStrategy):
    """Tasks of twice the functions."""

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(x, *args, **kwargs) * 2


TASKS: dict[str, dict[str, Any]] = {
    "two functions, three tasks": {"batch": [2], "prior": [2], "around": two_mixed},
    "one function, three tasks": {"around": independent},
    "own tasks of a subclass": {
        "batch": [3],
        "around": lambda strategy: Loud(strategy, num_tasks=3),
    },
    "decoupled": {
        "batch": [3],
        "around": independent,
        "strategy": BatchDecoupledVariationalStrategy,
    },
}


@pytest.mark.parametrize("name", TASKS)
def test_winnow_accepts_all_multitask_strategies(name: str) -> None:
    x, Y = tasks(N)
    agreed(with_random_q(Model(points(8), **TASKS[name])), task_noise(0.1), x, Y, within=1e-5)


def test_winnow_accepts_two_batch_axes() -> None:
    x, Y = tasks(N)
    model = with_random_q(Model(points(8), batch=[2, 3]))
    agreed(model, gaussian(0.1), x, torch.stack([Y.mT, -Y.mT]), within=1e-6)


def test_winnow_decoupled_means_are_point_masses() -> None:
    """GPyTorch's bound is ours but for ½ log 2π a point, which is a matter of units."""
    x, y = curve(N)
    model = Model(points(8), strategy=BatchDecoupledVariationalStrategy, learnt=False)
    result = winnow(with_random_q(model), gaussian(), (x, y), max_points=5)
    assert [each.n_inducing for each in result.sets] == [5, 5]
    units = 0.5 * log(2 * pi)
    own = own_bound(result.model, gaussian(), x, y)
    assert result.bound == pytest.approx(own + 5 * units, abs=1e-6)
    assert result.original == pytest.approx(own_bound(model, gaussian(), x, y) + 8 * units, 1e-6)
    assert not isinstance(result.model.variational_strategy.inducing_points, nn.Parameter)


@pytest.mark.parametrize(
    "parent",
    [VariationalStrategy, LargeBatchVariationalStrategy, UnwhitenedVariationalStrategy],
)
def test_winnow_accepts_extending_subclass(parent: Any) -> None:
    class Mine(parent):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.note = "mine"

        def extra_repr(self) -> str:
            return self.note

    x, y = curve(N)
    result = agreed(with_random_q(Model(points(8), strategy=Mine)), gaussian(), x, y, within=1e-5)
    strategy = result.model.variational_strategy
    assert type(strategy) is Mine
    assert strategy.note == "mine"


def test_winnow_warning_points_to_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("winnowgp.integrations.gpytorch.selection")
    monkeypatch.setattr(module, "_TRIES", 1)
    x, y = curve(80)
    labels = (y > 0).double()
    with pytest.warns(ConvergenceWarning) as warned:
        winnow(Model(points(20)), BernoulliLikelihood(), (x, labels), tolerance=0.05)
    assert warned[0].filename == __file__
