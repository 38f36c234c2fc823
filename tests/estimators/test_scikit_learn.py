"""Scikit-learn's own checks and tools, for every estimator."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn import config_context
from sklearn.base import BaseEstimator, clone
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from winnowgp import (
    GPLVM,
    AdditiveGPRegressor,
    DeepGPClassifier,
    DeepGPRegressor,
    MultiOutputGPRegressor,
    SparseGPClassifier,
    SparseGPRegressor,
)
from winnowgp.errors import InputError

PAPER: dict[str, Any] = {"schedule": "paper", "alpha": 0.01, "random_state": 0}
ONE_LAYER: dict[str, Any] = PAPER | {"layers": 1, "n_candidates": 8, "predict_samples": 4}
TWO_LAYERS: dict[str, Any] = {
    "n_candidates": 8,
    "predict_samples": 16,
    "random_state": 0,
    "hidden_mean": "identity",
}


def regressor(**arguments: Any) -> SparseGPRegressor:
    settings: dict[str, Any] = {"n_candidates": 10, "epochs": (60, 3, 60)}
    return SparseGPRegressor(**(PAPER | settings | arguments))


def classifier(**arguments: Any) -> SparseGPClassifier:
    settings: dict[str, Any] = {"n_candidates": 10, "epochs": (20, 3, 10)}
    return SparseGPClassifier(**(PAPER | settings | arguments))


def copied(estimator: Any) -> Any:
    return clone(estimator)


BRIEF: dict[type, tuple[int, ...]] = {
    SparseGPRegressor: (2, 1, 2),
    SparseGPClassifier: (2, 1, 2),
    DeepGPRegressor: (0, 2, 1, 2),
    DeepGPClassifier: (0, 2, 1, 2),
}
# The checks that ask how well something was learnt; the others hold after a step or two.
LEARNT = ("check_regressors_train", "check_classifiers_train", "check_classifiers_classes")


# Nothing is excluded. scikit-learn itself skips its check of array API inputs unless SciPy's
# environment variable is set.
@parametrize_with_checks(
    [
        regressor(),
        classifier(),
        DeepGPRegressor(**ONE_LAYER, epochs=(0, 80, 2, 40)),
        DeepGPClassifier(**ONE_LAYER, epochs=(0, 20, 2, 5)),
    ]
)
def test_scikit_learn_checks(estimator, check) -> None:
    if check.func.__name__ not in LEARNT:
        estimator = copied(estimator).set_params(epochs=BRIEF[type(estimator)])
    check(estimator)


@pytest.mark.filterwarnings("ignore:the latent positions of all rows are 0")
@parametrize_with_checks([GPLVM(schedule="paper", alpha=0.01, epochs=2, n_candidates=5)])
def test_scikit_learn_checks_of_gplvm(estimator, check) -> None:
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks(
    [
        SparseGPRegressor(n_candidates=20),
        SparseGPClassifier(n_candidates=20),
        MultiOutputGPRegressor(n_candidates=20),
        AdditiveGPRegressor(n_candidates=20),
        DeepGPRegressor(**TWO_LAYERS, epochs=(20, 60, 60)),
        DeepGPClassifier(**TWO_LAYERS, epochs=(20, 60, 60)),
        DeepGPRegressor(**TWO_LAYERS, schedule="paper", alpha=0.01, epochs=(20, 60, 5, 40)),
        DeepGPClassifier(**TWO_LAYERS, schedule="paper", alpha=0.01, epochs=(20, 60, 5, 40)),
    ]
)
def test_scikit_learn_checks_with_the_fast_schedule(estimator, check) -> None:
    check(estimator)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the latent positions of all rows are 0")
@parametrize_with_checks([GPLVM(max_points=4, max_iter=5, n_candidates=10)])
def test_scikit_learn_checks_of_gplvm_with_the_fast_schedule(estimator, check) -> None:
    check(estimator)


def frame(N: int = 40) -> tuple[pd.DataFrame, np.ndarray]:
    rng = np.random.default_rng(0)
    X = pd.DataFrame({"width": rng.uniform(-2, 2, N), "height": rng.uniform(50, 90, N)})
    return X, np.sin(2 * X["width"].to_numpy()) + 0.1 * rng.normal(size=N)


COUNTS = np.array([1, 0, 3, 2, 1, 1, 0, 4] * 5)
ESTIMATORS: dict[str, BaseEstimator] = {
    "regressor": regressor(epochs=(10, 3, 10)),
    "minibatches": regressor(epochs=(3, 2, 3), batch_size=10),
    "classifier": classifier(),
}
LONGER: dict[str, BaseEstimator] = {
    "fast regressor": SparseGPRegressor(n_candidates=15, random_state=0),
    "student-t": SparseGPRegressor(likelihood="student-t", max_points=6, random_state=0),
    "fast classifier": SparseGPClassifier(n_candidates=15, random_state=0),
    "deep regressor": DeepGPRegressor(**TWO_LAYERS, epochs=(5, 10, 10)),
    "deep classifier": DeepGPClassifier(**TWO_LAYERS, epochs=(5, 10, 10)),
}


@pytest.mark.parametrize(
    "name", [*ESTIMATORS, *(pytest.param(name, marks=pytest.mark.slow) for name in LONGER)]
)
def test_sample_weight_equals_repeated_rows(name: str) -> None:
    X, y = frame()
    y = np.where(y > 0, "up", "low") if "classifier" in name else y
    estimator: Any = (ESTIMATORS | LONGER)[name]
    weighted = copied(estimator).fit(X, y, sample_weight=COUNTS)
    repeated = copied(estimator).fit(X.loc[X.index.repeat(COUNTS.tolist())], y.repeat(COUNTS))
    assert weighted.elbo_ == pytest.approx(repeated.elbo_, abs=1e-6)
    assert weighted.elbo_gap_ == pytest.approx(repeated.elbo_gap_, abs=1e-6)
    for answer in ("predict_proba", "predict") if "classifier" in name else ("predict",):
        a, b = getattr(weighted, answer)(X), getattr(repeated, answer)(X)
        if a.dtype.kind == "f":
            np.testing.assert_allclose(a, b, atol=1e-6)
        else:
            np.testing.assert_array_equal(a, b)
    assert weighted.score(X, y, sample_weight=COUNTS) == pytest.approx(
        repeated.score(X.loc[X.index.repeat(COUNTS.tolist())], y.repeat(COUNTS)), abs=1e-6
    )
    plain = copied(estimator).fit(X, y)
    assert plain.elbo_ != pytest.approx(weighted.elbo_, abs=1e-3)
    left_out = copied(estimator).fit(X[COUNTS > 0], y[COUNTS > 0])
    zeros = copied(estimator).fit(X, y, sample_weight=(COUNTS > 0).astype(float))
    np.testing.assert_array_equal(zeros.predict(X), left_out.predict(X))
    assert zeros.elbo_ == left_out.elbo_


@pytest.mark.parametrize(
    "estimator",
    [
        regressor(epochs=BRIEF[SparseGPRegressor]),
        classifier(epochs=BRIEF[SparseGPClassifier]),
        DeepGPRegressor(**ONE_LAYER, epochs=BRIEF[DeepGPRegressor]),
        DeepGPClassifier(**ONE_LAYER, epochs=BRIEF[DeepGPClassifier]),
        GPLVM(1, schedule="paper", alpha=0.01, epochs=2, n_candidates=5),
    ],
    ids=lambda estimator: type(estimator).__name__,
)
def test_random_state_determines_the_fit(estimator: Any) -> None:
    X, y = frame()
    targets = y > 0 if "Classifier" in type(estimator).__name__ else y
    first, again, other = (
        copied(estimator).set_params(random_state=seed).fit(X, targets).elbo_ for seed in (3, 3, 4)
    )
    assert first == again
    assert first != other


# The fit to spoilt rows selects none.
@pytest.mark.filterwarnings("ignore::winnowgp.errors.NoInducingPointsWarning")
@pytest.mark.usefixtures("one_size")
def test_small_weight_reduces_the_influence_of_a_row() -> None:
    X, y = frame()
    wrong = np.arange(40) % 8 == 3
    spoilt = np.where(wrong, y + 5, y)
    model = SparseGPRegressor("rbf", random_state=0, priors=None, hyper="point")
    trusted = copied(model).fit(X, spoilt, sample_weight=np.where(wrong, 1e-4, 1.0))
    clean = copied(model).fit(X[~wrong], y[~wrong])
    error = np.abs(trusted.predict(X) - clean.predict(X))
    assert error.max() < 0.05 < np.abs(copied(model).fit(X, spoilt).predict(X) - y).max()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.ones(39), r"one number per row, \[40\]; got shape \[39\]"),
        (np.ones((40, 2)), r"got shape \[40, 2\]"),
        (-np.ones(40), "must be finite and not negative; 40 of 40"),
        (np.full(40, np.nan), "must be finite"),
        (np.zeros(40), "positive for at least one row"),
        (["much"] * 40, "must be numbers"),
    ],
)
def test_invalid_sample_weight_is_refused(weights: Any, message: str) -> None:
    X, y = frame()
    with pytest.raises(InputError, match=message):
        regressor().fit(X, y, sample_weight=weights)


def test_class_without_weight_is_dropped() -> None:
    X, y = frame()
    labels = np.where(y > 0.5, "top", np.where(y > -0.5, "mid", "low"))
    model = classifier().fit(X, labels, sample_weight=(labels != "mid").astype(float))
    assert model.classes_.tolist() == ["low", "top"]


def test_sample_weight_is_routed_through_grid_and_pipeline() -> None:
    X, y = frame()
    with config_context(enable_metadata_routing=True):
        scale: Any = StandardScaler().set_fit_request(sample_weight=False)
        brief = {"epochs": (10, 3, 10)}
        asked: Any = regressor(**brief).set_fit_request(sample_weight=True)
        pipe = Pipeline([("scale", scale), ("gp", asked.set_score_request(sample_weight=True))])
        grid = {"gp__kernel": ["rbf", "rbf + linear"], "gp__alpha": [0.01]}
        search = GridSearchCV(pipe, grid, cv=2).fit(X, y, sample_weight=COUNTS)
        kernel = search.best_params_["gp__kernel"]
        alone = regressor(kernel=kernel, **brief)
        alone.fit(scale.fit_transform(X), y, sample_weight=COUNTS)
        np.testing.assert_allclose(search.predict(X), alone.predict(scale.transform(X)), atol=1e-9)


def test_data_frame_sets_feature_names() -> None:
    X, y = frame()
    model = regressor(epochs=(1, 1, 1)).fit(X, y)
    assert model.feature_names_in_.tolist() == ["width", "height"]
    with pytest.raises(ValueError, match="feature names"):
        model.predict(X.rename(columns={"width": "depth"}))
    chart = GPLVM(1, schedule="paper", alpha=0.01, epochs=2, n_candidates=5, random_state=0)
    chart.set_output(transform="pandas").fit(X)
    placed = chart.transform(X)
    assert isinstance(placed, pd.DataFrame)
    assert placed.columns.tolist() == chart.get_feature_names_out().tolist() == ["gplvm0"]
    assert placed.index.equals(X.index)


@pytest.mark.parametrize("name", [*ESTIMATORS, *LONGER])
def test_clone_and_html_repr(name: str) -> None:
    estimator = (ESTIMATORS | LONGER)[name]
    assert copied(estimator).get_params() == estimator.get_params()
    assert type(estimator).__name__ in estimator._repr_html_()


def test_pipelines_cross_validate() -> None:
    X, y = frame()
    pipe = make_pipeline(StandardScaler(), regressor(epochs=(10, 3, 10)))
    assert cross_val_score(pipe, X, y, cv=2).shape == (2,)
    labels = cross_val_score(make_pipeline(StandardScaler(), classifier()), X, y > 0, cv=2)
    assert (labels > 0.5).all()


@pytest.mark.parametrize("weight", [3.0, 1e4])
@pytest.mark.usefixtures("one_size")
def test_large_weights_do_not_remove_the_noise(weight: float) -> None:
    rng = np.random.default_rng(0)
    X = rng.uniform(0, 6, size=(120, 1))
    y = np.sin(X[:, 0]) + 0.3 * rng.normal(size=120)
    model = SparseGPRegressor(random_state=0, n_candidates=40, hyper="point")
    model.fit(X, y, sample_weight=np.full(120, weight))
    assert model.n_inducing_ < 15
    assert 0.06 < model.noise_[0] < 0.12
    assert np.sqrt(np.mean((model.predict(X) - np.sin(X[:, 0])) ** 2)) < 0.12
