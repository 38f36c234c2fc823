"""Every model of several processes is saved, loaded, resumed, exported and updated."""

import runpy
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone

from helpers.short_fits import short_process_fits
from winnowgp import (
    AdditiveGPRegressor,
    Checkpoint,
    MultiFidelityGPRegressor,
    MultiOutputGPRegressor,
    load,
)
from winnowgp.estimators import processes
from winnowgp.tabular import export_numpy
from winnowgp.training import Progress

RNG = np.random.default_rng(0)
X = RNG.uniform(-3, 3, size=(48, 2))
WAVE = np.sin(2 * X[:, 0])
Y = np.column_stack([WAVE, 3 - WAVE, WAVE + X[:, 1]]) + 0.1 * RNG.normal(size=(48, 3))
Y[::7, 0] = np.nan
KINDS = np.column_stack(
    [
        WAVE + 0.1 * RNG.normal(size=48),
        RNG.poisson(np.exp(1 + WAVE)),
        WAVE + 0.3 * RNG.normal(size=48) > 0,
    ]
)
KINDS[::5, 1] = np.nan
LEVELS = np.arange(48) % 4 // 3 + 0.5 * (np.arange(48) % 8 == 7)
FIDELITIES = np.column_stack([X[:, 0], LEVELS])
CURVE = (1 + LEVELS) * WAVE + LEVELS
BOXES = np.column_stack([X[:, 0], np.arange(48) % 3 * 0.3])
SETTINGS: dict[str, Any] = {"n_candidates": 18, "tolerance": 0.1, "random_state": 0}
LIKELIHOODS = ["gaussian", "poisson", "bernoulli"]

MODELS: dict[str, tuple[Any, Any, Any]] = {
    "outputs": (MultiOutputGPRegressor(n_latents=2, **SETTINGS), X, Y),
    "independent": (MultiOutputGPRegressor(mixing="independent", **SETTINGS), X, Y[:, 1:]),
    "gaussians": (
        MultiOutputGPRegressor(n_latents=1, likelihood=["gaussian", "gaussian"], **SETTINGS),
        X,
        Y[:, 1:],
    ),
    "likelihoods": (
        MultiOutputGPRegressor(n_latents=1, likelihood=LIKELIHOODS, **SETTINGS),
        X,
        KINDS,
    ),
    "effects": (AdditiveGPRegressor(kernel="rbf[0] + linear[1]", **SETTINGS), X, Y[:, 2]),
    "linear": (MultiFidelityGPRegressor(relation="linear", **SETTINGS), FIDELITIES, CURVE),
    "nonlinear": (MultiFidelityGPRegressor(relation="nonlinear", **SETTINGS), FIDELITIES, CURVE),
    "auto": (MultiFidelityGPRegressor(hyper="point", **SETTINGS), FIDELITIES, CURVE),
    "boxes": (MultiOutputGPRegressor(widths=[1], n_latents=1, **SETTINGS), BOXES, Y[:, 1:]),
}


@cache
def fitted(name: str) -> Any:
    model, rows, targets = MODELS[name]
    with short_process_fits():
        return new(model).fit(rows, targets)


def new(model: Any) -> Any:
    return clone(model)


def assert_equal(one: Any, other: Any, rows: Any, targets: Any) -> None:
    """Assert that two models have the same attributes and predictions."""
    assert one.n_inducing_ == other.n_inducing_
    assert one.elbo_ == pytest.approx(other.elbo_, rel=1e-10)
    assert one.evidence_ == other.evidence_
    for mine, yours in zip(one.inducing_points_, other.inducing_points_, strict=True):
        np.testing.assert_allclose(mine, yours, rtol=1e-10, atol=1e-12)
    for mine, yours in zip(
        one.predict(rows, return_std=True), other.predict(rows, return_std=True), strict=True
    ):
        np.testing.assert_allclose(mine, yours, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(
        one.log_density(rows, targets), other.log_density(rows, targets), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("name", MODELS)
def test_saved_model_is_the_same(name: str, tmp_path: Path) -> None:
    _, rows, targets = MODELS[name]
    again = load(fitted(name).save(tmp_path / "model.winnow"))
    assert_equal(again, fitted(name), rows, targets)


@pytest.mark.parametrize("name", MODELS)
def test_interrupted_fit_resumes_to_the_same_model(name: str, tmp_path: Path) -> None:
    model, rows, targets = MODELS[name]
    steps = 0

    def interrupt(progress: Progress) -> None:
        nonlocal steps
        steps += 1
        if steps == 9:
            raise KeyboardInterrupt

    checkpoint = Checkpoint(tmp_path / "fit", 0)
    with short_process_fits():
        with pytest.raises(KeyboardInterrupt):
            new(model).set_params(checkpoint=checkpoint, callbacks=interrupt).fit(rows, targets)
        resumed = new(model).set_params(checkpoint=checkpoint).fit(rows, targets)
    # An equal seed gives an equal fit, interrupted or not.
    assert_equal(resumed, fitted(name), rows, targets)


@pytest.mark.parametrize("name", MODELS)
def test_exported_model_predicts_the_same(name: str, tmp_path: Path) -> None:
    _, rows, _ = MODELS[name]
    path = export_numpy(fitted(name), tmp_path / "model.py")
    outputs = runpy.run_path(str(path))["predict"](rows)
    mean, sd = fitted(name).predict(rows, return_std=True)
    np.testing.assert_allclose(outputs["mean"], mean, rtol=1e-7, atol=1e-7)
    np.testing.assert_allclose(outputs["variance"], sd**2, rtol=1e-6, atol=1e-9)


def test_large_batch_is_described_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The streaming bounds of its parts add up; nothing is set before all are learnt."""
    _, rows, targets = MODELS["outputs"]
    monkeypatch.setattr("winnowgp.estimators.processes._ROWS", 10)
    whole, parts = copy(fitted("outputs")), copy(fitted("outputs"))
    nats = [parts.partial_fit(rows[i : i + 10], targets[i : i + 10]).elbo_ for i in (0, 10)]
    whole.partial_fit(rows[:20], targets[:20])
    assert whole.elbo_ == pytest.approx(sum(nats), rel=1e-9)
    assert whole.evidence_ is None
    before, real = whole.elbo_, processes._updated

    def interrupted(function: Any, batch: Any, goal: Any) -> Any:
        if batch.X[0, 0] != whole._x_scaler.forward(torch.as_tensor(rows))[0, 0]:
            raise KeyboardInterrupt
        return real(function, batch, goal)

    monkeypatch.setattr(processes, "_updated", interrupted)
    with pytest.raises(KeyboardInterrupt):
        whole.partial_fit(rows[:20], targets[:20])
    assert whole.elbo_ == before


@pytest.mark.parametrize("name", MODELS)
def test_batch_is_learnt_and_saved(name: str, tmp_path: Path) -> None:
    _, rows, targets = MODELS[name]
    model = copy(fitted(name))
    # Outside of the first rows, where the model knows nothing yet.
    further = rows + np.array([4.0, 0.0])
    before = np.nanmean(model.log_density(further, targets))
    model.partial_fit(further, targets)
    assert np.nanmean(model.log_density(further, targets)) > before + 0.1
    assert model.elbo_gap_ <= 0.1 + 1e-9
    again = load(model.save(tmp_path / "model.winnow"))
    assert_equal(again, model, further, targets)
