"""Quantiles and intervals of regressors against their own densities."""

from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

from winnowgp import DeepGPRegressor, SparseGPRegressor
from winnowgp.errors import InputError

# With so few steps the paper's schedule selects no points.
pytestmark = pytest.mark.filterwarnings("ignore::winnowgp.errors.NoInducingPointsWarning")

rng = np.random.default_rng(0)
X = rng.uniform(0, 6, (30, 1))
WAVE = 100 + 20 * np.sin(X[:, 0]) + 5 * rng.normal(size=30)
COUNTS = rng.poisson(3 + 2 * np.sin(X[:, 0])).astype(float)
NEW = np.array([[1.0], [4.0], [9.0]])
P = [0.05, 0.3, 0.5, 0.99]
BRIEF: dict[str, Any] = {"schedule": "paper", "alpha": 0.1, "n_candidates": 5, "random_state": 0}


def brief(likelihood: str) -> SparseGPRegressor:
    return SparseGPRegressor("rbf", **BRIEF, epochs=(30, 2, 2), likelihood=likelihood)


def test_gaussian_quantiles_are_those_of_the_prediction() -> None:
    model = brief("gaussian").fit(X, WAVE)
    for observed in (True, False):
        mean, sd = model.predict(NEW, return_std=True, observed=observed)
        expected = norm.ppf(np.array(P)[:, None], mean, sd)
        found = model.predict_quantiles(NEW, P, observed=observed)
        np.testing.assert_allclose(found, expected, rtol=1e-9)
        lower, upper = model.predict_interval(NEW, 0.9, observed=observed)
        np.testing.assert_allclose([lower, upper], norm.ppf([[0.05], [0.95]], mean, sd), rtol=1e-9)


@pytest.mark.parametrize("likelihood", ["student-t", "laplace"])
def test_quantiles_with_robust_noise_invert_the_density(likelihood: str) -> None:
    """The log density, integrated over y on a fine grid up to a quantile, gives its probability."""
    model = brief(likelihood).fit(X, WAVE)
    quantiles = model.predict_quantiles(NEW, P)
    grid = np.linspace(-600, 600, 6001)
    for row, x in enumerate(NEW):
        density = np.exp(model.log_density(np.repeat(x[None], len(grid), 0), grid))
        below = (np.cumsum(density) - density / 2) * (grid[1] - grid[0])
        np.testing.assert_allclose(np.interp(quantiles[:, row], grid, below), P, atol=2e-3)


def test_quantiles_of_counts_are_the_least_with_the_probability() -> None:
    model = brief("poisson").fit(X, COUNTS)
    counts = np.arange(200.0)
    lower, upper = model.predict_interval(NEW, 0.5)
    for row, x in enumerate(NEW):
        mass = np.exp(model.log_density(np.repeat(x[None], 200, 0), counts)).cumsum()
        expected = [int((mass >= p).argmax()) for p in P]
        assert model.predict_quantiles(x[None], P)[:, 0].tolist() == expected
        ends = [int((mass >= p).argmax()) for p in (0.25, 0.75)]
        assert [lower[row], upper[row]] == ends


def test_quantiles_of_several_targets_have_an_axis_for_them() -> None:
    Y = np.c_[WAVE, -WAVE]
    model = brief("gaussian").fit(X, Y)
    quantiles = model.predict_quantiles(NEW, P)
    assert quantiles.shape == (4, 3, 2)
    # The second target is the first one mirrored.
    np.testing.assert_allclose(
        quantiles[:, :, 1], -model.predict_quantiles(NEW, 1 - np.array(P))[:, :, 0]
    )


def test_interval_of_a_deep_regressor_is_between_its_quantiles() -> None:
    epochs = (0, 10, 2, 2)
    model = DeepGPRegressor(**BRIEF, epochs=epochs, predict_samples=8).fit(X, WAVE)
    lower, upper = model.predict_interval(NEW, 0.8)
    np.testing.assert_array_equal([lower, upper], model.predict_quantiles(NEW, [0.1, 0.9]))
    inner = model.predict_interval(NEW, 0.8, observed=False)
    assert (lower < inner[0]).all()
    assert (inner[1] < upper).all()


@pytest.mark.parametrize("level", [0, 1, -0.5, 95, "0.9", True, float("nan")])
def test_interval_of_another_level_is_refused(level: Any) -> None:
    model = brief("gaussian").fit(X, WAVE)
    with pytest.raises(InputError, match="`level` must be a probability"):
        model.predict_interval(NEW, level)


@pytest.mark.parametrize("probabilities", [0, [0.5, 1.0], [], "half"])
def test_wrong_probabilities_are_refused(probabilities: Any) -> None:
    model = brief("gaussian").fit(X, WAVE)
    with pytest.raises(InputError, match="`probabilities` must"):
        model.predict_quantiles(NEW, probabilities)
