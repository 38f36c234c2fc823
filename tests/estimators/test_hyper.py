"""`SparseGPRegressor(hyper="laplace" | "auto")`, alone and as the model of a table."""

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

import winnowgp
from helpers.short_fits import short_fits, shortest_fits
from winnowgp import SparseGPRegressor, fit_table
from winnowgp.cli.summary import summary_json
from winnowgp.errors import InputError
from winnowgp.integrations.botorch import SparseGPModel
from winnowgp.integrations.gpytorch import to_gpytorch
from winnowgp.models import MixturePosterior, Posterior
from winnowgp.models.observations import target_noise
from winnowgp.report.summary import selection_lines
from winnowgp.tabular import TabularModel
from winnowgp.tabular.export import export_numpy, export_onnx
from winnowgp.tabular.quality import predictive
from winnowgp.training import laplace

RNG = np.random.default_rng(0)
X = RNG.uniform(0, 6, (40, 2))
Y = 20 + 3 * np.sin(X[:, 0]) + RNG.normal(size=40)
SETTINGS: dict[str, Any] = {"hyper": "laplace", "kernel": "rbf"}


@pytest.fixture(scope="module", autouse=True)
def _few_members() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(laplace, "MEMBERS", 4)
        patch.setattr(laplace, "_DRAWS", 32)
        yield


@pytest.fixture(scope="module")
def table() -> TabularModel:
    with short_fits(sizes=1):
        columns = {"a": X[:, 0], "b": X[:, 1], "y": Y}
        return fit_table(columns, "y", test_size=0.2, seed=0, **SETTINGS)


@pytest.fixture(scope="module")
def model(table) -> SparseGPRegressor:
    return table.estimator


def test_posterior_is_a_mixture_around_the_fitted_hyperparameters(model) -> None:
    assert isinstance(model.posterior_, MixturePosterior)
    *members, constant = model.posterior_.members
    assert len(members) == 4
    # The constant describes few of these rows.
    assert constant.M == 1
    assert 0 < model.posterior_.constant_weight < 0.3
    noises = [target_noise(member.likelihood) for member in members]
    assert min(noises) < target_noise(model.likelihood_) < max(noises)
    assert model.kernel_ is model.posterior_.mode.kernel
    few = X[:20]
    with shortest_fits():
        point, mixed = (
            SparseGPRegressor("rbf", inducing_points=few[::5], random_state=0, hyper=hyper).fit(
                few, Y[:20]
            )
            for hyper in ("point", "laplace")
        )
    assert isinstance(point.posterior_, Posterior)
    assert (mixed.elbo_, *mixed.noise_) == (point.elbo_, *point.noise_)
    np.testing.assert_allclose(mixed.inducing_points_, point.inducing_points_)
    # Intervals of few rows are wider.
    widths = [np.subtract(*m.predict_interval(X)[::-1]).mean() for m in (point, mixed)]
    assert widths[1] > 1.02 * widths[0]


def test_predictions_are_those_of_the_mixture_in_the_units_of_the_data(model) -> None:
    inputs, scale = model._inputs(X), model._y_scaler.columns.scale.item()
    expected = model.posterior_.predict(inputs, observed=True)
    mean, sd = model.predict(X, return_std=True)
    np.testing.assert_allclose(sd, scale * expected.variance[:, 0].sqrt().numpy())
    np.testing.assert_allclose(model.predict(X), mean)
    covariance = model.predict(X[:5], return_cov=True)[1]
    np.testing.assert_allclose(np.diag(covariance), sd[:5] ** 2, rtol=1e-9)
    latent = model.predict(X, return_std=True, observed=False)[1]
    np.testing.assert_allclose(latent**2 + model.predict_noise(X) ** 2, sd**2)
    wider = model.predict(X, return_std=True, noise_variance=2.0)[1]
    np.testing.assert_allclose(wider**2, sd**2 + 2.0)


def test_predictive_distribution_agrees_with_densities_and_intervals(model) -> None:
    observation = predictive(model, X[:6], noise_variance=0.5)
    low, high = model.predict_interval(X[:6], 0.9, noise_variance=0.5)
    np.testing.assert_allclose(observation.interval(0.9), (low, high))
    np.testing.assert_allclose(observation.cdf(low), 0.05, atol=1e-8)
    mean, sd = model.predict(X[:6], return_std=True, noise_variance=0.5)
    np.testing.assert_allclose((observation.mean, observation.sd), (mean, sd))
    step = 1e-4
    slope = (observation.cdf(Y[:6] + step) - observation.cdf(Y[:6] - step)) / (2 * step)
    nats = model.log_density(X[:6], Y[:6], noise_variance=0.5)
    np.testing.assert_allclose(nats, np.log(slope), atol=1e-5)


