"""Regressors of several targets, several fidelities and sums of effects."""

from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import RBFKernel
from gpytorch.likelihoods import GaussianLikelihood
from sklearn.base import clone

from helpers.short_fits import short_fits, short_process_fits
from winnowgp import (
    AdditiveGPRegressor,
    MultiFidelityGPRegressor,
    MultiOutputGPRegressor,
    SparseGP,
    load,
)
from winnowgp.data import Dataset
from winnowgp.errors import InputError, NoInducingPointsWarning
from winnowgp.estimators.processes import ProcessEstimator

pytestmark = pytest.mark.usefixtures("quickly")

RNG = np.random.default_rng(0)
X = RNG.uniform(-3, 3, size=(70, 1))
WAVES = np.column_stack([np.sin(X[:, 0]), np.sin(5 * X[:, 0])])
Y = WAVES @ np.array([[2.0, 0.0, 1.0], [0.2, 30.0, 1.0]]) + 0.05 * RNG.normal(size=(70, 3))
Y[::7, 0] = np.nan
EFFECTS = pd.DataFrame({"a": RNG.uniform(-2, 2, 80), "b": RNG.uniform(-2, 2, 80)})
SUM = np.sin(3 * EFFECTS["a"]) + 0.5 * EFFECTS["b"] + 0.05 * RNG.normal(size=80)
# A measurement, a count and a class that mix the same waves; some counts are missing.
KINDS = np.column_stack(
    [
        WAVES[:, 0] + 0.1 * RNG.normal(size=70),
        RNG.poisson(np.exp(1 + WAVES[:, 0])),
        WAVES[:, 0] + 0.3 * RNG.normal(size=70) > 0,
    ]
)
KINDS[::5, 1] = np.nan

ESTIMATORS: dict[str, tuple[ProcessEstimator, Any, Any]] = {
    "outputs": (MultiOutputGPRegressor(n_latents=2, random_state=0), X, Y),
    "likelihoods": (
        MultiOutputGPRegressor(
            n_latents=1,
            likelihood=["gaussian", "poisson", "bernoulli"],
            n_candidates=24,
            random_state=0,
        ),
        X,
        KINDS,
    ),
    "effects": (AdditiveGPRegressor(kernel="rbf[a] + rbf[b]", random_state=0), EFFECTS, SUM),
}


def copied(estimator: Any) -> Any:
    return clone(estimator)


@pytest.fixture(scope="module")
def fitted() -> dict[str, Any]:
    with short_fits():
        return {name: copied(model).fit(*rows) for name, (model, *rows) in ESTIMATORS.items()}


def test_outputs_allocate_points_by_smoothness(fitted: dict[str, Any]) -> None:
    model = fitted["outputs"]
    few, many = sorted(model.n_inducing_)
    assert 4 <= few < many <= 30
    # The second target is the rapid wave, thirty times.
    slow, rapid = np.argsort(model.n_inducing_)
    assert abs(model.mixing_[1, rapid]) > 10 * abs(model.mixing_[1, slow])
    mean, sd = model.predict(X, return_std=True)
    assert mean.shape == sd.shape == (70, 3)
    assert np.sqrt(np.nanmean((mean - Y)[:, 0] ** 2)) < 0.1
    assert (sd > model.predict(X, return_std=True, observed=False)[1]).all()
    assert model.noise_.shape == (3,)
    assert model.score(X, Y) > 0.99
    assert np.isnan(model.log_density(X, Y)[0, 0])


def test_mixing_reconstructs_predictions_from_processes(fitted: dict[str, Any]) -> None:
    model = fitted["outputs"]
    level = model._y_scaler.columns.shift.numpy()
    np.testing.assert_allclose(
        model.predict_processes(X) @ model.mixing_.T + level, model.predict(X)
    )


def test_independent_targets_have_a_process_each() -> None:
    settings: dict[str, Any] = {"random_state": 0, "kernel": RBFKernel(), "priors": None}
    both = MultiOutputGPRegressor(mixing="independent", tolerance=0.2, **settings)
    both.fit(X[:40], Y[:40, 1:])
    assert len(both.n_inducing_) == 2
    np.testing.assert_array_equal(both._processes.mixing, np.eye(2))
    data = Dataset.of(both._inputs(X[:40]), torch.from_numpy(Y[:40, 1:]).double())
    scaled = both._y_scaler.columns.forward(data.Y)
    noise = both.likelihood_.noise
    parts = [
        SparseGP(kernel, Z, noise=noise[p].item()).bound(Dataset.of(data.X, scaled[:, p]))
        for p, (kernel, Z) in enumerate(
            zip(both.kernels_, both._processes.inducing_points, strict=True)
        )
    ]
    assert both.elbo_ == pytest.approx(torch.stack(parts).sum().item(), abs=1e-6)


