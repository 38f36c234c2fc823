"""`SparseGPRegressor(log_target=True)`: exact log-normal predictions in the units of `y`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import lognorm

import winnowgp
from winnowgp import SparseGPRegressor
from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.estimators.rows import tensor
from winnowgp.integrations.botorch import SparseGPModel
from winnowgp.integrations.gpytorch import to_gpytorch
from winnowgp.tabular.quality import predictive, regression_quality

RNG = np.random.default_rng(0)
X = np.sort(RNG.uniform(0, 6, (60, 1)), axis=0)
Y = np.exp(7 + np.sin(X[:, 0]) + 0.3 * RNG.normal(size=60))
QUICK: dict[str, Any] = {
    "schedule": "paper",
    "alpha": 0.01,
    "epochs": (60, 10, 10),
    "n_candidates": 8,
    "random_state": 0,
}
NEW, NEW_Y = X[::4] + 0.05, Y[::4] * 1.1


@pytest.fixture(scope="module")
def model() -> SparseGPRegressor:
    return SparseGPRegressor("rbf", log_target=True, **QUICK).fit(X, Y)


@pytest.fixture(scope="module")
def plain() -> SparseGPRegressor:
    """Return the same model, fitted to log y."""
    return SparseGPRegressor("rbf", **QUICK).fit(X, np.log(Y))


def distribution(plain: SparseGPRegressor, *, observed: bool = True) -> Any:
    """The log-normal distribution of SciPy at the new rows."""
    mean, sd = plain.predict(NEW, return_std=True, observed=observed)
    return lognorm(sd, scale=np.exp(mean))


def test_moments_are_those_of_scipy(model: SparseGPRegressor, plain: SparseGPRegressor) -> None:
    for observed in (True, False):
        mean, sd = model.predict(NEW, return_std=True, observed=observed)
        expected = distribution(plain, observed=observed)
        np.testing.assert_allclose(mean, expected.mean(), rtol=1e-9)
        np.testing.assert_allclose(sd, expected.std(), rtol=1e-9)
        np.testing.assert_allclose(model.predict(NEW, observed=observed), mean, rtol=1e-12)


def test_densities_have_the_jacobian(model: SparseGPRegressor, plain: SparseGPRegressor) -> None:
    expected = distribution(plain).logpdf(NEW_Y)
    np.testing.assert_allclose(model.log_density(NEW, NEW_Y), expected, rtol=1e-9)
    # Without 1/y it is the density of log y, 7 nats higher.
    assert plain.log_density(NEW, np.log(NEW_Y)).mean() > expected.mean() + 6


def test_quantiles_and_cdf_are_those_of_scipy(
    model: SparseGPRegressor, plain: SparseGPRegressor
) -> None:
    found, expected = predictive(model, NEW), distribution(plain)
    for p in (0.05, 0.5, 0.975):
        np.testing.assert_allclose(found.quantile(p), expected.ppf(p), rtol=1e-9)
    np.testing.assert_allclose(found.cdf(NEW_Y), expected.cdf(NEW_Y), atol=1e-10)


def test_joint_covariance_and_samples_are_log_normal(
    model: SparseGPRegressor, plain: SparseGPRegressor
) -> None:
    mean, covariance = model.predict(NEW, return_cov=True)
    m, C = plain.predict(NEW, return_cov=True)
    # E[e^{f_i + f_j}] − E[e^{f_i}] E[e^{f_j}]
    level = np.exp(m + 0.5 * np.diag(C))
    np.testing.assert_allclose(mean, level, rtol=1e-9)
    np.testing.assert_allclose(covariance, np.outer(level, level) * np.expm1(C), rtol=1e-7)
    samples = model.sample_y(NEW, 3, random_state=1)
    np.testing.assert_allclose(samples, np.exp(plain.sample_y(NEW, 3, random_state=1)), rtol=1e-9)


def test_quality_compares_with_models_without_logarithm(model: SparseGPRegressor) -> None:
    other = SparseGPRegressor("rbf", **QUICK).fit(X, Y)
    both = [regression_quality(each, X, Y, y_train=Y) for each in (model, other)]
    values = [{m["name"]: m["value"] for m in quality["metrics"]} for quality in both]
    baselines = [{m["name"]: m["baseline"] for m in quality["metrics"]} for quality in both]
    density = "log density per observation"
    assert values[0][density] > values[1][density] + 0.1
    assert baselines[0] == pytest.approx(baselines[1])


def test_saved_model_predicts_the_same(model: SparseGPRegressor, tmp_path: Path) -> None:
    back = winnowgp.load(winnowgp.save(model, tmp_path / "m.winnow"))
    assert back.log_target
    np.testing.assert_allclose(back.predict(NEW), model.predict(NEW), rtol=1e-12)
    found, expected = (each.log_density(NEW, NEW_Y) for each in (back, model))
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_targets_that_are_not_positive_are_refused(model: SparseGPRegressor) -> None:
    y = Y.copy()
    y[3] = 0.0
    with pytest.raises(
        InputError, match=r"`log_target` needs positive targets; got 0 in row 3 \(counted from 0"
    ):
        SparseGPRegressor(log_target=True).fit(X, y)
    with pytest.raises(InputError, match="positive targets; got -1 in row 0"):
        model.log_density(NEW, -np.ones(len(NEW)))


def test_other_likelihoods_and_sources_are_refused() -> None:
    with pytest.raises(InputError, match=r"`log_target` needs Gaussian noise.*mean"):
        SparseGPRegressor(log_target=True, likelihood="student-t").fit(X, Y)
    with pytest.raises(InputError, match="`log_target` must be True or False"):
        SparseGPRegressor().set_params(log_target="yes").fit(X, Y)
    with pytest.raises(InputError, match=r"`log_target` needs arrays"):
        SparseGPRegressor(log_target=True).fit(Dataset.of(tensor(X), tensor(Y)))


def test_conversions_that_assume_gaussian_targets_are_refused(model: SparseGPRegressor) -> None:
    for convert in (to_gpytorch, SparseGPModel.of):
        with pytest.raises(InputError, match=r"`log_target` must be False.*model of log y"):
            convert(model)
