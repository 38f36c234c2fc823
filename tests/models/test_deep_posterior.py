"""Predictions of deep models: mixtures, quadrature, matched moments, quantiles."""

import pickle

import pytest
import torch
from gpytorch.kernels import LinearKernel
from gpytorch.likelihoods import GaussianLikelihood
from torch import Tensor
from torch.distributions import Normal

from helpers.deep_problems import (
    LIKELIHOODS,
    deep,
    dense_marginals,
    dense_pass,
    hermite,
    integrated_density,
    layer,
    normal,
    rows,
)
from winnowgp.errors import InputError
from winnowgp.models import DeepGP, DeepLayer
from winnowgp.models.likelihoods import observation_model
from winnowgp.models.quadrature import normal_nodes

X = 1.3 * normal(6, 2, seed=40)
battery = pytest.mark.parametrize("seen", LIKELIHOODS)


def line(*, spread: float = 1.0, eps: float = 0.3) -> DeepGP:
    """Two layers, one hidden output."""
    layers = [layer(1, 1, K=3, seed=0, spread=spread), layer(1, 1, K=4, seed=10)]
    model = DeepGP(layers, likelihood=GaussianLikelihood())
    assert isinstance(model.likelihood, GaussianLikelihood)
    model.likelihood.initialize(noise=eps)
    return model


