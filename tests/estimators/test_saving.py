"""Estimators in files, pickles and joblib's dumps."""

import pickle
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
from gpytorch.kernels import MaternKernel, ScaleKernel
from sklearn.exceptions import NotFittedError

import winnowgp
from winnowgp import SparseGPClassifier, SparseGPRegressor
from winnowgp.training import Progress

rng = np.random.default_rng(0)
X = rng.uniform(0, 6, (60, 2))
y = np.sin(X[:, 0]) + 0.1 * rng.normal(size=60)
LABELS: dict[str, Any] = {
    "words": np.where(y > 0, "up", "low"),
    "objects": np.where(y > 0, "up", "low").astype(object),
    "whole numbers": np.where(y > 0, 7, np.where(X[:, 1] > 4, 3, -2)),
    "booleans": y > 0,
}


QUICK: dict[str, Any] = {"schedule": "paper", "alpha": 0.1, "epochs": (3, 3, 3), "n_candidates": 6}


def watcher(progress: Progress) -> None:
    pass


REGRESSORS = {
    "defaults": SparseGPRegressor(max_points=5, random_state=0),
    "paper": SparseGPRegressor(**QUICK),
    "kernel": SparseGPRegressor(
        ScaleKernel(MaternKernel(nu=1.5)), random_state=np.random.RandomState(3), **QUICK
    ),
    "counts": SparseGPRegressor(likelihood="poisson", on_progress=watcher, **QUICK),
    "locations": SparseGPRegressor(candidates=X[:8], tolerance=np.float64(0.1)),
}


def targets(name: str) -> Any:
    if name == "counts":
        return np.round(np.exp(y))
    return np.stack([y, -y], 1) if name == "locations" else y


def same(a: Any, b: Any) -> None:
    """Everything that ends in _, and the arguments but for the watcher."""
    for name in [n for n in vars(a) if n.endswith("_")]:
        ours, theirs = getattr(a, name), getattr(b, name)
        if isinstance(ours, np.ndarray):
            np.testing.assert_array_equal(ours, theirs)
            assert ours.dtype == theirs.dtype
        elif ours is None or isinstance(ours, float | int):
            assert ours == theirs, name
    assert {n for n in vars(a) if n.endswith("_")} == {n for n in vars(b) if n.endswith("_")}
    for name in ("alpha", "tolerance", "max_points", "epochs", "schedule", "n_candidates"):
        assert getattr(a, name) == getattr(b, name)


@pytest.mark.parametrize("name", REGRESSORS)
def test_a_regressor_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    model = REGRESSORS[name].fit(X, targets(name))
    back = winnowgp.load(model.save(tmp_path / "a.winnow"))
    same(model, back)
    for ours, theirs in zip(
        model.predict(X, return_std=True), back.predict(X, return_std=True), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    np.testing.assert_allclose(
        model.log_density(X, targets(name)), back.log_density(X, targets(name)), rtol=1e-10
    )
    if model.frontier_ is not None:
        assert back.frontier_.best_for_alpha(0.1).bound == model.frontier_.best_for_alpha(0.1).bound
    if name == "kernel":
        assert isinstance(back.kernel, ScaleKernel)
        assert isinstance(model.random_state, np.random.RandomState)
        assert back.random_state.randint(1000) == model.random_state.randint(1000)


@pytest.mark.parametrize("name", LABELS)
def test_a_classifier_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    model = SparseGPClassifier(**QUICK).fit(X, LABELS[name])
    back = winnowgp.load(model.save(tmp_path / "a.winnow"))
    same(model, back)
    np.testing.assert_allclose(model.predict_proba(X), back.predict_proba(X), rtol=1e-12)
    np.testing.assert_array_equal(model.predict(X), back.predict(X))


def test_names_of_columns_are_kept(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = pandas.DataFrame(X, columns=["depth", "age"])
    model = SparseGPRegressor(**QUICK).fit(frame, y)
    back = winnowgp.load(model.save(tmp_path / "a.winnow"))
    np.testing.assert_allclose(back.predict(frame), model.predict(frame), rtol=1e-12)
    with pytest.raises(ValueError, match="feature names"):
        back.predict(frame.rename(columns={"age": "years"}))


@pytest.mark.parametrize("way", ["pickle", "joblib"])
def test_estimators_survive_pickle_and_joblib(way: str, tmp_path: Path) -> None:
    for model, labels in (
        (SparseGPRegressor(**QUICK), y),
        (SparseGPClassifier(**QUICK), LABELS["words"]),
    ):
        model.fit(X, labels)
        if way == "pickle":
            back = pickle.loads(pickle.dumps(model))
        else:
            joblib.dump(model, tmp_path / "a.joblib")
            back = joblib.load(tmp_path / "a.joblib")
        assert (back.predict(X) == model.predict(X)).all()


def test_an_estimator_that_is_not_fitted_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotFittedError):
        SparseGPRegressor().save(tmp_path / "a.winnow")
    assert list(tmp_path.iterdir()) == []
