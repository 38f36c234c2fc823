from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from sklearn.datasets import load_breast_cancer, load_wine
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import train_test_split

import winnowgp
from helpers.short_fits import shortest_fits
from winnowgp import SparseGPClassifier
from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.estimators.classification import ClassLabels


def bands(C: int = 2, N: int = 150, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Labels from a wave cut at C − 1 levels, softened by noise; inputs far from the origin."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(100, 106, size=(N, 1))
    height = np.sin(2 * X[:, 0]) + 0.2 * rng.normal(size=N)
    cuts = np.linspace(-1, 1, C + 1)[1:-1]
    return X, np.array(["low", "mid", "top"])[:C][np.searchsorted(cuts, height)]


def classifier(**arguments: Any) -> SparseGPClassifier:
    settings: dict[str, Any] = {"kernel": "rbf", "n_candidates": 30, "random_state": 0} | arguments
    return SparseGPClassifier(**settings)


def paper(**arguments: Any) -> SparseGPClassifier:
    settings: dict[str, Any] = {
        "schedule": "paper",
        "alpha": 0.01,
        "n_candidates": 12,
        "epochs": (60, 30, 60),
    }
    return classifier(**(settings | arguments))


FULL = paper(epochs=(300, 150, 150))


# The paper's schedule once for each likelihood and once for each kind of step by default.
@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize(
    ("model", "C"),
    [
        pytest.param(classifier(), 2, id="fast-2"),
        pytest.param(classifier(), 3, id="fast-3"),
        pytest.param(FULL, 2, id="paper-2", marks=pytest.mark.slow),
        pytest.param(paper(epochs=(150, 100, 80)), 3, id="paper-3"),
        pytest.param(paper(epochs=(100, 50, 50), batch_size=50), 2, id="minibatches-2"),
        # The paper keeps one draw from q(Z): that of seed 0 loses a bend of the three classes.
        pytest.param(
            paper(random_state=1, epochs=(300, 150, 150), batch_size=50),
            3,
            id="minibatches-3",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_classifier_learns_string_labels_with_few_points(model: SparseGPClassifier, C: int) -> None:
    X, y = bands(C)
    model.fit(X, y)
    assert list(model.classes_) == ["low", "mid", "top"][:C]
    probability = model.predict_proba(X)
    assert probability.shape == (150, C)
    np.testing.assert_allclose(probability.sum(1), 1, rtol=1e-12)
    assert model.score(X, y) > 0.85
    assert (model.predict(X) == model.classes_[probability.argmax(1)]).all()
    assert 0 < model.n_inducing_ < 20
    assert model.inducing_points_.shape == (model.n_inducing_, 1)
    assert model.inclusion_.shape == (len(model.candidates_),)
    assert -150 * np.log(C) < model.elbo_ < 0


def test_log_density_is_the_log_of_the_probability() -> None:
    for C in (2, 3):
        X, y = bands(C, N=60)
        model = paper(epochs=(20, 10, 20)).fit(X, y)
        chosen = model.predict_proba(X)[np.arange(len(y)), np.searchsorted(model.classes_, y)]
        np.testing.assert_allclose(model.log_density(X, y), np.log(chosen), atol=1e-9)
        assert model.log_density(X[:1], ["never seen"]) == -np.inf


@pytest.mark.usefixtures("quickly")
def test_probabilities_are_calibrated() -> None:
    rng = np.random.default_rng(1)
    X = rng.uniform(-3, 3, size=(900, 1))
    truth = 1 / (1 + np.exp(-3 * np.sin(2 * X[:, 0])))
    y = rng.uniform(size=900) < truth
    model = classifier(n_candidates=20).fit(X[:300], y[:300])
    found = model.predict_proba(X[300:])[:, 1]
    assert np.abs(found - truth[300:]).mean() < 0.06
    for low, high in ((0.0, 0.25), (0.25, 0.75), (0.75, 1.0)):
        inside = (found >= low) & (found <= high)
        expected, seen = found[inside].mean(), y[300:][inside].mean()
        # Five standard errors of a frequency, at most.
        assert abs(expected - seen) < 5 * np.sqrt(0.25 / inside.sum())


@pytest.mark.slow
@pytest.mark.parametrize("load", [load_breast_cancer, load_wine])
def test_embedded_data(load) -> None:
    accuracy, nats = [], []
    # One row of a split is 0.006: three say more.
    for split in range(3):
        X, y = load(return_X_y=True)
        X, X_test, y, y_test = train_test_split(X, y, test_size=0.3, random_state=split, stratify=y)
        model = SparseGPClassifier(random_state=0).fit(X, y)
        accuracy.append(model.score(X_test, y_test))
        nats.append(model.log_density(X_test, y_test).mean())
        assert model.n_inducing_ < 40
    assert np.mean(accuracy) >= 0.95
    assert np.mean(nats) > -0.15


def test_same_seed_gives_the_same_fit() -> None:
    X, y = bands(N=60)
    settings: dict[str, Any] = {"random_state": 3, "n_candidates": 12}
    with shortest_fits():
        first, second = (classifier(**settings).fit(X[:30], y[:30]) for _ in range(2))
    np.testing.assert_array_equal(first.inducing_points_, second.inducing_points_)
    np.testing.assert_array_equal(first.predict_proba(X), second.predict_proba(X))


def test_smaller_tolerance_keeps_more_points() -> None:
    X, y = bands(N=40)
    with shortest_fits():
        few, many = (
            classifier(tolerance=t, n_candidates=12).fit(X, y).n_inducing_ for t in (0.1, 0.001)
        )
    assert few < many


@pytest.mark.slow
def test_max_points_sets_the_number_of_points() -> None:
    X, y = bands(N=60)
    assert classifier(max_points=4).fit(X, y).n_inducing_ == 4


def test_boolean_and_integer_labels_with_a_kernel_object() -> None:
    X, y = bands(N=60)
    kernel = ScaleKernel(MaternKernel(nu=1.5))
    brief: dict[str, Any] = {"epochs": (30, 5, 10)}
    model = paper(kernel=kernel, **brief).fit(X, y == "low")
    assert model.predict(X).dtype == bool
    assert paper(kernel="matern52", **brief).fit(X, (y == "low") * 7).predict(X).max() == 7


class TestBadLabels:
    @pytest.mark.parametrize("y", [["one"] * 20, np.zeros(20)])
    def test_one_class_only(self, y) -> None:
        with pytest.raises(InputError, match="at least two classes; got one class only"):
            classifier().fit(np.arange(20.0)[:, None], y)

    def test_floats(self) -> None:
        X = np.linspace(0, 1, 20)[:, None]
        with pytest.raises(ValueError, match="Unknown label type: continuous"):
            classifier().fit(X, np.sin(X[:, 0]))

    def test_nan(self) -> None:
        X, y = np.arange(20.0)[:, None], np.r_[np.nan, np.zeros(9), np.ones(10)]
        with pytest.raises(ValueError, match="NaN"):
            classifier().fit(X, y)

    @pytest.mark.parametrize("missing", [None, pd.NA])
    def test_missing_labels(self, missing) -> None:
        y = np.array(["a", "b"] * 10, dtype=object)
        y[3] = missing
        with pytest.raises(InputError, match="`y` must not have missing labels; got 1"):
            classifier().fit(np.arange(20.0)[:, None], y)

    def test_labels_of_another_length(self) -> None:
        X, y = bands()
        model = paper(epochs=(1, 1, 1)).fit(X, y)
        with pytest.raises(InputError, match="one label per row, 150; got shape"):
            model.log_density(X, y[:3])

    def test_batch_size_with_the_fast_schedule_is_refused(self) -> None:
        with pytest.raises(InputError, match="`batch_size` is for `schedule='paper'`"):
            classifier(batch_size=10).fit(*bands())

    def test_predicting_before_fitting(self) -> None:
        for method in ("predict", "predict_proba"):
            with pytest.raises(NotFittedError):
                getattr(classifier(), method)([[1.0]])


def test_labels_of_two_types_are_refused() -> None:
    labels = np.array(["a", 1, "b", 2.5], dtype=object)
    with pytest.raises(InputError, match=r"`y` must have labels of one type; got str and int.*'a'"):
        ClassLabels.of(labels)


def test_strings_in_an_object_array_are_classes() -> None:
    found, index = ClassLabels.of(np.array(["b", "a", "b"], dtype=object))
    assert found.classes.tolist() == ["a", "b"]
    assert index.tolist() == [1, 0, 1]


@pytest.mark.parametrize(("label", "words"), [(1, "1"), ("yes", "'yes'"), (True, "True")])
def test_single_class_is_named_in_the_error(label: object, words: str) -> None:
    with pytest.raises(InputError, match=f"got one class only, {words}\\."):
        ClassLabels.of(np.array([label, label]))


@pytest.fixture(scope="module")
def rare() -> tuple[np.ndarray, np.ndarray]:
    """Return rows of two classes, of which 'yes' is rare and nowhere the most probable."""
    rng = np.random.default_rng(0)
    X = rng.uniform(0, 6, size=(96, 1))
    often = np.where(X[:, 0] > 4, 0.3, 0.02)
    return X, np.where(rng.uniform(size=96) < often, "yes", "no")


@pytest.mark.parametrize("given", ["balanced", {"yes": 3.0}])
def test_class_weight_is_a_weight_of_each_row(
    given: Any, rare: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    X, y = rare
    sample_weight = np.where(X[:, 0] > 3, 2.0, 1.0)
    yes = y == "yes"
    if given == "balanced":
        # Both classes have the same sum, half of all weights.
        half = sample_weight.sum() / 2
        each = np.where(yes, half / sample_weight[yes].sum(), half / sample_weight[~yes].sum())
    else:
        each = np.where(yes, 3.0, 1.0)
    brief: dict[str, Any] = {"epochs": (5, 5, 5), "class_weight": given}
    weighted = paper(**brief, checkpoint=tmp_path / "runs").fit(X, y, sample_weight)
    expected = paper(epochs=(5, 5, 5)).fit(X, y, sample_weight * each)
    np.testing.assert_allclose(weighted.predict_proba(X), expected.predict_proba(X), rtol=1e-12)
    loaded: Any = winnowgp.load(weighted.save(tmp_path / "model.winnow"))
    assert loaded.class_weight == given
    weights = torch.tensor(sample_weight)
    source = Dataset.of(torch.tensor(X), torch.tensor(1.0 * yes), weights=weights)
    brief["class_weight"] = given if given == "balanced" else {1: 3.0}
    shared = paper(**brief).fit(source)
    np.testing.assert_allclose(shared.predict_proba(X), expected.predict_proba(X), rtol=1e-12)


def test_balanced_classes_find_the_rare_one(rare: tuple[np.ndarray, np.ndarray]) -> None:
    X, y = rare
    models = [
        paper(epochs=(80, 5, 5), class_weight=weight).fit(X, y) for weight in (None, "balanced")
    ]
    found = [(model.predict(X[y == "yes"]) == "yes").mean() for model in models]
    assert found[0] < 0.3 < 0.6 < found[1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("equal", "must be 'balanced'"),
        ({"maybe": 2.0}, r"labels of `y`, \['no', 'yes'\]; got \['maybe'\]"),
        ({"yes": 0}, "positive number"),
        ([1, 2], "must be 'balanced'"),
    ],
)
def test_wrong_class_weight_is_refused(
    given: Any, message: str, rare: tuple[np.ndarray, np.ndarray]
) -> None:
    with pytest.raises(InputError, match=message):
        paper(class_weight=given).fit(*rare)


@pytest.mark.parametrize("C", [2, 3])
def test_predict_log_proba_is_the_logarithm(C: int) -> None:
    X, y = bands(C)
    model = paper(epochs=(30, 5, 5)).fit(X, y)
    np.testing.assert_allclose(
        np.exp(model.predict_log_proba(X)), model.predict_proba(X), rtol=1e-9
    )


def test_predict_log_proba_of_two_classes_does_not_round_to_zero() -> None:
    X = np.linspace(-3, 3, 60)[:, None]
    model = paper(epochs=(20, 5, 5)).fit(X, X[:, 0] > 0)
    model.posterior_.weights *= 30
    certain = model.predict_log_proba(X)[-1]
    assert model.predict_proba(X)[-1, 0] == 0
    assert -np.inf < certain[0] < -40
