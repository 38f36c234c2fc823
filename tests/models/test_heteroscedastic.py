"""Noise that depends on the inputs: the bound, both processes' gains, optimal q, predictions."""

from dataclasses import replace
from math import log, pi

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood
from gpytorch.means import ZeroMean
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal, kl_divergence

from helpers import oracles
from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.models import SparseGP, VariationalGP
from winnowgp.models.heteroscedastic import (
    HeteroscedasticGP,
    HeteroscedasticPosterior,
    LogVarianceLikelihood,
    leave_one_out_residuals,
)
from winnowgp.models.kernels import covariance
from winnowgp.models.quadrature import hermite_nodes


def rows(N: int = 24) -> Dataset:
    """A sine whose noise grows along the input."""
    g = torch.Generator().manual_seed(3)
    X = torch.rand(N, 1, generator=g, dtype=torch.float64)
    noise = torch.randn(N, generator=g, dtype=torch.float64) * (0.05 + X[:, 0])
    return Dataset.of(X, torch.sin(6 * X[:, 0]) + noise)


def model_of(Z: Tensor, Zg: Tensor) -> HeteroscedasticGP:
    function = SparseGP(kernel_of(0.8, 0.3), Z, noise=0.2)
    noise = VariationalGP(kernel_of(0.7, 0.4), Zg, likelihood=LogVarianceLikelihood())
    noise.mean.initialize(constant=torch.tensor(-0.4))
    return HeteroscedasticGP(function, noise)


def kernel_of(variance: float, lengthscale: float) -> ScaleKernel:
    inner = RBFKernel()
    inner.initialize(lengthscale=lengthscale)
    kernel = ScaleKernel(inner)
    kernel.initialize(outputscale=variance)
    return kernel


@pytest.fixture(scope="module")
def data() -> Dataset:
    return rows()


@pytest.fixture(scope="module")
def start() -> HeteroscedasticGP:
    grid = torch.linspace(0, 1, 6, dtype=torch.float64)[:, None]
    model = model_of(grid, grid[::2])
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        model.log_noise.q_mean.copy_(torch.randn(3, 1, generator=g))
        model.log_noise.q_factor.mul_(0.6).add_(0.1 * torch.randn(1, 3, 3, generator=g))
    return model


@pytest.fixture(scope="module")
def best(start, data) -> HeteroscedasticGP:
    return start.with_best_q(data, gain=1e-13)


@torch.no_grad()
def dense_bound(model: HeteroscedasticGP, data: Dataset) -> Tensor:
    """Σ E_q(f) q(g) log N(y | f, σ² eᵍ) by two-dimensional quadrature, minus both KLs."""
    f, g = model.function, model.log_noise
    Kuu, Kuf = (covariance(g.kernel, g.candidates, X) for X in (g.candidates, data.X))
    L, F = torch.linalg.cholesky(Kuu), g.q_factor[0].tril()
    m, S = L @ g.q_mean[:, 0], L @ F @ F.mT @ L.mT
    A = Kuf.mT @ Kuu.inverse()
    mean_g = g.mean(data.X) + A @ m
    var_g = (covariance(g.kernel, data.X, data.X) - A @ (Kuu - S) @ A.mT).diagonal()
    row_noise = f.noise * (mean_g - var_g / 2).exp()
    Kuu_f, Kuf_f = (covariance(f.kernel, f.candidates, X) for X in (f.candidates, data.X))
    q_mean, q_factor = oracles.optimal_q(Kuu_f, Kuf_f, data.Y, row_noise)
    V = torch.linalg.cholesky(Kuu_f).inverse() @ Kuf_f
    mean_f = V.mT @ q_mean[:, 0]
    kff = covariance(f.kernel, data.X, data.X).diagonal()
    var_f = kff - V.square().sum(0) + (q_factor[0].mT @ V).square().sum(0)
    z, weight = hermite_nodes(60, mean_f)
    fs, gs = mean_f + var_f.sqrt() * z, mean_g + var_g.sqrt() * z
    scale = (f.noise * gs.exp()).sqrt()
    nats = Normal(fs[:, None], scale[None]).log_prob(data.Y[:, 0])
    expected = (weight[:, None] * weight[None] * nats).sum()
    prior = MultivariateNormal(torch.zeros_like(m), Kuu)
    kl_g = kl_divergence(MultivariateNormal(m, S), prior)
    white = MultivariateNormal(torch.zeros_like(q_mean[:, 0]), torch.eye(len(q_mean)).double())
    kl_f = kl_divergence(MultivariateNormal(q_mean[:, 0], q_factor[0] @ q_factor[0].mT), white)
    return expected - kl_f - kl_g