def test_samples_and_functions_come_from_the_members(model) -> None:
    assert model.sample_y(X[:3], 4).shape == (3, 4)
    functions = model.sample_functions(5, random_state=1)
    values = functions(X[:3])
    assert values.shape == (3, 5)
    torch.testing.assert_close(functions(torch.from_numpy(X[:3])), torch.from_numpy(values))
    rows = torch.from_numpy(X[:3]).requires_grad_()
    functions(rows).sum().backward()
    assert rows.grad is not None
    assert rows.grad.abs().min() > 0


def test_saved_and_smaller_models_are_mixtures(table, model, tmp_path: Path) -> None:
    loaded = winnowgp.load(table.save(tmp_path / "model.winnow")).estimator
    predictions = [(m.log_density(X, Y), m.predict(X)) for m in (loaded, model)]
    np.testing.assert_allclose(*predictions, rtol=1e-12)
    assert loaded.hyper == "laplace"
    size = model.available_sizes_[0]
    assert size < model.n_inducing_
    smaller = loaded.resized(size)
    assert isinstance(smaller.posterior_, MixturePosterior)
    assert smaller.n_inducing_ == size
    noise = target_noise(smaller.posterior_.mode.likelihood).item()
    assert smaller.noise_ == pytest.approx(noise * model._y_scaler.columns.scale.item() ** 2)


def test_file_may_ask_for_another_posterior_in_its_next_fit(model, tmp_path: Path) -> None:
    other = winnowgp.load(model.save(tmp_path / "model.winnow")).set_params(hyper="point")
    again = winnowgp.load(other.save(tmp_path / "other.winnow"))
    assert isinstance(again.posterior_, MixturePosterior)


def test_summary_says_how_many_posteriors(table) -> None:
    lines = dict(selection_lines(table.summary["choice"]))
    weight = table.estimator.posterior_.constant_weight
    assert lines["hyper-parameters"] == (
        f"uncertain: predictions average over 4 posteriors and a constant (weight {weight:.2g})"
    )
    printed = summary_json(table.summary, file="")
    assert printed["hyper_posteriors"] == 4
    assert printed["constant_weight"] == weight
    assert len(table.summary["effects"]) == 2


@pytest.mark.filterwarnings("ignore::winnowgp.errors.FitWarning")
def test_outliers_of_more_rows_are_described_by_a_constant() -> None:
    rng = np.random.default_rng(0)
    inputs, fresh = rng.uniform(0, 6, (660, 1)), rng.uniform(0, 6, (300, 1))
    noise, unseen = rng.standard_t(1.5, (2, 660))
    y, y_fresh = np.sin(inputs[:, 0]), np.sin(fresh[:, 0]) + 0.2 * unseen[:300]
    with short_fits(sizes=1):
        gaussian = SparseGPRegressor("rbf", random_state=0).fit(inputs, y + 0.2 * noise.clip(-1, 1))
        table = fit_table({"a": inputs[:, 0], "y": y + 0.2 * noise}, "y", kernel="rbf", seed=0)
        point = SparseGPRegressor("rbf", hyper="point", random_state=0).fit(inputs, y + 0.2 * noise)
    robust = table.estimator
    assert isinstance(gaussian.posterior_, Posterior)
    assert isinstance(point.posterior_, Posterior)
    assert isinstance(robust.posterior_, MixturePosterior)
    weight = robust.posterior_.constant_weight
    assert robust.posterior_.S == 2
    density = robust.log_density(fresh, y_fresh).mean()
    assert density > point.log_density(fresh, y_fresh).mean() + 0.1
    size = robust.available_sizes_[0]
    assert isinstance(size, int)
    assert isinstance(robust.resized(size).posterior_, MixturePosterior)
    assert dict(selection_lines(table.summary["choice"]))["outliers"] == (
        f"predictions average over the model and a constant (weight {weight:.2g})"
    )


def test_other_forms_refuse_a_mixture(model, tmp_path: Path) -> None:
    for convert in (to_gpytorch, SparseGPModel.of):
        with pytest.raises(InputError, match="cannot represent predictions that are averaged"):
            convert(model)
    for convert in (to_gpytorch, SparseGPModel):
        with pytest.raises(InputError, match="Pass its `mode`, or the regressor"):
            convert(model.posterior_)


@pytest.mark.filterwarnings("ignore::winnowgp.errors.FitWarning")
def test_auto_averages_over_few_rows_and_converts_the_mode() -> None:
    with shortest_fits():
        model = SparseGPRegressor("rbf", inducing_points=X[::8], random_state=0).fit(X, Y)
    assert model.hyper == "auto"
    assert isinstance(model.posterior_, MixturePosterior)
    rows = torch.from_numpy(X[:5])
    inputs, scaler = model._inputs(X[:5]), model._y_scaler.columns
    expected = scaler.inverse(model.posterior_.mode.predict_mean(inputs))
    torch.testing.assert_close(SparseGPModel.of(model).posterior(rows).mean, expected)
    model.partial_fit(X[:5] + 0.1, Y[:5])
    assert isinstance(model.posterior_, Posterior)
    assert model.n_batches_ == 2


