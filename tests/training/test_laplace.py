"""The Laplace approximation of hyper-parameters against dense evidences and quadrature."""

from copy import deepcopy
from dataclasses import replace
from math import log
from typing import Any

import pytest
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.means import ConstantMean
from gpytorch.priors import LogNormalPrior
from torch import Tensor

from helpers.oracles import log_normal
from winnowgp.data import Dataset
from winnowgp.models import MixturePosterior, SparseGP
from winnowgp.models.priors import add_weak_priors, log_prior
from winnowgp.training import FitResult, hyperparameter_mixture, laplace
from winnowgp.training.laplace import (
    LaplaceApproximation,
    LogDensity,
    constant_posterior,
    with_constant,
)
from winnowgp.training.lbfgs import Stop, maximise_elbo
from winnowgp.training.schedules import SizedModel

G = torch.Generator().manual_seed(0)
X = torch.randn(15, 2, generator=G).double()
Y = X[:, :1].sin() + 0.3 * torch.randn(15, 1, generator=G).double()
DATA = Dataset.of(X, Y)


def gp(points: Tensor = X, *, mean: ConstantMean | None = None) -> SparseGP:
    kernel = ScaleKernel(RBFKernel(ard_num_dims=2, lengthscale_constraint=GreaterThan(1e-3)))
    kernel.base_kernel.lengthscale = torch.tensor([[1.2, 2.5]])
    model = SparseGP(kernel, points, noise=0.2, mean=mean)
    add_weak_priors(model)
    return model


def optimum(model: SparseGP) -> SparseGP:
    model.candidates.requires_grad_(False)
    maximise_elbo(model, X, objective=model.chunked_bound(DATA), stop=Stop(1e-9, 20, 200))
    return model


def dense_log_density(x: Tensor) -> Tensor:
    """log N(y | 0, K + σ² I) plus the weak priors, for every row an inducing point.

    Coordinates: log of the variance, of the lengthscales above 1e-3, of the noise above 1e-6.
    """
    variance, lengths, noise = x[0].exp(), 1e-3 + x[1:3].exp(), 1e-6 + x[3].exp()
    distance = ((X[:, None] - X) / lengths).square().sum(-1)
    K = variance * (-0.5 * distance).exp() + noise * torch.eye(len(X)).double()
    long = 3.0 * 2**0.5
    prior = -(variance.log() ** 2) / (2 * 2.0**2) - (noise / 0.5).log() ** 2 / (2 * 1.5**2)
    return log_normal(Y, K) + prior - 0.5 * (lengths.clamp_max(long) / long).log().square().sum()


def test_log_density_and_hessian_are_those_of_the_dense_evidence() -> None:
    density = LogDensity(gp(), DATA)
    x = density.fitted
    torch.testing.assert_close(x.exp(), torch.tensor([log(2), 1.199, 2.499, 0.2 - 1e-6]).double())
    other = x + torch.tensor([0.3, -0.4, 0.2, 0.5]).double()
    # Priors have constants, and the bound a jitter of 1e-8.
    assert density(other) - density(x) == pytest.approx(
        (dense_log_density(other) - dense_log_density(x)).item(), abs=1e-5
    )
    H = torch.autograd.functional.hessian(dense_log_density, x)
    assert isinstance(H, Tensor)
    torch.testing.assert_close(density.hessian(x), H, rtol=1e-4, atol=1e-4)


def test_hessian_is_that_of_differences_of_the_bound_with_few_points() -> None:
    density = LogDensity(gp(X[:4], mean=ConstantMean()), DATA)
    x, h = density.fitted, 1e-3
    assert len(x) == 5
    steps, H = h * torch.eye(len(x)).double(), density.hessian(x)
    for i, j in ((0, 0), (0, 3), (1, 2), (2, 4), (3, 4), (4, 4)):
        a, b = steps[i], steps[j]
        corners = [s * t * density(x + s * a + t * b) for s in (1, -1) for t in (1, -1)]
        assert H[i, j].item() == pytest.approx(sum(corners) / (4 * h * h), rel=1e-3, abs=1e-3)


def test_model_is_not_changed() -> None:
    model: Any = gp(X[:4])
    before = deepcopy(model.state_dict())
    density = LogDensity(model, DATA)
    density.posterior(density.fitted + 1)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert model.candidates.requires_grad


