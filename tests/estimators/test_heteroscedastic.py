"""`SparseGPRegressor(likelihood="heteroscedastic")`, alone and as the model of a table."""

from pathlib import Path
from runpy import run_path
from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.kernels import IndexKernel, RBFKernel

import winnowgp
from helpers.short_fits import shortest_fits
from winnowgp import DeepGPRegressor, SparseGPRegressor, fit_table
from winnowgp.cli.summary import summary_json
from winnowgp.errors import InputError
from winnowgp.integrations.botorch import SparseGPModel
from winnowgp.integrations.gpytorch import to_gpytorch
from winnowgp.plots import draw_effects
from winnowgp.report.summary import selection_lines
from winnowgp.tabular import TabularModel
from winnowgp.tabular.export import export_numpy
from winnowgp.tabular.quality import predictive

RNG = np.random.default_rng(2)
X = np.sort(RNG.uniform(0, 10, (60, 1)), axis=0)
SD = 0.2 + 0.3 * X[:, 0]
Y = 40 + 5 * np.sin(X[:, 0] / 2) + SD * RNG.normal(size=60)
SETTINGS: dict[str, Any] = {"likelihood": "heteroscedastic", "kernel": "rbf"}


@pytest.fixture(scope="module")
def table() -> TabularModel:
    with shortest_fits():
        return fit_table(
            {"x": X[:, 0], "y": Y}, "y", test_size=0.1, seed=0, max_points=6, **SETTINGS
        )


@pytest.fixture(scope="module")
def model(table) -> SparseGPRegressor:
    return table.estimator


def test_regressor_finds_noise_that_grows(model) -> None:
    assert 2 <= model.n_inducing_ <= 6
    assert 1 <= model.n_noise_inducing_ <= 6
    assert model.noise_inducing_points_.shape == (model.n_noise_inducing_, 1)
    noise = model.predict_noise(X)
    assert noise[-1] > 4 * noise[0]
    # Half of the true deviations are within two standard errors of eight rows.
    assert 0.75 < np.median(noise / SD) < 1.33
    assert model.evidence_ is None
    assert model.elbo_gap_ >= 0


def test_predictions_add_the_noise_of_the_row(model) -> None:
    mean, sd = model.predict(X, return_std=True)
    latent, latent_sd = model.predict(X, return_std=True, observed=False)
    np.testing.assert_allclose(mean, latent)
    np.testing.assert_allclose(sd**2, latent_sd**2 + model.predict_noise(X) ** 2)
    covariance = model.predict(X[:5], return_cov=True)[1]
    np.testing.assert_allclose(np.diag(covariance), sd[:5] ** 2, rtol=1e-6)
    assert model.sample_y(X[:3], 2).shape == (3, 2)
    assert model.sample_functions(2)(X[:3]).shape == (3, 2)


def test_predictive_distribution_agrees_with_densities_and_intervals(model) -> None:
    observation = predictive(model, X[:6])
    low, high = model.predict_interval(X[:6], 0.9)
    np.testing.assert_allclose(observation.interval(0.9), (low, high))
    np.testing.assert_allclose(observation.cdf(low), 0.05, atol=1e-8)
    step = 1e-4
    slope = (observation.cdf(Y[:6] + step) - observation.cdf(Y[:6] - step)) / (2 * step)
    np.testing.assert_allclose(model.log_density(X[:6], Y[:6]), np.log(slope), atol=1e-5)


def test_saved_model_predicts_the_same(table, model, tmp_path: Path) -> None:
    loaded = winnowgp.load(table.save(tmp_path / "model.winnow"))
    predictions = [
        (m.predict_noise(X), m.log_density(X, Y), m.predict(X)) for m in (loaded.estimator, model)
    ]
    np.testing.assert_allclose(*predictions, rtol=1e-12)
    assert loaded.estimator.n_noise_inducing_ == model.n_noise_inducing_
    assert loaded.estimator.noise_ == model.noise_