@pytest.mark.filterwarnings("ignore::winnowgp.errors.FitWarning")
@pytest.mark.parametrize(
    ("count", "settings"),
    [
        (40, {"max_points": 4}),
        (40, {"max_predict_us": 50.0}),
        (40, {"log_target": True, "inducing_points": X[:6, :1]}),
        (40, {"likelihood": "student-t", "inducing_points": X[:6, :1]}),
        (501, {"inducing_points": X[:6, :1]}),
    ],
)
def test_auto_keeps_one_posterior_where_others_cost_too_much(count: int, settings) -> None:
    rng = np.random.default_rng(1)
    inputs = rng.uniform(0, 6, (count, 1))
    targets = 5 + np.sin(inputs[:, 0]) + 0.1 * rng.normal(size=count)
    with shortest_fits():
        model = SparseGPRegressor("rbf", **settings).fit(inputs, targets)
    assert isinstance(model.posterior_, Posterior)


def test_exported_programs_compute_the_mixture(model, tmp_path: Path) -> None:
    mean, sd = model.predict(X, return_std=True)
    outputs = runpy.run_path(str(export_numpy(model, tmp_path / "m.py")))["predict"](X)
    np.testing.assert_allclose(outputs["mean"], mean, rtol=1e-9)
    np.testing.assert_allclose(outputs["variance"], sd**2, rtol=1e-9)
    path = export_onnx(model, tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for name, expected in (("mean", mean), ("variance", sd**2)):
        np.testing.assert_allclose(
            np.asarray(session.run([name], {"X": X})[0]), expected, rtol=1e-9
        )


def test_stream_refuses_a_mixture(model) -> None:
    with pytest.raises(
        InputError, match="`hyper` must be 'point' or 'auto' to learn from further batches; got"
    ):
        model.partial_fit(X, Y)
    with pytest.raises(
        InputError, match="`hyper` must be 'point' or 'auto' to learn from further batches; got"
    ):
        SparseGPRegressor(hyper="laplace").partial_fit(X, Y)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hyper": "nuts"}, "`hyper` must be 'auto', 'point' or 'laplace'; got 'nuts'"),
        ({"likelihood": "student-t"}, "`likelihood` must be 'gaussian' for `hyper='laplace'`"),
        ({"likelihood": "heteroscedastic"}, "`likelihood` must be 'gaussian'"),
        ({"schedule": "paper", "alpha": 1.0}, "`schedule` must be 'fast'"),
        ({"schedule": "paper", "alpha": 1.0, "batch_size": 9}, "`batch_size` must be None"),
        ({"log_target": True}, "pass log y instead"),
        ({"max_predict_us": 3.0}, "set `max_points` instead"),
    ],
)
def test_settings_without_a_mixture_raise_before_anything_is_touched(
    settings, message, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    with pytest.raises(InputError, match=message):
        SparseGPRegressor(**{"hyper": "laplace", "checkpoint": checkpoint, **settings}).fit(X, Y)
    assert not checkpoint.exists()


def test_too_many_rows_raise() -> None:
    many = RNG.normal(size=(2001, 1))
    with pytest.raises(InputError, match=r"at most 2,000 different rows; got 2,001"):
        SparseGPRegressor(hyper="laplace").fit(many, many[:, 0])


def test_table_of_classes_refuses_a_mixture() -> None:
    columns = {"a": X[:, 0], "y": np.where(Y > 20, "high", "low")}
    with pytest.raises(InputError, match="must be 'auto' or 'point' for classification"):
        fit_table(columns, "y", hyper="laplace")


@pytest.mark.filterwarnings("ignore::winnowgp.errors.FitWarning")
def test_constant_model_has_wider_tails_than_a_normal_distribution() -> None:
    noise = np.random.default_rng(3).normal(size=12)
    with shortest_fits():
        model = SparseGPRegressor("rbf", hyper="laplace", random_state=0).fit(X[:12], noise)
    assert model.n_inducing_ == 0
    mean, sd = model.predict(X[:1], return_std=True)
    far = model.log_density(X[:1], mean + 4 * sd)
    normal = -8 - 0.5 * np.log(2 * np.pi) - np.log(sd)
    assert far > normal + 0.5


@pytest.mark.filterwarnings("ignore::winnowgp.errors.FitWarning")
def test_warm_start_begins_from_the_mode(model, tmp_path: Path) -> None:
    again = winnowgp.load(model.save(tmp_path / "model.winnow")).set_params(warm_start=True)
    with shortest_fits():
        again.fit(X, Y)
    assert isinstance(again.posterior_, MixturePosterior)
    assert again.n_inducing_ <= model.n_inducing_ + 2
