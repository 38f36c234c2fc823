"""A warm start continues an earlier fit with fewer evaluations than a cold one."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import winnowgp
from helpers.short_fits import smaller_sizes
from winnowgp import SparseGP, SparseGPClassifier, SparseGPRegressor
from winnowgp.errors import InputError
from winnowgp.models import VariationalGP

pytestmark = pytest.mark.usefixtures("one_size")

rng = np.random.default_rng(0)
X = rng.uniform(0, 6, (66, 2))
y = np.sin(3 * X[:, 0]) + 0.5 * X[:, 1] + 0.1 * rng.normal(size=66)


@contextmanager
def evaluations() -> Iterator[Counter[str]]:
    """Count the values of bounds that L-BFGS asks for: of the exact evidence and of all rows."""
    counts = Counter[str]()

    def counted(name: str, bound: Any) -> Any:
        def counting(model: Any, data: Any) -> Callable[[], Any]:
            value = bound(model, data)

            def call() -> Any:
                counts[name] += 1
                return value()

            return call

        return counting

    with pytest.MonkeyPatch.context() as patch:
        for kind in (SparseGP, VariationalGP):
            for name in ("dense_bound", "chunked_bound"):
                patch.setattr(kind, name, counted(name, getattr(kind, name)))
        yield counts


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a default fit to some of the rows."""
    with smaller_sizes(0):
        model = SparseGPRegressor(random_state=0, warm_start=True).fit(X[:60], y[:60])
    return model.save(tmp_path_factory.mktemp("models") / "model.winnow")


def loaded(path: Path, **parameters: Any) -> Any:
    """Return the saved model, whose next fits have one posterior instead of a mixture."""
    model: Any = winnowgp.load(path)
    return model.set_params(hyper="point", **parameters)


def test_warm_start_reaches_the_cold_fit_with_fewer_evaluations(saved: Path) -> None:
    model = loaded(saved)
    with evaluations() as warm:
        model.fit(X, y)
    with evaluations() as cold:
        again = SparseGPRegressor(random_state=0, hyper="point").fit(X, y)
    assert 3 * warm["dense_bound"] < cold["dense_bound"]
    assert warm.total() < 0.7 * cold.total()
    assert model.kernel_name_ == again.kernel_name_
    assert model.elbo_ > again.elbo_ - 1
    assert abs(model.n_inducing_ - again.n_inducing_) < 4
    assert model.elbo_gap_ < 0.01


@pytest.mark.parametrize("points", [3, 18])
def test_warm_start_with_another_number_of_points(saved: Path, points: int) -> None:
    with evaluations() as counts:
        model = loaded(saved, max_points=points).fit(X, y)
    assert model.n_inducing_ == points
    assert counts["dense_bound"] < 120


def test_warm_start_with_given_inducing_points(saved: Path) -> None:
    model = loaded(saved, inducing_points=X[:9]).fit(X, y)
    np.testing.assert_allclose(model.inducing_points_, X[:9], rtol=1e-12)


def test_warm_start_is_not_the_recorded_fit_of_a_checkpoint(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"inducing_points": X[:3], "kernel": "rbf", "checkpoint": tmp_path}
    settings["hyper"] = "point"
    model = SparseGPRegressor(**settings, random_state=0).fit(X[:40], y[:40])
    with evaluations() as counts:
        model.set_params(warm_start=True).fit(X[:40], y[:40])
    assert counts["chunked_bound"] > 0


def test_warm_start_without_an_earlier_fit_is_a_cold_one(quickly: None) -> None:
    models = [
        SparseGPRegressor("rbf", inducing_points=X[:3], warm_start=warm).fit(X[:30], y[:30])
        for warm in (False, True)
    ]
    assert models[0].elbo_ == pytest.approx(models[1].elbo_, abs=0.1)


def test_warm_start_from_a_constant_is_a_cold_one() -> None:
    """A fit that explained its rows as noise must not keep later ones from the function."""
    steep = np.linspace(0, 1, 40)[:, None]
    model = SparseGPRegressor("rbf", random_state=0, warm_start=True, hyper="point")
    model.fit(steep[:8], rng.normal(size=8))
    assert model.fit(steep, np.sin(9 * steep[:, 0])).score(steep, np.sin(9 * steep[:, 0])) > 0.99


def test_warm_start_keeps_new_rows_that_are_all_needed() -> None:
    """Points of the earlier fit must not take the place of rows that it did not have."""
    rows, wave = X[:11], np.sin(X[:11, 0]) * np.cos(0.5 * X[:11, 1])
    model, cold = (
        SparseGPRegressor("rbf", random_state=0, warm_start=warm, hyper="point")
        for warm in (True, False)
    )
    model.fit(rows[:10], wave[:10])
    cold.fit(rows, wave)
    assert model.fit(rows, wave).elbo_ > cold.elbo_ - 0.5


def test_classifier_warm_start_has_fewer_evaluations() -> None:
    model = SparseGPClassifier("rbf", inducing_points=X[:3], warm_start=True)
    counts = []
    for _ in range(2):
        with evaluations() as count:
            model.fit(X[:30], y[:30] > 1.5)
        counts.append(count.total())
    assert 3 * counts[1] < counts[0]


@pytest.mark.parametrize(
    ("parameters", "columns", "message"),
    [
        ({"kernel": "matern32 * linear"}, 2, "needs the kernel of the earlier fit"),
        ({}, 1, "needs as many columns as the earlier fit, 2; got 1"),
        ({"candidates": "kmeans"}, 2, "got candidates='kmeans' as well"),
        ({"schedule": "paper", "alpha": 0.1}, 2, "`warm_start` is for `schedule='fast'`"),
        ({"likelihood": "student-t"}, 2, "needs the .* of the earlier fit"),
    ],
)
def test_warm_start_from_another_kind_of_model_is_refused(
    saved: Path, parameters: dict[str, Any], columns: int, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        loaded(saved, **parameters).fit(X[:, :columns], y)
