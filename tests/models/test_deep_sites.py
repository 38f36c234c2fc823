"""Sites of deep layers against dense algebra and finite differences."""

from collections.abc import Callable

import pytest
import torch
from gpytorch.likelihoods import GaussianLikelihood
from linear_operator import to_dense
from torch import Tensor

from helpers import oracles
from helpers.deep_problems import deep, dense_marginals, dense_q, normal, rows
from winnowgp.data import Dataset
from winnowgp.gradients import all_masks
from winnowgp.models import DeepGP, DeepLayer
from winnowgp.models.deep_sites import LayerSites, deep_sites
from winnowgp.models.likelihoods import observation_model


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def setting(
    seen: str = "gaussian",
    *,
    widths: tuple[int, ...] = (2,),
    skip_connections: bool = True,
    N: int = 6,
) -> tuple[DeepGP, Dataset, list[Tensor]]:
    model = deep(seen, widths=widths, K=(4, 3, 4), skip_connections=skip_connections)
    return model, rows(seen, N=N), model.base_samples(N, 3, seeded())


def noise_of(model: DeepGP) -> Tensor:
    assert isinstance(model.likelihood, GaussianLikelihood)
    return model.likelihood.noise.detach()


def shifted_pass(
    model: DeepGP, X: Tensor, eps: list[Tensor], number: int, shift: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a dense pass with a shift `[T N P]` added to the means of one layer's outputs."""
    means, variances = [], []
    for t in range(len(eps[0])):
        mean, variance = dense_marginals(model.layers[0], X)
        for index, made in enumerate(model.layers):
            if index:
                hidden = mean + variance.sqrt() * eps[index - 1][t]
                inputs = torch.cat([hidden, X], 1) if model.skip_connections else hidden
                mean, variance = dense_marginals(made, inputs)
            if index == number:
                mean = mean + shift[t % len(shift)]
        means.append(mean)
        variances.append(variance)
    return torch.stack(means), torch.stack(variances)


def shifted_fit(
    model: DeepGP, data: Dataset, eps: list[Tensor], number: int, shift: Tensor
) -> Tensor:
    mean, variance = shifted_pass(model, data.X, eps, number, shift)
    with torch.no_grad():
        nats = observation_model(model.likelihood).expected_log_prob(data.Y, mean, variance)
    return nats.sum((-2, -1)).mean()


def differences(function: Callable[[Tensor], Tensor], like: Tensor, step: float) -> Tensor:
    """∂function/∂shift for each entry of the shift, by central differences: `[*like *value]`."""
    slopes = []
    for place in range(like.numel()):
        unit = torch.zeros(like.numel(), dtype=like.dtype)
        unit[place] = step
        unit = unit.reshape(like.shape)
        slopes.append((function(unit) - function(-unit)) / (2 * step))
    return torch.stack(slopes).reshape(*like.shape, *slopes[0].shape)


def centred_means(layer: DeepLayer, sites: LayerSites) -> Tensor:
    """μ less the prior mean, at the rows of the sites."""
    mean, _ = dense_marginals(layer, sites.inputs)
    return mean - layer.centre(sites.inputs).detach()


SETTINGS = {
    "two layers": {},
    "three layers": {"widths": (2, 3)},
    "no skip connections": {"skip_connections": False},
    "classes": {"seen": "softmax"},
    "labels": {"seen": "bernoulli"},
}
settings = pytest.mark.parametrize("given", SETTINGS.values(), ids=SETTINGS.keys())


@settings
def test_deep_sites_linear_terms_are_gradients_in_means(given) -> None:
    model, data, eps = setting(**given, N=4)
    found = deep_sites(model, data, eps=eps)
    assert len(found) == len(model.layers)
    for number, (layer, each) in enumerate(zip(model.layers, found, strict=True)):
        # The first layer sees no samples: one row for all of them.
        T = 3 if number else 1
        like = torch.zeros(T, data.N, layer.P, dtype=torch.float64)

        def fit(shift: Tensor, number: int = number) -> Tensor:
            return shifted_fit(model, data, eps, number, shift)

        slope = differences(fit, like, 1e-5).flatten(0, 1)
        sites = each.sites
        ours = sites.linear - sites.precision * centred_means(layer, each)
        torch.testing.assert_close(ours, slope, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("given", [SETTINGS["two layers"], SETTINGS["three layers"]])
def test_deep_sites_hidden_precisions_are_gauss_newton(given) -> None:
    model, data, eps = setting(**given, N=3)
    found = deep_sites(model, data, eps=eps)
    # Precisions of the likelihood, divided among three samples.
    top = 1 / (3 * noise_of(model))
    torch.testing.assert_close(
        found[-1].sites.precision, top.expand_as(found[-1].sites.precision), rtol=1e-9, atol=0
    )
    for number, layer in enumerate(model.layers[:-1]):
        T = 3 if number else 1
        like = torch.zeros(T, data.N, layer.P, dtype=torch.float64)

        def means(shift: Tensor, number: int = number) -> Tensor:
            return shifted_pass(model, data.X, eps, number, shift)[0]

        # [T N P, T N O]: rows and samples are independent, so that sums over them are exact.
        J = differences(means, like, 1e-5)
        precision = (J.square() * top).sum((-3, -2, -1)).flatten(0, 1)
        torch.testing.assert_close(found[number].sites.precision, precision, rtol=1e-5, atol=1e-8)


def test_deep_sites_precisions_sum_squares_over_samples() -> None:
    """An implementation that differentiates the average mean has other precisions."""
    model, data, eps = setting(N=3)
    like = torch.zeros(1, 3, 2, dtype=torch.float64)
    J = differences(lambda shift: shifted_pass(model, data.X, eps, 0, shift)[0].mean(0), like, 1e-5)
    wrong = (J.square() / noise_of(model)).sum((-2, -1))[0]
    right = deep_sites(model, data, eps=eps)[0].sites.precision
    assert (wrong - right).abs().max() > 0.02 * right.max()


def test_deep_sites_last_layer_has_likelihood_curvature() -> None:
    model, data, eps = setting("bernoulli")
    last = deep_sites(model, data, eps=eps)[-1]
    mean, variance = shifted_pass(model, data.X, eps, -1, torch.zeros(1).double())
    with torch.no_grad():
        up, down = (
            observation_model(model.likelihood).expected_log_prob(data.Y, mean, variance + step)
            for step in (1e-5, -1e-5)
        )
    precision = -2 * (up - down) / 2e-5 / 3
    assert (precision > 0).all()
    torch.testing.assert_close(last.sites.precision, precision.flatten(0, 1), rtol=1e-4, atol=1e-7)


@settings
def test_deep_sites_gradient_in_means_equals_sites(given) -> None:
    """∂bound/∂m = V (λ − w ∘ μ) − m, for m moves means and no variances."""
    model, data, eps = setting(**given)
    bound = model.evaluated(data, eps=eps).bound
    found = deep_sites(model, data, eps=eps)
    for layer, each in zip(model.layers, found, strict=True):
        (gradient,) = torch.autograd.grad(bound, layer.q_mean, retain_graph=True)
        with torch.no_grad():
            L = torch.linalg.cholesky(to_dense(layer.kernel(layer.candidates)))
            V = L.inverse() @ to_dense(layer.kernel(layer.candidates, each.inputs))
            residual = each.sites.linear - each.sites.precision * centred_means(layer, each)
            expected = V @ residual - layer.q_mean
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-7)


def test_deep_sites_minibatch_is_scaled_to_all_rows() -> None:
    model, data, eps = setting()
    found = deep_sites(model, data, eps=eps)
    more = deep_sites(model, data, total=30, eps=eps)
    for one, five in zip(found, more, strict=True):
        torch.testing.assert_close(5 * one.sites.precision, five.sites.precision)
        torch.testing.assert_close(5 * one.sites.linear, five.sites.linear)


def regression(
    model: DeepGP, data: Dataset, found: LayerSites, keep: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The last layer given its inputs: K_uu, K_uf, K_ff, targets, and noise T σ² per row."""
    last = model.layers[-1]
    keep = torch.ones(last.K, dtype=torch.bool) if keep is None else keep
    with torch.no_grad():
        Z, R = last.candidates[keep], found.inputs
        T = len(R) // data.N
        blocks = (to_dense(last.kernel(Z)), to_dense(last.kernel(Z, R)), to_dense(last.kernel(R)))
        return *blocks, data.Y.repeat(T, 1) - last.centre(R), T * noise_of(model)


@pytest.mark.parametrize("widths", [(2,), (2, 3)])
def test_natural_step_at_rate_one_is_collapsed_optimum(widths) -> None:
    model, data, eps = setting(widths=widths)
    found = deep_sites(model, data, eps=eps)[-1]
    better = found.improved(model.layers[-1])
    Kuu, Kuf, Kff, Y, s2 = regression(model, data, found)
    inverse = (Kuu + Kuf @ Kuf.mT / s2).inverse()
    m, S, _ = dense_q(better)
    torch.testing.assert_close(m, Kuu @ inverse @ Kuf @ Y / s2, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(S, (Kuu @ inverse @ Kuu).expand(2, -1, -1), rtol=1e-7, atol=1e-8)
    improved = model.with_layers([*model.layers[:-1], better])
    after = improved.evaluated(data, eps=eps).bound
    # Σ_t (1/T) log N(y | f, σ²) is Σ_t log N(y | f, T σ²) but for their constants.
    T, R = len(eps[0]), len(Y) * Y.shape[1]
    constants = 0.5 * R * ((2 * torch.pi * s2).log() - (2 * torch.pi * s2 / T).log() / T)
    hidden = torch.stack([layer.points().kl() for layer in model.layers[:-1]]).sum().detach()
    expected = oracles.collapsed(Kuu, Kuf, Kff, Y, s2) + constants.squeeze() - hidden
    torch.testing.assert_close(after.detach(), expected, rtol=1e-8, atol=1e-8)


def test_natural_step_last_layer_has_maximal_bound() -> None:
    model, data, eps = setting()
    better = deep_sites(model, data, eps=eps)[-1].improved(model.layers[-1])
    improved = model.with_layers([*model.layers[:-1], better])
    best = improved.evaluated(data, eps=eps).bound
    assert best > model.evaluated(data, eps=eps).bound + 1
    last = improved.layers[-1]
    slopes = torch.autograd.grad(best, [last.q_mean, last.q_factor])
    assert max(slope.abs().max().item() for slope in slopes) < 1e-7
    for seed in range(10):
        q = (
            last.q_mean + 0.05 * normal(*last.q_mean.shape, seed=seed),
            last.q_factor + 0.05 * normal(*last.q_factor.shape, seed=seed + 50),
        )
        moved = last.with_q(last.candidates, *q)
        other = model.with_layers([*model.layers[:-1], moved])
        assert other.evaluated(data, eps=eps).bound < best
    # A second step changes nothing.
    again = deep_sites(improved, data, eps=eps)[-1].improved(last, rate=0.5)
    torch.testing.assert_close(dense_q(again)[0], dense_q(last)[0], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("number", [0, 1])
def test_natural_step_partial_averages_natural_parameters(number: int) -> None:
    model, data, eps = setting()
    layer = model.layers[number]
    found = deep_sites(model, data, eps=eps)[number]
    (m0, S0, _), (m1, S1, _) = dense_q(layer), dense_q(found.improved(layer))
    mean, S, _ = dense_q(found.improved(layer, rate=0.3))
    precision = 0.7 * S0.inverse() + 0.3 * S1.inverse()
    torch.testing.assert_close(S, precision.inverse(), rtol=1e-6, atol=1e-8)
    for p in range(layer.P):
        linear = 0.7 * S0[p].inverse() @ m0[:, p] + 0.3 * S1[p].inverse() @ m1[:, p]
        torch.testing.assert_close(mean[:, p], S[p] @ linear, rtol=1e-6, atol=1e-7)


@settings
def test_natural_step_short_step_raises_bound(given) -> None:
    model, data, eps = setting(**given)
    before = model.evaluated(data, eps=eps).bound
    for number, found in enumerate(deep_sites(model, data, eps=eps)):
        layers = list(model.layers)
        layers[number] = found.improved(layers[number], rate=0.01)
        assert model.with_layers(layers).evaluated(data, eps=eps).bound > before


def test_natural_step_result_is_triangular_and_keeps_rest() -> None:
    model, data, eps = setting()
    layer = model.layers[0]
    layer.candidates.requires_grad_(False)
    for rate in (0.5, 1.0):
        better = deep_sites(model, data, eps=eps)[0].improved(layer, rate=rate)
        assert torch.equal(better.q_factor.tril(), better.q_factor)
        assert torch.equal(better.candidates, layer.candidates)
        assert torch.equal(better.level, layer.level)
        assert not better.candidates.requires_grad
        assert not torch.equal(better.q_mean, layer.q_mean)


def test_layer_statistics_last_layer_are_collapsed_bounds() -> None:
    model, data, eps = setting(N=8)
    found = deep_sites(model, data, eps=eps)[-1]
    last, masks = model.layers[-1], all_masks(3)
    statistics = found.statistics(last, bound=-12.5, N=8)
    assert (statistics.K, statistics.N) == (3, 8)
    values = statistics.value(masks)
    assert values[-1].item() == pytest.approx(-12.5)
    exact = torch.stack([oracles.collapsed(*regression(model, data, found, m)) for m in masks])
    torch.testing.assert_close(values + 12.5, exact - exact[-1], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(
    ("seen", "number"), [("gaussian", 0), ("bernoulli", 0), ("bernoulli", 1), ("softmax", 1)]
)
def test_layer_statistics_equal_evidence_of_sites(seen: str, number: int) -> None:
    """Statistics equal those of regression on λ/w with noise 1/w, for each function."""
    model, data, eps = setting(seen)
    found = deep_sites(model, data, eps=eps)[number]
    layer = model.layers[number]
    masks = all_masks(layer.K)
    values = found.statistics(layer, bound=3.0, N=data.N).value(masks)

    def evidence(keep: Tensor) -> Tensor:
        with torch.no_grad():
            Z, R = layer.candidates[keep], found.inputs
            blocks = [to_dense(layer.kernel(*pair)) for pair in ((Z, Z), (Z, R), (R, R))]
        w, linear = found.sites.precision, found.sites.linear
        return torch.stack(
            [
                oracles.collapsed(
                    blocks[0], blocks[1], blocks[2], (linear / w)[:, p : p + 1], 1 / w[:, p]
                )
                for p in range(layer.P)
            ]
        ).sum()

    assert (found.sites.precision > 1e-6).all()
    exact = torch.stack([evidence(keep) for keep in masks[1:]])
    torch.testing.assert_close(values[1:] - 3.0, exact - exact[-1], rtol=1e-6, atol=1e-6)
    # Marginal gains are available too.
    marginal_gains = found.statistics(layer, bound=3.0, N=data.N).marginal_gains(masks[-1])
    without = ~torch.eye(layer.K, dtype=torch.bool)
    codes = (without * 2 ** torch.arange(layer.K)).sum(1)
    torch.testing.assert_close(marginal_gains, values[-1] - values[codes], rtol=1e-6, atol=1e-6)


def test_deep_sites_one_layer_equals_shallow_sites() -> None:
    model = deep(widths=(), K=(5,))
    data = rows()
    (found,) = deep_sites(model, data, eps=[])
    assert torch.equal(found.inputs, data.X)
    with torch.no_grad():
        Y = data.Y - model.layers[0].centre(data.X)
    torch.testing.assert_close(found.sites.linear, Y / noise_of(model), rtol=1e-9, atol=1e-9)


def test_deep_sites_frozen_layers_have_same_sites() -> None:
    model, data, eps = setting()
    before = deep_sites(model, data, eps=eps)
    model.layers[0].requires_grad_(False)
    after = deep_sites(model, data, eps=eps)
    for ours, theirs in zip(after, before, strict=True):
        assert torch.equal(ours.sites.linear, theirs.sites.linear)
        assert torch.equal(ours.sites.precision, theirs.sites.precision)