def mixture(model: DeepGP, points: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    """Return dense components `[T N P]` at the documented nodes."""
    widths = [made.P for made in model.layers[:-1]]
    nodes = normal_nodes(samples // 2, sum(widths))
    eps = [each[:, None].expand(-1, len(points), -1) for each in nodes.split(widths, dim=1)]
    return dense_pass(model, points, eps)


@pytest.mark.parametrize("skip_connections", [False, True])
@pytest.mark.parametrize("widths", [(2,), (3, 1)])
def test_deep_posterior_moments_equal_mixture(skip_connections: bool, widths) -> None:
    model = deep(widths=widths, K=(4, 3, 4), skip_connections=skip_connections)
    posterior = model.posterior(samples=32)
    mean, variance = mixture(model, X, 32)
    assert mean.shape == (32, 6, 2)
    parts = posterior.components(X)
    torch.testing.assert_close(parts.mean, mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(parts.variance, variance, rtol=1e-7, atol=1e-8)
    # E f² − (E f)², from raw moments.
    first, second = mean.mean(0), (variance + mean.square()).mean(0)
    found = posterior.predict(X)
    torch.testing.assert_close(found.mean, first, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(found.variance, second - first.square(), rtol=1e-7, atol=1e-7)
    seen = posterior.predict(X, observed=True)
    torch.testing.assert_close(seen.mean, found.mean)
    torch.testing.assert_close(seen.variance, found.variance + 0.15)


@battery
def test_deep_posterior_observations_and_densities_equal_mixture(seen: str) -> None:
    model, Y = deep(seen), rows(seen, N=6).Y
    posterior = model.posterior(samples=16)
    pairs = list(zip(*mixture(model, X, 16), strict=True))
    with torch.no_grad():
        # Components of a mixture use fewer softmax nodes than a single Gaussian.
        observations = observation_model(model.likelihood).for_mixture(len(pairs))
        parts = [observations.predict(m, v) for m, v in pairs]
        nats = torch.stack([observations.log_density(Y, m, v) for m, v in pairs])
    means = torch.stack([part.mean for part in parts])
    squares = torch.stack([part.variance for part in parts]) + means.square()
    found = posterior.predict(X, observed=True)
    torch.testing.assert_close(found.mean, means.mean(0), rtol=1e-7, atol=1e-8)
    expected = squares.mean(0) - means.mean(0).square()
    torch.testing.assert_close(found.variance, expected, rtol=1e-6, atol=1e-7)
    density = posterior.log_density(X, Y)
    assert density.shape == Y.shape
    torch.testing.assert_close(density, nats.exp().mean(0).log(), rtol=1e-7, atol=1e-8)


def test_deep_posterior_density_converges_to_quadrature() -> None:
    model = line()
    points = torch.linspace(-2, 2, 7, dtype=torch.float64)[:, None]
    Y = torch.sin(2 * points)
    exact = integrated_density(model, points, Y)
    torch.testing.assert_close(exact, integrated_density(model, points, Y, 120), atol=1e-6, rtol=0)
    errors = [
        (model.posterior(samples=T).log_density(points, Y) - exact).abs().max().item()
        for T in (8, 64, 4096)
    ]
    assert errors[1] < errors[0] / 2
    assert errors[2] < errors[1] / 10
    assert errors[2] < 1e-3
    # The effect of the hidden variance is much larger than these errors.
    certain = line(spread=1e-6)
    assert (integrated_density(certain, points, Y) - exact).abs().max() > 0.1


def test_deep_posterior_moments_converge_to_quadrature() -> None:
    model = line()
    points = torch.linspace(-2, 2, 7, dtype=torch.float64)[:, None]
    nodes, weights = hermite(150)
    mean, variance = dense_pass(model, points, [nodes[:, None, None].expand(-1, 7, 1)])
    w = weights[:, None, None]
    first = (w * mean).sum(0)
    second = (w * (variance + mean.square())).sum(0)
    found = model.posterior(samples=4096).predict(points)
    torch.testing.assert_close(found.mean, first, atol=1e-3, rtol=0)
    torch.testing.assert_close(found.variance, second - first.square(), atol=2e-3, rtol=0)


def linear_top(skip_connections: bool) -> tuple[DeepGP, Tensor, Tensor]:
    """A linear second layer: mean c + hᵀ a_p, variance a quadratic form of h, by its own algebra.

    Returns the model, the exact means and the exact variances at X.
    """
    H, D = 2, 2 * skip_connections
    first = layer(2, H, K=4)
    kernel = LinearKernel()
    kernel.variance = 0.7
    second = layer(H + D, 2, K=H + D, seed=20, kernel=kernel)
    model = DeepGP(
        [first, second],
        likelihood=GaussianLikelihood(),
        targets=2,
        skip_connections=skip_connections,
    )
    made = model.layers[1]
    mean, variance = dense_marginals(model.layers[0], X)
    seen, spread = mean, variance
    if skip_connections:
        seen, spread = torch.cat([mean, X], 1), torch.cat([variance, torch.zeros_like(X)], 1)
    # As many points as inputs: f_p(x) = xᵀ w_p + c with w_p = Z⁻¹ u_p, exactly.
    with torch.no_grad():
        Z, L = made.candidates, torch.linalg.cholesky(0.7 * made.candidates @ made.candidates.mT)
        W = made.slope + Z.inverse() @ L @ made.q_mean
        F = Z.inverse() @ L @ made.q_factor.tril()
        C = F @ F.mT
        expected = seen @ W + made.level
        # Var f = wᵀ Cov[h] w + E[hᵀ C h]
        doubt = torch.stack([((seen @ c) * seen).sum(1) + spread @ c.diagonal() for c in C], 1)
        total = spread @ W.square() + doubt
    return model, expected, total


@pytest.mark.parametrize("skip_connections", [False, True])
def test_predict_matched_is_exact_for_linear_next_layer(skip_connections: bool) -> None:
    model, mean, variance = linear_top(skip_connections)
    posterior = model.posterior(samples=16)
    for found in (posterior.predict_matched(X), posterior.predict(X)):
        torch.testing.assert_close(found.mean, mean, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found.variance, variance, rtol=1e-6, atol=1e-6)


def test_predict_matched_is_close_for_small_hidden_variance() -> None:
    # One output in the middle, otherwise the inputs of the next layer would be correlated.
    for widths in ((2,), (1, 1)):
        model = deep(widths=widths, K=(4, 3, 4), skip_connections=True)
        with torch.no_grad():
            for made in model.layers[:-1]:
                made.q_factor.mul_(0.2)
                made.kernel.initialize(outputscale=0.02)
        posterior = model.posterior(samples=2048)
        exact, found = posterior.predict(X), posterior.predict_matched(X)
        none = [torch.zeros(1, 6, P).double() for P in widths]
        mean, variance = (each[0] for each in dense_pass(model, X, none))
        # The errors are a small part of the variance that the hidden layer adds.
        for ours, right, without in (
            (found.mean, exact.mean, mean),
            (found.variance, exact.variance, variance),
        ):
            assert (ours - right).abs().max() < 0.1 * (without - right).abs().max()
        seen = posterior.predict_matched(X, observed=True)
        torch.testing.assert_close(seen.mean, found.mean)
        torch.testing.assert_close(seen.variance, found.variance + 0.15)


PROBABILITIES = torch.tensor([0.001, 0.05, 0.3, 0.5, 0.9, 0.9999], dtype=torch.float64)


@pytest.mark.parametrize("observed", [False, True])
def test_quantiles_have_their_probability_below(observed: bool) -> None:
    model = deep()
    posterior = model.posterior(samples=16)
    found = posterior.quantiles(X, PROBABILITIES, observed=observed)
    assert found.shape == (6, 6, 2)
    mean, variance = mixture(model, X, 16)
    sd = (variance + 0.15 * observed).sqrt()
    for p, quantile in zip(PROBABILITIES, found, strict=True):
        below = Normal(mean, sd).cdf(quantile).mean(0)
        torch.testing.assert_close(below, torch.full_like(below, p.item()), rtol=1e-7, atol=1e-7)
    assert (found.diff(dim=0) > 0).all()


def test_quantiles_of_one_component_are_gaussian() -> None:
    model = DeepGP([layer(2, 2)], likelihood=GaussianLikelihood(), targets=2)
    posterior = model.posterior()
    f = posterior.predict(X)
    expected = f.mean + f.variance.sqrt() * torch.special.ndtri(PROBABILITIES)[:, None, None]
    found = posterior.quantiles(X, PROBABILITIES, observed=False)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_quantiles_of_certain_function_are_its_value() -> None:
    """A linear function without an intercept is zero at zero."""
    made = DeepLayer(LinearKernel(), normal(2, 2, seed=0), outputs=1)
    posterior = DeepGP([made], likelihood=GaussianLikelihood()).posterior()
    origin = torch.zeros(1, 2, dtype=torch.float64)
    assert posterior.predict(origin).variance.item() == 0
    found = posterior.quantiles(origin, PROBABILITIES, observed=False)
    torch.testing.assert_close(found, torch.zeros(6, 1, 1).double(), rtol=0, atol=1e-9)


def test_quantiles_with_student_noise_have_their_probability_below() -> None:
    posterior = deep("student").posterior(samples=16)
    found = posterior.quantiles(X, PROBABILITIES)
    latents, observed = posterior.components(X), observation_model(posterior.likelihood)
    pairs = zip(latents.mean, latents.variance, strict=True)
    below = torch.stack([observed.cdf(found, m, v) for m, v in pairs]).mean(0)
    expected = PROBABILITIES[:, None, None].expand_as(below)
    torch.testing.assert_close(below, expected, rtol=0, atol=1e-10)


def test_quantiles_invalid_probabilities_raise() -> None:
    posterior = deep().posterior()
    for bad in ([0.0, 0.5], [0.5, 1.0], [-0.1], [float("nan")]):
        with pytest.raises(InputError, match=r"`probabilities` must lie strictly between 0 and 1"):
            posterior.quantiles(X, torch.tensor(bad, dtype=torch.float64))


def test_deep_posterior_predictions_repeat_and_ignore_other_rows() -> None:
    posterior = deep(skip_connections=True).posterior()
    Y = rows(N=6).Y
    together = posterior.predict(X)
    assert torch.equal(posterior.predict(X).mean, together.mean)
    assert torch.equal(posterior.train().predict(X).mean, posterior.eval().predict(X).mean)
    for method in (
        lambda rows_, _: posterior.predict(rows_).variance,
        lambda rows_, _: posterior.predict_matched(rows_).mean,
        lambda rows_, targets: posterior.log_density(rows_, targets),
        lambda rows_, _: posterior.quantiles(rows_, PROBABILITIES)[2],
    ):
        alone = torch.cat([method(X[i : i + 1], Y[i : i + 1]) for i in range(3)])
        torch.testing.assert_close(method(X[:3], Y[:3]), alone, rtol=1e-9, atol=1e-9)
        assert method(X[:0], Y[:0]).shape == (0, 2)


@pytest.mark.parametrize(("samples", "widths"), [(64, (2,)), (1, (2,)), (7, (1,)), (10, (3, 2))])
def test_deep_posterior_uses_at_least_requested_samples(samples: int, widths) -> None:
    """The number of samples is rounded up; one component would have no spread."""
    model = deep(widths=widths, K=(3, 3, 3))
    parts = model.posterior(samples=samples).components(X)
    assert len(parts.mean) % 2 == 0
    assert len(parts.mean) >= max(samples, 2 * sum(widths))


@pytest.mark.parametrize("skip_connections", [False, True])
def test_deep_posterior_without_samples_propagates_means(skip_connections: bool) -> None:
    model = deep(widths=(3, 2), K=(4, 3, 4), skip_connections=skip_connections)
    posterior = model.posterior(samples=0)
    eps = [X.new_zeros(1, len(X), width) for width in (3, 2)]
    mean, variance = (each[0] for each in dense_pass(model, X, eps))
    for found in (posterior.predict(X), posterior.predict_matched(X)):
        torch.testing.assert_close(found.mean, mean, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(found.variance, variance, rtol=1e-7, atol=1e-8)
    with pytest.raises(InputError, match="zero or more"):
        model.posterior(samples=-1)


def test_deep_posterior_single_precision_agrees() -> None:
    posterior, Y = deep(skip_connections=True).posterior(), rows(N=6).Y
    exact = posterior.predict(X), posterior.log_density(X, Y)
    posterior.to(torch.float32)
    found = posterior.predict(X.float())
    assert found.mean.dtype == torch.float32
    torch.testing.assert_close(found.mean.double(), exact[0].mean, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found.variance.double(), exact[0].variance, rtol=1e-2, atol=1e-3)
    density = posterior.log_density(X.float(), Y.float())
    torch.testing.assert_close(density.double(), exact[1], rtol=1e-2, atol=1e-2)
    matched = posterior.predict_matched(X.float())
    assert matched.variance.dtype == torch.float32
    assert posterior.quantiles(X.float(), PROBABILITIES.float()).dtype == torch.float32


def test_deep_posterior_is_storable_copy_without_gradients() -> None:
    model = deep()
    posterior = model.posterior()
    before = posterior.predict(X).mean
    assert not before.requires_grad
    assert (posterior.M, posterior.P) == ((4, 3), 2)
    with torch.no_grad():
        for made in model.layers:
            made.level.add_(1)
            made.candidates.add_(1)
    assert torch.equal(posterior.predict(X).mean, before)
    again = pickle.loads(pickle.dumps(posterior))
    torch.testing.assert_close(again.predict(X).mean, before, rtol=1e-10, atol=1e-12)
    inputs = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(posterior.predict(inputs).mean.sum(), inputs)
    assert torch.isfinite(gradient).all()
    assert gradient.abs().sum() > 0


def test_deep_posterior_without_points_predicts_prior() -> None:
    model = deep()
    empty = model.prune([torch.zeros(4).bool(), torch.zeros(3).bool()]).posterior()
    assert empty.M == (0, 0)
    found = empty.predict(X)
    # The mean of the mixture of a linear map's images is the image of its mean.
    centre = model.layers[1].centre(model.layers[0].centre(X)).detach()
    torch.testing.assert_close(found.mean, centre, rtol=1e-8, atol=1e-8)
    assert (found.variance > 0.8).all()


def test_deep_posterior_wrong_columns_raise() -> None:
    posterior = deep().posterior()
    for method in (
        posterior.predict,
        posterior.predict_matched,
        lambda x: posterior.log_density(x, rows(N=6).Y),
        lambda x: posterior.quantiles(x, PROBABILITIES),
    ):
        with pytest.raises(
            InputError, match=r"`X` must have 2 columns as in training; got \[6, 3\]"
        ):
            method(torch.zeros(6, 3, dtype=torch.float64))


def test_deep_posterior_layers_equal_model_layers() -> None:
    posterior = deep(widths=(3, 1), K=(4, 3, 2)).posterior()
    assert all(isinstance(made, DeepLayer) for made in posterior.layers)
    assert [made.K for made in posterior.layers] == [4, 3, 2]


def test_normal_nodes_cached_without_gradients_support_them() -> None:
    with torch.inference_mode():
        nodes = normal_nodes(7, 3)
    scale = torch.ones(3, dtype=torch.float64, requires_grad=True)
    (normal_nodes(7, 3) * scale).square().sum().backward()
    assert torch.equal(nodes, normal_nodes(7, 3))