def test_direction_that_nothing_determines_has_unit_deviation() -> None:
    model: Any = gp(X[:4])
    # So long a lengthscale has no effect, and its prior is flat there.
    model.kernel.base_kernel.lengthscale = torch.tensor([[1.2, 1e5]])
    approximation = LaplaceApproximation.of(LogDensity(model, DATA))
    assert approximation.raised.max() == pytest.approx(1.0, abs=1e-3)
    draws, _ = approximation.draws(256, seed=0)
    logs = draws[:, 2] - log(1e5)
    assert logs.std().item() == pytest.approx(1.0, rel=0.05)
    assert logs.mean().item() == pytest.approx(0.0, abs=0.05)
    # The prior that makes up for the curvature is a standard normal density of this logarithm.
    moved = approximation.fitted + torch.tensor([0, 0, 2.0, 0]).double()
    assert approximation.added(moved[None]).item() == pytest.approx(-2.0, abs=1e-2)


def test_negative_curvature_is_raised() -> None:
    model: Any = gp(X[:4])
    # Far below its optimum, the log density of the noise is convex.
    model.likelihood.noise = 1e-3
    approximation = LaplaceApproximation.of(LogDensity(model, DATA))
    assert approximation.raised.max() > 1
    assert approximation.curvature.min() == 1.0


def test_mean_of_the_approximation_is_near_the_maximum() -> None:
    best = LogDensity(optimum(gp(X[:4])), DATA)
    model: Any = optimum(gp(X[:4]))
    model.likelihood.noise = model.likelihood.noise * 1.05
    density = LogDensity(model, DATA)
    approximation = LaplaceApproximation.of(density)
    off, left = ((x - best.fitted)[3].abs() for x in (density.fitted, approximation.mean))
    assert left < 0.2 * off


def test_far_from_the_maximum_the_approximation_is_no_less_probable_than_the_fit() -> None:
    model: Any = gp(X[:4])
    # Held lengthscales may be far from those that the bound prefers.
    model.kernel.base_kernel.lengthscale = torch.tensor([[10.0, 10.0]])
    model.likelihood.noise = 3.0
    density = LogDensity(model, DATA)
    approximation = LaplaceApproximation.of(density)
    assert density(approximation.mean) >= density(density.fitted)
    newton = approximation.directions.mT @ density.gradient(density.fitted)
    step = approximation.directions @ (newton / approximation.curvature)
    assert density(density.fitted + step) < density(density.fitted)


def one_parameter(*, known: bool = False) -> SparseGP:
    """Only the noise is uncertain, and its posterior is skewed."""
    model = gp(X[::4])
    model.kernel.requires_grad_(False)
    model.likelihood.requires_grad_(not known)
    return optimum(model)


@pytest.fixture(scope="module")
def noise_posterior() -> tuple[LogDensity, Tensor, Tensor]:
    """The log density of one parameter, and the nodes and weights of its quadrature."""
    density = LogDensity(one_parameter(), DATA)
    grid = density.fitted + torch.linspace(-2, 3, 81).double()[:, None]
    return density, grid, torch.tensor([density(x) for x in grid]).double().softmax(0)


def test_mixture_of_one_parameter_agrees_with_quadrature(noise_posterior) -> None:
    density, grid, weights = noise_posterior
    assert density.fitted.shape == (1,)
    new = torch.linspace(-2, 2, 5).double()[:, None].expand(5, 2)
    targets = torch.tensor([-2.0, -1.0, 0.0, 1.0, 3.0]).double()[:, None]
    each = torch.stack([density.posterior(x).log_density(new, targets) for x in grid])
    exact = (each + weights.log()[:, None, None]).logsumexp(0)
    mixture: Any = hyperparameter_mixture(one_parameter(), DATA)
    assert mixture.S == laplace.MEMBERS
    torch.testing.assert_close(mixture.log_density(new, targets), exact, rtol=0, atol=0.03)
    # The point estimate is too certain where densities are low.
    assert (exact - mixture.mode.log_density(new, targets)).max() > 0.2
    noises = torch.stack([m.likelihood.noise for m in mixture.members])
    expected = weights @ (1e-6 + grid[:, 0].exp())
    assert noises.mean().item() == pytest.approx(expected.item(), rel=0.03)


def test_weights_correct_a_skewed_density(noise_posterior) -> None:
    density, grid, weights = noise_posterior
    expected = (weights @ grid[:, 0]).item()
    draws = torch.stack(laplace._weighted_draws(density, seed=0))
    assert draws.mean().item() == pytest.approx(expected, abs=0.02)
    assert LaplaceApproximation.of(density).mean.item() < expected - 0.05