def test_bound_equals_dense_algebra_and_quadrature(start, data) -> None:
    expected = dense_bound(start, data)
    torch.testing.assert_close(start.bound(data).detach(), expected, rtol=1e-7, atol=1e-6)
    assert start.fixed_bound(data) == pytest.approx(expected.item(), rel=1e-7)


def test_bound_of_constant_log_noise_is_that_of_sparse_gp(data) -> None:
    grid = torch.linspace(0, 1, 5, dtype=torch.float64)[:, None]
    model = model_of(grid, grid[:0])
    model.log_noise.kernel.initialize(outputscale=1e-12)
    noise = 0.2 * torch.tensor(-0.4).exp().item()
    plain = model.function.with_candidates(grid)
    plain.likelihood.initialize(noise=noise)
    assert model.bound(data).item() == pytest.approx(plain.bound(data).item(), rel=1e-8)


def test_bound_weight_two_equals_repeated_row(start, data) -> None:
    weights = torch.ones(data.N, dtype=torch.float64)
    weights[3] = 2
    order = torch.tensor([*range(data.N), 3])
    weighted, repeated = replace(data, weights=weights), data.part(order)
    expected = start.bound(repeated).item()
    assert start.bound(weighted).item() == pytest.approx(expected, rel=1e-9)
    assert start.fixed_bound(weighted) == pytest.approx(expected, rel=1e-9)
    targets = start.residuals(weighted)
    assert torch.equal(targets.weights, weights)


def test_bound_gradient_equals_finite_difference(start, data) -> None:
    model = start.with_parts()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    model.bound(data).backward()
    for parameter in (model.log_noise.q_mean, model.candidates, model.log_noise.mean.raw_constant):
        gradient = parameter.grad.flatten()[0].item()
        values = []
        for step in (1e-5, -1e-5):
            moved = start.with_parts()
            twin = dict(moved.named_parameters())[_name(model, parameter)]
            with torch.no_grad():
                twin.view(-1)[0] += step
            values.append(moved.bound(data).item())
        assert gradient == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-4, abs=1e-6)


def _name(model: HeteroscedasticGP, wanted: Tensor) -> str:
    return next(name for name, p in model.named_parameters() if p is wanted)


