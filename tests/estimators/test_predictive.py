"""Intervals and distribution functions against brute force."""

from typing import Any

import numpy as np
import pytest
from scipy.stats import nbinom, norm

from winnowgp import SparseGPRegressor
from winnowgp.errors import InputError
from winnowgp.estimators.predictive import CountPredictive, GaussianPredictive, predictive


def test_gaussian_quantiles_invert_the_distribution_function() -> None:
    found = GaussianPredictive(np.array([1.0, -2.0]), np.array([0.5, 3.0]))
    np.testing.assert_allclose(found.cdf(found.quantile(0.2)), 0.2)
    lower, upper = found.interval(0.9)
    np.testing.assert_allclose(
        norm.cdf(upper, [1, -2], [0.5, 3]) - norm.cdf(lower, [1, -2], [0.5, 3]), 0.9
    )


def gamma_mixture(shape: float, scale: float, T: int = 4000) -> CountPredictive:
    """Poisson rates from a gamma distribution: a negative binomial."""
    from scipy.stats import gamma

    p = (np.arange(T) + 0.5) / T
    rates = gamma.ppf(p, shape, scale=scale)[:, None]
    mean = np.array([shape * scale])
    return CountPredictive(mean, np.sqrt(mean * (1 + scale)), rates, np.full(T, 1 / T))


@pytest.mark.parametrize(("shape", "scale"), [(2.0, 3.0), (0.5, 20.0), (50.0, 4.0)])
def test_counts_have_the_quantiles_of_their_mixture(shape: float, scale: float) -> None:
    exact: Any = nbinom(shape, 1 / (1 + scale))
    found = gamma_mixture(shape, scale)
    for p in (0.025, 0.3, 0.5, 0.9, 0.975):
        assert abs(found.quantile(p)[0] - exact.ppf(p)) <= 1
    y = np.array([3.0])
    middle = exact.cdf(3) - 0.5 * exact.pmf(3)
    np.testing.assert_allclose(found.cdf(y), [middle], atol=2e-3)


def test_a_quantile_is_the_least_whole_number_that_is_enough() -> None:
    found = gamma_mixture(2.0, 3.0)
    q = found.quantile(0.5)
    assert found._below(q)[0] >= 0.5 > found._below(q - 1)[0]
    rare = CountPredictive(np.array([1e-9]), np.array([1e-5]), np.full((1, 1), 1e-9), np.ones(1))
    assert rare.quantile(0.5)[0] == 0


def test_a_regressor_of_counts_covers_what_it_says() -> None:
    rng = np.random.default_rng(0)
    X = rng.uniform(0, 5, (150, 1))
    y = rng.poisson(np.exp(1 + np.sin(X[:, 0]))).astype(float)
    quick = {"schedule": "paper", "alpha": 0.01, "epochs": (60, 10, 10), "n_candidates": 10}
    model = SparseGPRegressor(likelihood="poisson", random_state=0, **quick).fit(X, y)  # type: ignore
    found = predictive(model, X)
    lower, upper = found.interval(0.9)
    assert 0.85 <= ((y >= lower) & (y <= upper)).mean() <= 1
    # The mixture's own moments are those that the regressor reports.
    rates = found.rates  # type: ignore
    np.testing.assert_allclose(found.weights @ rates, found.mean, rtol=1e-6)  # type: ignore


def test_levels_and_likelihoods_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InputError, match="`level`"):
        GaussianPredictive(np.zeros(1), np.ones(1)).interval(95)
    X = np.linspace(0, 1, 9)[:, None]
    model = SparseGPRegressor(likelihood="laplace", schedule="paper", alpha=1.0, epochs=(1, 1, 1))
    with pytest.raises(InputError, match="'gaussian' or 'poisson'"):
        predictive(model.fit(X, X[:, 0]), X)