def test_constant_model_has_uncertain_noise_and_mean_only() -> None:
    model = gp(X[:0], mean=ConstantMean())
    assert len(LogDensity(model, DATA).fitted) == 2
    mixture: Any = hyperparameter_mixture(optimum(model), DATA)
    lengths = {m.kernel.base_kernel.lengthscale[0, 0].item() for m in mixture.members}
    levels = {m.mean.constant.item() for m in mixture.members}
    assert len(lengths) == 1
    assert len(levels) > 8


def test_model_without_uncertain_parameters_is_one_posterior() -> None:
    mixture: Any = hyperparameter_mixture(one_parameter(known=True), DATA)
    assert mixture.S == 1
    torch.testing.assert_close(
        mixture.predict_mean(X), mixture.mode.predict_mean(X), rtol=0, atol=0
    )


def test_seed_determines_the_draws() -> None:
    density = LogDensity(optimum(gp(X[:4])), DATA)
    approximation = LaplaceApproximation.of(density)
    first, second, other = (approximation.draws(16, seed=seed)[0] for seed in (1, 1, 2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert not torch.equal(first, other)
    # The members are in the order of the noise.
    noise = torch.stack(laplace._weighted_draws(density, seed=1))[:, -1]
    assert torch.equal(noise, noise.sort().values)


def test_draws_that_cannot_be_computed_are_left_out(monkeypatch) -> None:
    density = LogDensity(optimum(gp(X[:4])), DATA)
    least, computed = density.fitted[-1], LogDensity.__call__
    monkeypatch.setattr(
        LogDensity, "__call__", lambda self, x: computed(self, x) if x[-1] > least else -torch.inf
    )
    draws = torch.stack(laplace._weighted_draws(density, seed=0))
    assert (draws[:, -1] > least).all()
    assert density(density.fitted + 100) == -torch.inf


def test_truncated_weights_and_strata() -> None:
    weights = laplace._tempered_weights(torch.tensor([0.0, log(7.0), 0.0, 0.0]).double(), 2)
    # Truncated to √4 times the mean.
    torch.testing.assert_close(weights, torch.tensor([1, 5, 1, 1]).double() / 8)
    key = torch.tensor([4.0, 3.0, 1.0, 2.0]).double()
    assert laplace._strata(key, weights, 5).tolist() == [2, 1, 1, 1, 0]


def test_weights_of_one_draw_are_tempered() -> None:
    log_weights = torch.linspace(-3, 0, 128).double()
    log_weights[-1], log_weights[0] = 9.0, -torch.inf
    weights = laplace._tempered_weights(log_weights, 16)
    # So many effective draws, in the same order.
    assert 1 / weights.square().sum().item() == pytest.approx(16, rel=1e-3)
    assert (weights.diff() > 0).all()
    assert weights[0] == 0
    # A power of the weights, of those that are not truncated.
    power = (weights[2:-1] / weights[1:-2]).log() / log_weights[1:-1].diff()
    torch.testing.assert_close(power, power[0].expand_as(power), rtol=1e-6, atol=0)
    assert 0 < power[0] < 1


def test_weights_of_far_draws_are_tempered() -> None:
    # exp(−800) is zero in double precision.
    log_weights = torch.full((32,), -800.0, dtype=torch.float64)
    log_weights[0] = 0.0
    weights = laplace._tempered_weights(log_weights, 16)
    assert 1 / weights.square().sum().item() == pytest.approx(16, rel=1e-3)
    assert weights[0] > weights[1] > 0


def test_weights_of_fewer_draws_are_equal() -> None:
    log_weights = torch.tensor([3.0, 0.0, 1.0, -torch.inf]).double()
    weights = laplace._tempered_weights(log_weights, 16)
    expected = torch.tensor([1.0, 1, 1, 0]).double() / 3
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-5)


def test_priors_are_part_of_the_density() -> None:
    model: Any = gp(X[:4])
    free, bound = LogDensity(model, DATA), deepcopy(model)
    bound.kernel.base_kernel.register_prior(
        "lengthscale_prior", LogNormalPrior(log(50.0), 0.01).double(), "lengthscale"
    )
    tied = LogDensity(bound, DATA)
    assert tied(tied.fitted) < free(free.fitted) - 1000


@pytest.mark.parametrize("shared", [True, False])
def test_constant_posterior_is_that_of_the_dense_constant_kernel(shared: bool) -> None:
    targets = torch.cat([2 + Y, 3 * Y.square()], 1)
    weights = torch.linspace(0.5, 2, len(X)).double()
    data = Dataset.of(X, targets, weights=weights)
    share = (weights / weights.sum())[:, None]
    mean, second = (share * targets).sum(0), (share * targets.square()).sum(0)
    noise = second - mean.square()
    model = SparseGP(RBFKernel(), X[:2], noise=1.0 if shared else torch.ones(2).double())
    noise = noise.mean().expand(2) if shared else noise
    precision = weights.sum() / noise + 1 / second.mean()
    expected = (weights[:, None] * targets).sum(0) / noise / precision
    prediction = constant_posterior(model, data).predict(X[:3] + 1, observed=True)
    torch.testing.assert_close(prediction.mean, expected.expand(3, 2))
    torch.testing.assert_close(prediction.variance, (1 / precision + noise).expand(3, 2))


def test_constant_is_a_member_of_its_weight() -> None:
    model = optimum(gp(X[::3]))
    plain = hyperparameter_mixture(model, DATA)
    mixture = hyperparameter_mixture(model, DATA, constant_weight=0.2)
    assert mixture.S == plain.S + 1
    constant = constant_posterior(model, DATA).log_density(X, Y)
    expected = (0.8 * plain.log_density(X, Y).exp() + 0.2 * constant.exp()).log()
    torch.testing.assert_close(mixture.log_density(X, Y), expected)
    assert hyperparameter_mixture(model.with_candidates(X[:0]), DATA, constant_weight=0.2).S <= 16


def test_average_with_a_constant_of_every_size() -> None:
    model = optimum(gp(X[::3]))
    smaller = model.with_candidates(X[::6])
    sized = SizedModel(smaller.posterior(DATA), elbo=0.0, log_density=0.0)
    fitted = FitResult(
        model=model,
        posterior=model.posterior(DATA),
        selections=(),
        candidates=(),
        elbo=0.0,
        elbo_gap=0.0,
        sized=(sized,),
        constant_weight=0.2,
    )
    constant = constant_posterior(model, DATA).log_density(X, Y).exp()
    result = with_constant(fitted, DATA)
    for own, mixed in (
        (fitted.posterior, result.posterior),
        (sized.posterior, result.sized[0].posterior),
    ):
        assert isinstance(mixed, MixturePosterior)
        assert mixed.mode is own
        assert mixed.constant_weight == pytest.approx(0.2)
        expected = (0.8 * own.log_density(X, Y).exp() + 0.2 * constant).log()
        torch.testing.assert_close(mixed.log_density(X, Y), expected)
    none = model.with_candidates(X[:0])
    fitted = replace(fitted, model=none, posterior=none.posterior(DATA), sized=())
    assert with_constant(fitted, DATA).posterior is fitted.posterior


@pytest.mark.parametrize("points", [8, 4])
def test_density_is_that_of_the_evidence_where_the_bound_is_close(points: int) -> None:
    # The bound of 8 points is 0.005 nats per observation below the evidence, that of 4 points 0.07.
    density, moved = LogDensity(gp(X[:points]), DATA), gp(X[:points])
    x = density.fitted
    other = x + torch.tensor([0.3, -0.8, -0.5, 0.5]).double()
    kernel: Any = moved.kernel
    kernel.outputscale = other[0].exp()
    kernel.base_kernel.lengthscale = 1e-3 + other[None, 1:3].exp()
    moved.likelihood.noise = 1e-6 + other[3].exp()
    nats = [m.fixed_bound(DATA) + log_prior(m).item() for m in (gp(X[:points]), moved)]
    bound = nats[1] - nats[0]
    exact = (dense_log_density(other) - dense_log_density(x)).item()
    assert bound < exact - 0.1
    expected = exact if points == 8 else bound
    assert density(other) - density(x) == pytest.approx(expected, abs=1e-4)


def test_density_of_weights_above_one_is_that_of_the_bound() -> None:
    """The exact evidence of rows that count ten times each has no maximum in the noise."""
    data = Dataset.of(X, Y, weights=torch.full((len(X),), 10.0).double())
    model: Any = gp(X[:8])
    other: Any = gp(X[:8])
    other.likelihood.noise = 0.05
    gap = model.evidence(data, max_rows=15).lower - model.fixed_bound(data)
    assert 0 < gap <= laplace._CLOSE * data.observations
    density = LogDensity(model, data)
    x = density.fitted.clone()
    x[3] = log(0.05 - 1e-6)
    nats = [m.fixed_bound(data) + log_prior(m).item() for m in (model, other)]
    assert density(x) - density(density.fitted) == pytest.approx(nats[1] - nats[0], abs=1e-3)