def test_summary_and_effects_show_the_noise(table, model) -> None:
    lines = dict(selection_lines(table.summary["choice"]))
    assert f"its logarithm has {model.n_noise_inducing_} inducing" in lines["noise"]
    printed = summary_json(table.summary, file="")
    assert printed["noise_inducing_points"] == model.n_noise_inducing_
    (effect,) = table.summary["effects"]
    lower, upper = effect["curves"][0]["observed"]
    width = np.subtract(upper, lower)
    assert width[-1] > 2 * width[0]
    figure = draw_effects([effect], target="y")
    assert len(figure.axes[0].lines) == 3
    assert table.summary["noise_sd"] is None


def test_other_forms_refuse_noise_that_varies(model, tmp_path: Path) -> None:
    for convert in (to_gpytorch, SparseGPModel.of, lambda m: export_numpy(m, tmp_path / "m.py")):
        with pytest.raises(InputError, match="cannot represent noise that depends on the inputs"):
            convert(model)


def test_other_forms_represent_noise_that_turned_out_constant(tmp_path: Path) -> None:
    calm = np.sin(X[:, 0]) + 0.2 * np.random.default_rng(0).normal(size=60)
    with shortest_fits():
        constant = SparseGPRegressor(**SETTINGS, random_state=0).fit(X, calm)
    assert constant.n_noise_inducing_ == 0
    mean, sd = constant.predict(X, return_std=True)
    exported = run_path(str(export_numpy(constant, tmp_path / "m.py")))["predict"](X)
    np.testing.assert_allclose(exported["mean"], mean, atol=1e-7)
    np.testing.assert_allclose(np.sqrt(exported["variance"]), sd, rtol=1e-6)
    gp, likelihood = to_gpytorch(constant)
    with torch.no_grad():
        found = likelihood(gp(torch.tensor(X))).variance.sqrt()
        botorch = SparseGPModel.of(constant).posterior(torch.tensor(X), observation_noise=True)
    np.testing.assert_allclose(found.numpy(), sd, rtol=1e-5)
    np.testing.assert_allclose(botorch.variance[:, 0].sqrt().numpy(), sd, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "paper", "alpha": 1.0}, "`schedule` must be 'fast'"),
        ({"warm_start": True}, "`warm_start` must be False"),
        ({"max_predict_us": 3.0}, "set `max_points` instead"),
        ({"log_target": True}, "`log_target` needs Gaussian noise"),
        ({"noise_kernel": "rbg"}, "`noise_kernel` cannot contain 'rbg'.*the kernels are rbf"),
        ({"noise_kernel": "rbf["}, "`noise_kernel` must be an expression"),
        ({"noise_kernel": 3}, "`noise_kernel` must be one of rbf"),
        ({"noise_kernel": IndexKernel(num_tasks=2)}, "`noise_kernel` cannot contain"),
        ({"noise_kernel": RBFKernel(ard_num_dims=3)}, "`noise_kernel` cannot be evaluated on 1"),
    ],
)
def test_settings_that_need_constant_noise_raise(settings, message) -> None:
    with pytest.raises(InputError, match=message):
        SparseGPRegressor(likelihood="heteroscedastic", **settings).fit(X, Y)


def test_several_targets_and_other_models_raise() -> None:
    with pytest.raises(InputError, match="one target column; got 2"):
        SparseGPRegressor(likelihood="heteroscedastic").fit(X, np.c_[Y, Y])
    with pytest.raises(InputError, match="must be one of gaussian, student-t"):
        DeepGPRegressor(likelihood="heteroscedastic").fit(X, Y)
    with pytest.raises(InputError, match="must be one of gaussian, heteroscedastic, student-t"):
        SparseGPRegressor(likelihood="normal").fit(X, Y)


def test_attributes_and_noise_of_other_likelihoods(model) -> None:
    plain = SparseGPRegressor("rbf", inducing_points=X[::20], random_state=0, hyper="point")
    with shortest_fits():
        plain.fit(X[::4], Y[::4])
    np.testing.assert_allclose(plain.predict_noise(X[:3]), np.sqrt(plain.noise_[0]))
    assert not hasattr(plain, "n_noise_inducing_")
    with pytest.raises(AttributeError, match="likelihood='heteroscedastic'` only"):
        _ = plain.noise_inducing_points_
