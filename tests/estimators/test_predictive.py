"""Intervals and distribution functions against brute force."""

from typing import Any

import numpy as np
import pytest
from scipy.stats import norm, poisson

from winnowgp import SparseGPRegressor
from winnowgp.errors import InputError
from winnowgp.estimators.quality import CountPredictive, GaussianPredictive, predictive


def test_gaussian_quantiles_invert_the_distribution_function() -> None:
    found = GaussianPredictive(np.array([1.0, -2.0]), np.array([0.5, 3.0]))
    np.testing.assert_allclose(found.cdf(found.quantile(0.2)), 0.2)
    lower, upper = found.interval(0.9)
    np.testing.assert_allclose(
        norm.cdf(upper, [1, -2], [0.5, 3]) - norm.cdf(lower, [1, -2], [0.5, 3]), 0.9
    )


COUNTS = [(3.0, 0.5), (-2.0, 3.0), (0.0, 1.5), (50.0, 40.0), (1e4, 10.0), (1e4, 150.0), (1e4, 4e3)]


def counts(m: float, s: float) -> CountPredictive:
    """Poisson counts of rate softplus(f), with moments on a grid."""
    rate, weight = on_a_grid(m, s)
    mean = weight @ rate
    sd = np.sqrt(weight @ (rate + (rate - mean) ** 2))
    return CountPredictive(*(np.array([v]) for v in (mean, sd, m, s)))


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
    rare = CountPredictive(*(np.array([v]) for v in (1e-9, 1e-5, -20.0, 0.1)))
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
    assert 0.85 <= ((y >= lower) & (y <= upper)).mean() <= 1


def test_invalid_level_or_likelihood_is_refused() -> None:
    with pytest.raises(InputError, match="`level`"):
        GaussianPredictive(np.zeros(1), np.ones(1)).interval(95)
    X = np.linspace(0, 1, 9)[:, None]
    model = SparseGPRegressor(likelihood="laplace", schedule="paper", alpha=1.0, epochs=(1, 1, 1))
    with pytest.raises(InputError, match="'gaussian' or 'poisson'"):
        predictive(model.fit(X, X[:, 0]), X)
