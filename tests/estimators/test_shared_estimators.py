"""Classifiers and deep estimators of sources that processes share."""

import sys
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone

from helpers import shared_estimators as work
from helpers.forks import Forks
from helpers.shared_work import together
from winnowgp.data import ArraySource, Dataset, shard
from winnowgp.errors import InputError
from winnowgp.estimators import DeepGPRegressor, SparseGPClassifier

pytestmark = pytest.mark.usefixtures("quick_module")

SEEDED = [name for name in work.ESTIMATORS if name != "a seed of chance"]


def unfitted(estimator: Any) -> Any:
    return clone(estimator)


@pytest.mark.parametrize("name", SEEDED)
def test_fit_of_a_source_in_memory_equals_fit_of_its_rows(name: str) -> None:
    estimator, targets = work.ESTIMATORS[name]
    fitted = unfitted(estimator).fit(work.source(targets))
    assert work.summary(fitted) == work.summary(unfitted(estimator).fit(work.X, targets))
    assert fitted.n_features_in_ == 2
    if name != "layers":
        assert fitted.classes_.tolist() == [0, 1, 2]


@pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")
def test_two_processes_give_the_fit_of_one(forks: Forks) -> None:
    (alone,) = forks.call(together, work.fits, 1)
    first, second = forks.call(together, work.fits, 2)
    assert first == second
    assert {tuple(found["rows"]) for found in alone.values()} == {(12,)}
    assert {tuple(found["rows"]) for found in first.values()} == {(6,)}
    for name in SEEDED:
        for finding in ("bound", "predicted"):
            np.testing.assert_allclose(
                first[name][finding], alone[name][finding], rtol=1e-8, atol=1e-8
            )
        for mine, theirs in zip(first[name]["points"], alone[name]["points"], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-8, atol=1e-8)


def test_rows_may_have_weights_and_single_precision() -> None:
    estimator, targets = work.ESTIMATORS["classes"]
    weights = np.where(np.arange(len(targets)) % 3, 1.0, 2.0)
    X, y = (torch.tensor(part, dtype=torch.float32) for part in (work.X, targets))
    rows = Dataset.of(X, y, weights=torch.tensor(weights, dtype=torch.float32))
    found = unfitted(estimator).fit(rows)
    expected = unfitted(estimator).fit(X.double().numpy(), targets, sample_weight=weights)
    assert work.summary(found) == work.summary(expected)


ROWS = torch.linspace(0, 1, 6, dtype=torch.float64)[:, None]


@pytest.mark.parametrize(
    ("estimator", "given", "message"),
    [
        (
            SparseGPClassifier(),
            (Dataset.of(ROWS, ROWS),),
            "below 2..53 as classes; got 0.2. Number",
        ),
        (
            SparseGPClassifier(),
            (Dataset.of(ROWS, 0 * ROWS[:, [0, 0]]),),
            "one target column of classes; got 2",
        ),
        (SparseGPClassifier(), (Dataset.of(ROWS, 0 * ROWS),), "at least two classes"),
        (SparseGPClassifier(), (Dataset.of(ROWS, ROWS), [0]), "leave out `y`"),
        (DeepGPRegressor(), (ArraySource(ROWS.numpy(), ROWS.numpy()),), "6 rows in memory at once"),
        (DeepGPRegressor(), (Dataset.of(ROWS, ROWS), None, [1]), "leave out `y`, `sample_w"),
        (
            SparseGPClassifier(),
            (Dataset.of(ROWS, (5 * ROWS).round() * 1e19),),
            "below 2..53 as classes; got 1e.19",
        ),
    ],
)
def test_invalid_source_is_refused(estimator: Any, given: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        estimator.fit(*given)


@pytest.mark.parametrize("name", SEEDED)
def test_prediction_of_a_source_is_refused(name: str) -> None:
    estimator, targets = work.ESTIMATORS[name]
    rows = work.source(targets)
    fitted = unfitted(estimator).fit(rows)
    with pytest.raises(InputError, match=r"got a ShardedSource\. Predict its rows in chunks"):
        fitted.predict(rows)
    with pytest.raises(InputError, match=r"got a ShardedSource\. Predict its rows in chunks"):
        fitted.log_density(rows, targets)


def test_advice_for_a_shared_source_on_disk_works() -> None:
    source = ArraySource(work.X, work.CLASSES.astype(float))
    estimator = unfitted(work.ESTIMATORS["classes"][0])
    told = r"read them with `next\(source\.chunks\(source\.N\)\)`, and shard them after that"
    with pytest.raises(InputError, match=told):
        estimator.fit(shard(source))
    fitted = estimator.fit(shard(next(source.chunks(source.N))))
    expected = unfitted(estimator).fit(work.X, work.CLASSES)
    assert work.summary(fitted) == work.summary(expected)
