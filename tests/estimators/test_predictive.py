"""Intervals and distribution functions against brute force."""

from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.likelihoods import GaussianLikelihood, Likelihood, PoissonLikelihood
from scipy.stats import norm, poisson

from helpers.observation_problems import built
from winnowgp import SparseGPRegressor
from winnowgp.data import Standardiser
from winnowgp.errors import InputError
from winnowgp.estimators.rows import TargetScaler
from winnowgp.models.likelihoods import observation_model
from winnowgp.models.observations import Prediction
from winnowgp.tabular.quality import Predictive, predictive


def distribution(likelihood: Likelihood, mean: list[float], sd: list[float]) -> Predictive:
    """The predictive distribution of rows with these latents, in standardised units."""
    f = Prediction(torch.tensor(mean).double()[:, None], torch.tensor(sd).double()[:, None] ** 2)
    y = observation_model(likelihood).predict(f.mean, f.variance)
    scaler = TargetScaler(Standardiser.none(f.mean), single=True)
    alone = torch.ones(1).double()
    return Predictive(*scaler.moments(y.mean, y.variance), ((f, likelihood),), alone, scaler)


def test_gaussian_quantiles_invert_the_distribution_function() -> None:
    noiseless = built(GaussianLikelihood(), noise=1e-4)
    found = distribution(noiseless, [1.0, -2.0], np.sqrt([0.25 - 1e-4, 9 - 1e-4]).tolist())
    np.testing.assert_allclose(found.cdf(found.quantile(0.2)), 0.2)
    lower, upper = found.interval(0.9)
    np.testing.assert_allclose(
        norm.cdf(upper, [1, -2], [0.5, 3]) - norm.cdf(lower, [1, -2], [0.5, 3]), 0.9, rtol=1e-6
    )


COUNTS = [(3.0, 0.5), (-2.0, 3.0), (0.0, 1.5), (50.0, 40.0), (1e4, 10.0), (1e4, 150.0), (1e4, 4e3)]


def counts(m: float, s: float) -> Predictive:
    """Poisson counts of rate softplus(f)."""
    return distribution(built(PoissonLikelihood()), [m], [s])


def on_a_grid(m: float, s: float) -> tuple[np.ndarray, np.ndarray]:
    """Rates of 40,001 latents nine deviations each way, and their weights."""
    z = np.linspace(-9, 9, 40_001)
    weight = np.exp(-0.5 * z**2)
    return np.logaddexp(0, m + s * z), weight / weight.sum()


@pytest.mark.parametrize(("m", "s"), COUNTS)
def test_count_cdf_matches_a_fine_grid(m: float, s: float) -> None:
    found, (rate, weight) = counts(m, s), on_a_grid(m, s)
    for y in np.unique(np.floor(found.mean + found.sd * np.linspace(-3, 4, 29)).clip(0)):
        middle = weight @ (poisson.cdf(y, rate) - 0.5 * poisson.pmf(y, rate))
        assert found.cdf(np.array([y]))[0] == pytest.approx(middle, abs=1e-7)


@pytest.mark.parametrize(("m", "s"), COUNTS)
def test_count_quantile_is_the_least_sufficient_integer(m: float, s: float) -> None:
    """Close probabilities have close quantiles: no staircase however wide f is."""
    found, (rate, weight) = counts(m, s), on_a_grid(m, s)
    for p in (0.025, 0.3, 0.5, 0.51, 0.52, 0.53, 0.9, 0.975):
        q = found.quantile(p)[0]
        assert weight @ poisson.cdf(q, rate) >= p - 1e-7
        assert q == 0 or weight @ poisson.cdf(q - 1, rate) < p + 1e-7


def test_rare_counts_are_zero() -> None:
    rare = counts(-20.0, 0.1)
    assert rare.quantile(0.5)[0] == 0
    assert rare.cdf(np.array([0.0]))[0] == pytest.approx(0.5, abs=1e-8)


def test_count_intervals_have_nominal_coverage() -> None:
    rng = np.random.default_rng(0)
    X = rng.uniform(0, 5, (150, 1))
    y = rng.poisson(np.exp(1 + np.sin(X[:, 0]))).astype(float)
    quick: dict[str, Any] = {
        "schedule": "paper",
        "alpha": 0.01,
        "epochs": (60, 10, 10),
        "n_candidates": 10,
    }
    model = SparseGPRegressor(likelihood="poisson", random_state=0, **quick).fit(X, y)
    found = predictive(model, X)
    lower, upper = found.interval(0.9)
    covered = ((y >= lower) & (y <= upper)).mean()
    assert 0.85 <= covered <= 1
    assert found.coverage(y, [0.9]) == [covered]


@pytest.mark.parametrize("likelihood", ["student-t", "laplace", "negative-binomial", "beta"])
def test_intervals_of_every_likelihood_cover_and_agree(likelihood: str) -> None:
    rng = np.random.default_rng(0)
    X = rng.uniform(0, 5, (80, 1))
    y = np.sin(X[:, 0]) + 0.3 * rng.standard_t(4, 80)
    if likelihood == "negative-binomial":
        y = rng.poisson(np.exp(1 + np.sin(X[:, 0])) * rng.gamma(2, 0.5, 80)).astype(float)
    if likelihood == "beta":
        y = rng.beta(3, 2 + np.sin(X[:, 0]), 80)
    model = SparseGPRegressor(
        "rbf",
        likelihood=likelihood,
        schedule="paper",
        alpha=0.01,
        epochs=(60, 10, 10),
        n_candidates=10,
        random_state=0,
    ).fit(X, y)
    found = predictive(model, X)
    lower, upper = found.interval(0.9)
    covered = ((y >= lower) & (y <= upper)).mean()
    assert 0.8 <= covered <= 1
    assert found.coverage(y, [0.9]) == [covered]
    mean, sd = model.predict(X, return_std=True)
    np.testing.assert_allclose(found.mean, mean)
    np.testing.assert_allclose(found.sd, sd)


def test_invalid_level_and_several_targets_are_refused() -> None:
    with pytest.raises(InputError, match="`level`"):
        counts(0.0, 1.0).interval(95)
    X = np.linspace(0, 1, 9)[:, None]
    model = SparseGPRegressor(schedule="paper", alpha=1.0, epochs=(1, 1, 1), random_state=0)
    with pytest.raises(InputError, match="one target"):
        predictive(model.fit(X, np.hstack([X, X])), X)