def test_effects_sum_to_the_prediction(fitted: dict[str, Any]) -> None:
    model = fitted["effects"]
    mean, sd = model.predict_terms(EFFECTS, return_std=True)
    np.testing.assert_allclose(mean.sum(1) + SUM.mean(), model.predict(EFFECTS))
    wave, line = np.sin(3 * EFFECTS["a"]), 0.5 * EFFECTS["b"]
    for q, truth in enumerate((wave, line)):
        centred = mean[:, q] - mean[:, q].mean() - truth + truth.mean()
        assert np.sqrt(np.mean(centred**2)) < 0.1
    assert sd.shape == (80, 2)
    assert model.n_inducing_[0] > model.n_inducing_[1] >= 1
    assert model.terms_ == ["rbf[a]", "rbf[b]"]


def test_averages_over_boxes_recover_the_function(tmp_path: Path) -> None:
    edges = np.linspace(0, 4, 17)
    centres, width = (edges[1:] + edges[:-1]) / 2, edges[1] - edges[0]
    average = (np.cos(3 * edges[:-1]) - np.cos(3 * edges[1:])) / (3 * width)
    rows = pd.DataFrame({"w": np.full(16, width), "x": centres})
    model = MultiOutputGPRegressor(widths=["w"], priors=None, random_state=0)
    model.fit(rows, 10 + 5 * average)
    x = np.linspace(0.3, 3.7, 50)
    points = pd.DataFrame({"w": 0.0, "x": x})
    truth = 10 + 5 * np.sin(3 * x)
    assert np.sqrt(np.mean((model.predict(points) - truth) ** 2)) < 0.1
    # Averages are smaller than the function at its extremes.
    assert np.abs(5 * average).max() < 4.9 < np.abs(model.predict(points) - 10).max()
    again = load(model.save(tmp_path / "boxes.winnow"))
    np.testing.assert_allclose(again.predict(points), model.predict(points), rtol=1e-10, atol=1e-12)
    with pytest.raises(InputError, match="negative widths"):
        copied(model).fit(-rows, average)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (MultiOutputGPRegressor(likelihood="gamma"), "`likelihood` must be one of .*bernoulli"),
        (MultiOutputGPRegressor(likelihood=["poisson"]), "an entry for each of 3 targets; got 1"),
        (MultiOutputGPRegressor(likelihood="poisson"), "target 0 .*: counts must be whole numbers"),
        (MultiFidelityGPRegressor(likelihood="poisson"), "`likelihood` must be 'gaussian' for"),
        (MultiOutputGPRegressor(schedule="paper"), "`schedule` must be 'fast' where"),
        (MultiOutputGPRegressor(mixing="both"), "`mixing` must be 'lmc' or 'independent'"),
        (MultiOutputGPRegressor(mixing="independent", n_latents=2), "`n_latents` is for"),
        (MultiFidelityGPRegressor(fidelity=0), "at least one column besides the fidelity"),
        (MultiFidelityGPRegressor(fidelity=1), "one of the 1 columns of `X`; got 1"),
        (MultiOutputGPRegressor(widths=[0]), "half of the 1 columns"),
        (MultiOutputGPRegressor(widths="w"), "must be a list of columns"),
        (MultiFidelityGPRegressor(fidelity="level"), "got 'level'. Pass a data frame"),
        (MultiFidelityGPRegressor().set_params(fidelity=0.5), "by number or name; got 0.5"),
        (AdditiveGPRegressor(kernel="rbf"), "must be a sum, each term"),
        (AdditiveGPRegressor(kernel="rbf + linear"), "AdditiveGPRegressor needs one target; got 3"),
    ],
)
def test_wrong_parameters_are_refused(model: ProcessEstimator, message: str) -> None:
    with pytest.raises(InputError, match=message):
        model.fit(X, Y)
    assert not hasattr(model, "n_features_in_")


def test_batches_add_points_where_rows_need_them(fitted: dict[str, Any], tmp_path: Path) -> None:
    left = X[:, 0] < 0
    first = copied(ESTIMATORS["outputs"][0]).partial_fit(X[left], Y[left])
    before, points = first.log_density(X[~left], Y[~left]), first.n_inducing_
    first.partial_fit(X[~left], Y[~left])
    assert sum(first.n_inducing_) > sum(points)
    assert max(Z.max() for Z in first.inducing_points_) > 2
    after = first.log_density(X[~left], Y[~left])
    assert np.nanmean(after) > np.nanmean(before) + 0.5
    # Earlier rows are remembered.
    batch = fitted["outputs"].log_density(X[left], Y[left])
    assert np.nanmean(first.log_density(X[left], Y[left])) > np.nanmean(batch) - 0.3
    # The same rows again need no more points.
    again = load(first.save(tmp_path / "model.winnow"))
    again.partial_fit(X, Y)
    assert sum(again.n_inducing_) <= sum(first.n_inducing_) + 2
    limited = copied(ESTIMATORS["outputs"][0]).set_params(max_points=9)
    limited.partial_fit(X[left], Y[left]).partial_fit(X[~left], Y[~left])
    assert sum(limited.n_inducing_) <= 9
    with pytest.raises(InputError, match=r"`X` must be within 1e.08 standard deviations"):
        first.partial_fit(1e12 * X, Y)
    with pytest.raises(InputError, match=r"`y` must be within 1e.08 standard deviations"):
        first.partial_fit(X, 1e12 * Y)
    with pytest.raises(InputError, match="`partial_fit` needs `alpha='auto'`"):
        first.set_params(alpha=0.1).partial_fit(X, Y)