def test_best_q_equals_optimum_of_generic_optimiser(start, best, data) -> None:
    model = start.with_parts().requires_grad_(False)
    q = [model.log_noise.q_mean, model.log_noise.q_factor]
    for parameter in q:
        parameter.requires_grad_(True)
    optimiser = torch.optim.LBFGS(q, max_iter=300, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = -model.bound(data)
        value.backward()
        return value

    for _ in range(3):
        optimiser.step(loss)
    assert best.fixed_bound(data) == pytest.approx(model.bound(data).item(), abs=1e-6)
    assert best.fixed_bound(data) > start.fixed_bound(data) + 1


def test_statistics_of_function_equal_differences_of_bound(best, data) -> None:
    statistics, _ = best.subset_statistics(data)
    mask = torch.tensor([1, 0, 1, 1, 0, 1], dtype=torch.bool)
    gains = statistics.marginal_gains(mask)
    objective, noise = best.subset_objective(data), torch.ones(3, dtype=torch.bool)
    for k in range(6):
        pair = mask.repeat(2, 1)
        pair[0, k], pair[1, k] = True, False
        values = objective.value(torch.cat([pair, noise.repeat(2, 1)], 1)).detach()
        torch.testing.assert_close(statistics.value(pair), values, rtol=1e-7, atol=1e-7)
        assert gains[k].item() == pytest.approx((values[0] - values[1]).item(), abs=1e-6)


def test_statistics_of_log_noise_are_bound_to_first_order(best, data) -> None:
    _, statistics = best.subset_statistics(data)
    whole = torch.ones(1, 3, dtype=torch.bool)
    assert statistics.value(whole).item() == pytest.approx(best.fixed_bound(data), abs=1e-5)
    gains, targets = statistics.marginal_gains(whole[0]), best.residuals(data)
    before = best.log_noise.fixed_bound(targets)
    for k in range(3):
        mask = whole[0].clone()
        mask[k] = False
        surrogate = statistics.value(torch.stack([whole[0], mask]))
        assert gains[k].item() == pytest.approx((surrogate[0] - surrogate[1]).item(), abs=1e-7)
        true = before - best.log_noise.prune(mask).fixed_bound(targets)
        assert gains[k].item() == pytest.approx(true, rel=0.35, abs=0.05)


def test_normalised_model_has_unit_weights_and_equal_predictions(best, data) -> None:
    model = best.normalised(data)
    assert model.weighted(data).weights.mean().item() == pytest.approx(1)
    assert model.fixed_bound(data) == pytest.approx(best.fixed_bound(data), abs=1e-8)
    before, after = (m.posterior(data).predict(data.X, observed=True) for m in (best, model))
    torch.testing.assert_close(before.variance, after.variance)


@torch.no_grad()
def dense_mixture(posterior: HeteroscedasticPosterior, X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Means, deviations and weights of y given g on a fine grid of g."""
    f, g = posterior.function.predict(X), posterior.log_noise.predict(X)
    z = torch.linspace(-9, 9, 4001, dtype=torch.float64)[:, None, None]
    weight = Normal(0.0, 1.0).log_prob(z).exp()
    noise = posterior.likelihood.noise * (g.mean + g.variance.sqrt() * z).exp()
    return f.mean, (f.variance + noise).sqrt(), weight / weight.sum()


def test_predictions_equal_dense_quadrature(best, data) -> None:
    posterior, X, Y = best.posterior(data), data.X[:7], data.Y[:7]
    mean, sd, weight = dense_mixture(posterior, X)
    density = (weight * Normal(mean, sd).log_prob(Y).exp()).sum(0).log()
    torch.testing.assert_close(posterior.log_density(X, Y), density, rtol=1e-8, atol=1e-8)
    observed = posterior.predict(X, observed=True)
    torch.testing.assert_close(observed.variance, (weight * sd.square()).sum(0))
    noise, f = posterior.predict_noise(X), posterior.predict(X)
    torch.testing.assert_close(noise.mean, observed.variance - f.variance)
    second = (weight * (sd.square() - f.variance).square()).sum(0)
    torch.testing.assert_close(noise.variance, second - noise.mean.square(), rtol=1e-6, atol=1e-9)
    probabilities = torch.tensor([0.01, 0.3, 0.95], dtype=torch.float64)
    for p, quantile in zip(probabilities, posterior.quantiles(X, probabilities), strict=True):
        below = (weight * Normal(mean, sd).cdf(quantile)).sum(0)
        torch.testing.assert_close(below, p.expand_as(below), rtol=1e-7, atol=1e-8)
    latent = posterior.quantiles(X, probabilities, observed=False)
    torch.testing.assert_close(
        latent, posterior.function.quantiles(X, probabilities, observed=False)
    )


def test_samples_of_observations_have_predicted_moments(best, data) -> None:
    posterior, X, n = best.posterior(data), data.X[:4], 20_000
    generator = torch.Generator().manual_seed(0)
    y = posterior.sample(X, n, observed=True, generator=generator)
    moments = posterior.predict(X, observed=True)
    error = (y.mean(0) - moments.mean) / (moments.variance / n).sqrt()
    assert error.abs().max() < 4
    square = (y - moments.mean).square()
    z = (square.mean(0) - moments.variance) / (square.std(0) / n**0.5)
    assert z.abs().max() < 4
    covariance_matrix = posterior.covariance(X, observed=True)[0]
    torch.testing.assert_close(covariance_matrix.diagonal(), moments.variance[:, 0])


def test_likelihood_expectation_equals_quadrature() -> None:
    e, mean, variance = (torch.tensor([[v]], dtype=torch.float64) for v in (0.7, -0.3, 0.5))
    likelihood = LogVarianceLikelihood()
    z, weight = hermite_nodes(60, mean)
    nats = likelihood.forward(mean + variance.sqrt() * z).log_prob(e)
    closed = likelihood.expected_log_prob(e, Normal(mean, variance.sqrt()))
    torch.testing.assert_close(closed, (weight * nats).sum(0))
    assert likelihood.forward(mean).log_prob(e).item() == pytest.approx(
        -0.5 * (log(2 * pi) - 0.3 + 0.49 / torch.tensor(-0.3).exp().item()), rel=1e-6
    )


def test_leave_one_out_residuals_equal_posteriors_without_each_row(start, data) -> None:
    weights = torch.linspace(0.5, 2.5, data.N, dtype=torch.float64)
    data = replace(data, weights=weights)
    residuals = leave_one_out_residuals(start.function, data)
    for row in range(data.N):
        rest = data.part(torch.arange(data.N)[torch.arange(data.N) != row])
        one = data.part(torch.tensor([row]))
        without = start.function.posterior(rest).predict(one.X, observed=True)
        expected = (one.Y - without.mean).abs() / without.variance.sqrt()
        torch.testing.assert_close(residuals.Y[row : row + 1], expected)
    assert residuals.weights is weights


def test_leave_one_out_residuals_show_noise_that_a_flexible_function_follows() -> None:
    g = torch.Generator().manual_seed(0)
    X = torch.linspace(0, 1, 60, dtype=torch.float64)[:, None]
    noisy = X[:, 0] > 0.5
    Y = torch.where(noisy, 1.0, 0.1) * torch.randn(60, generator=g, dtype=torch.float64)
    rows = Dataset.of(X, Y)
    model = model_of(X, X[:0]).with_parts(function=SparseGP(kernel_of(0.4, 0.01), X, noise=0.05))

    def ratio(residuals: Dataset) -> float:
        square = residuals.Y[:, 0].square()
        return (square[noisy].mean() / square[~noisy].mean()).item()

    assert ratio(model.residuals(rows)) < 2
    assert ratio(leave_one_out_residuals(model.function, rows)) > 10


def test_constructor_wrong_parts_raise(start) -> None:
    kernel, Z = ScaleKernel(RBFKernel()), torch.zeros(2, 1, dtype=torch.float64)
    bernoulli = VariationalGP(kernel, Z, likelihood=BernoulliLikelihood())
    with pytest.raises(InputError, match="LogVarianceLikelihood; got Bernoulli"):
        HeteroscedasticGP(start.function, bernoulli)
    no_mean = VariationalGP(kernel, Z, likelihood=LogVarianceLikelihood(), mean=ZeroMean())
    with pytest.raises(InputError, match="ConstantMean"):
        HeteroscedasticGP(start.function, no_mean)
    wide = VariationalGP(kernel, Z.repeat(1, 2), likelihood=LogVarianceLikelihood())
    with pytest.raises(InputError, match="equally many columns; got 1 and 2"):
        HeteroscedasticGP(start.function, wide)
    posterior = start.log_noise.posterior(rows())
    with pytest.raises(InputError, match="GaussianLikelihood; got LogVariance"):
        HeteroscedasticPosterior(posterior, posterior)


def test_check_several_targets_raise(start, data) -> None:
    both = Dataset.of(data.X, data.Y.repeat(1, 2))
    with pytest.raises(InputError, match="one target column; got 2"):
        start.bound(both)