def test_targets_of_several_kinds_share_a_process(fitted: dict[str, Any]) -> None:
    model = fitted["likelihoods"]
    assert model.n_inducing_[0] < 24
    mean, sd = model.predict(X, return_std=True)
    # Missing counts are predicted from the other targets.
    gap = np.abs(mean[::5, 1] - np.exp(1 + WAVES[::5, 0])) / np.exp(1 + WAVES[::5, 0])
    assert gap.mean() < 0.25
    np.testing.assert_allclose(sd[:, 2] ** 2, mean[:, 2] * (1 - mean[:, 2]))
    assert np.mean((mean[:, 2] > 0.5) == (WAVES[:, 0] > 0)) > 0.9
    assert np.isnan(model.noise_).tolist() == [False, True, True]
    density = model.log_density(X, KINDS)
    assert np.isnan(density[:, 1]).sum() == 14
    # Log odds of classes: better than tossing a coin.
    assert density[:, 2].mean() > -0.45
    with pytest.raises(InputError, match="`noise_variance` needs `likelihood='gaussian'`"):
        copied(model).fit(X, KINDS, noise_variance=0.1)


def test_batches_of_several_likelihoods_are_learnt(fitted: dict[str, Any], tmp_path: Path) -> None:
    model = copy(fitted["likelihoods"])
    x = np.linspace(3, 5, 60)
    wave = np.sin(x)
    kinds = np.column_stack(
        [wave, RNG.poisson(np.exp(1 + wave)), wave + 0.3 * RNG.normal(size=60) > 0]
    )
    kinds[::6, 0] = np.nan
    rows, points, old = x[:, None], model.n_inducing_, model.log_density(X, KINDS)
    before = np.nanmean(model.log_density(rows, kinds), 0)
    held = model.condition_on(rows, kinds).log_density(rows, kinds)
    model.partial_fit(rows, kinds)
    assert sum(model.n_inducing_) > sum(points)
    after = np.nanmean(model.log_density(rows, kinds), 0)
    assert np.nanmean(after) > np.nanmean(before) + 0.3
    # Points of the first rows explain less of the new ones.
    assert np.nanmean(after) > np.nanmean(held) + 0.1
    # Earlier rows are remembered.
    assert np.nanmean(model.log_density(X, KINDS)) > np.nanmean(old) - 0.05
    again = load(model.save(tmp_path / "model.winnow"))
    np.testing.assert_allclose(again.predict(X), model.predict(X), rtol=1e-10, atol=1e-12)


def test_list_of_gaussian_likelihoods_is_gaussian_noise(fitted: dict[str, Any]) -> None:
    model = copied(ESTIMATORS["outputs"][0])
    parts = ["gaussian", GaussianLikelihood(), "gaussian"]
    model.set_params(likelihood=parts).fit(X, Y)
    assert isinstance(model.likelihood_, GaussianLikelihood)
    assert model.elbo_ == fitted["outputs"].elbo_
    np.testing.assert_allclose(
        model.predict(X), fitted["outputs"].predict(X), rtol=1e-10, atol=1e-12
    )
    model.partial_fit(X[:3], Y[:3], noise_variance=0.1)


def test_gaussian_likelihood_with_a_limit_of_its_own_keeps_it() -> None:
    limited = GaussianLikelihood(noise_constraint=GreaterThan(0.5))
    model = MultiOutputGPRegressor(
        n_latents=1, likelihood=["gaussian", limited], n_candidates=16, random_state=0
    )
    model.fit(X[:30], Y[:30, 1:])
    assert not isinstance(model.likelihood_, GaussianLikelihood)
    assert model.likelihood_.parts[1].noise.item() > 0.5


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ([1, 3], r"target 1 \(counted from 0\) has the same value .* predicts it for every row"),
        ([3, 1, 3], r"targets 0, 2 \(counted from 0\) have the same value .* predicts them"),
    ],
)
def test_constant_targets_are_warned_of(columns: list[int], message: str) -> None:
    """Whether other rows lack them or not."""
    flat = np.where(np.arange(len(Y)) % 2, 1.5, np.nan)
    targets = np.column_stack([Y, flat])[:, columns]
    model = MultiOutputGPRegressor(tolerance=0.5, random_state=0)
    with short_process_fits(), pytest.warns(NoInducingPointsWarning, match=message) as seen:
        model.fit(X, targets)
    assert seen[0].filename == __file__
