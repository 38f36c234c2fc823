"""Parameters are never dropped in silence: combinations mean both, or are refused."""

from typing import Any

import numpy as np
import pytest

from helpers.short_fits import short_fits
from winnowgp import GPLVM, DeepGPClassifier, DeepGPRegressor, SparseGPClassifier, SparseGPRegressor
from winnowgp.errors import InputError
from winnowgp.training import budget

rng = np.random.default_rng(0)
X = np.sort(rng.uniform(0, 6, (60, 1)), axis=0)
y = np.sin(2 * X[:, 0]) + 0.1 * rng.normal(size=60)
TABLE = np.c_[np.sin(X), np.cos(X), X]
PAPER: dict[str, Any] = {"schedule": "paper", "alpha": 0.1}
SPARSE = (SparseGPRegressor, SparseGPClassifier)
DEEP = (DeepGPRegressor, DeepGPClassifier)
EVERY = (*SPARSE, *DEEP, GPLVM)

REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    *((kind, {"alpha": 0.1, "tolerance": 0.01}, "`alpha` and `tolerance`") for kind in EVERY),
    *((kind, {**PAPER, "tolerance": 0.01}, "`alpha` and `tolerance`") for kind in EVERY),
    *((kind, {"epochs": (200, 600, 200)}, "`epochs` is for `schedule='paper'`") for kind in SPARSE),
    *((kind, {"alpha": 0.1, "criterion": "predictive"}, "`criterion` is what") for kind in SPARSE),
    *((kind, {"max_points": 5, "criterion": "predictive"}, "as well") for kind in SPARSE),
    *((kind, {"max_predict_us": 5, "criterion": "predictive"}, "as well") for kind in SPARSE),
    *(
        (kind, {**PAPER, "candidates": X[:4], "n_candidates": 9}, "Leave `n_candidates` out")
        for kind in SPARSE
    ),
    (SparseGPRegressor, {**PAPER, "precision": "mixed"}, "`precision` is for `schedule='fast'`"),
    *((kind, {"layers": 1, "width": 2}, "`width` is for hidden layers") for kind in DEEP),
    *((kind, {"layers": 1, "hidden_mean": "zero"}, "`hidden_mean` is for") for kind in DEEP),
    *((kind, {"layers": 1, "skip_connections": True}, "`skip_conn") for kind in DEEP),
    (GPLVM, {"epochs": 300}, "`epochs` is for `schedule='paper'`"),
    (GPLVM, {**PAPER, "max_iter": 300}, "`max_iter` is for `schedule='fast'`"),
    (GPLVM, {**PAPER, "candidates": X[:4].repeat(2, 1), "n_candidates": 9}, "Leave `n_cand"),
]


@pytest.mark.parametrize(("kind", "parameters", "message"), REFUSED)
def test_combination_without_meaning_is_refused(
    kind: Any, parameters: dict[str, Any], message: str
) -> None:
    data = (TABLE,) if kind is GPLVM else (X, y > 0 if "Classifier" in kind.__name__ else y)
    with pytest.raises(InputError, match=message):
        kind(**parameters).fit(*data)


@pytest.fixture(scope="module")
def within_tolerance() -> SparseGPRegressor:
    with short_fits():
        return SparseGPRegressor("rbf", tolerance=0.05, random_state=0).fit(X, y)


@pytest.mark.usefixtures("quickly")
def test_tolerance_with_max_points_keeps_fewer_if_they_will_do(
    within_tolerance: SparseGPRegressor,
) -> None:
    both = SparseGPRegressor("rbf", tolerance=0.05, max_points=50, random_state=0).fit(X, y)
    assert both.n_inducing_ == within_tolerance.n_inducing_ < 30
    assert both.elbo_ == within_tolerance.elbo_


@pytest.mark.usefixtures("quickly")
def test_tolerance_with_max_points_keeps_at_most_those(
    within_tolerance: SparseGPRegressor,
) -> None:
    both = SparseGPRegressor("rbf", tolerance=0.05, max_points=4, random_state=0).fit(X, y)
    assert both.n_inducing_ == 4 < within_tolerance.n_inducing_
    # The gap is to the exact evidence, as without a limit.
    assert both.elbo_gap_ > 0.05
    assert both.growth_limit_ == "max_points"
    four = SparseGPRegressor("rbf", max_points=4, random_state=0).fit(X, y)
    assert both.elbo_ == pytest.approx(four.elbo_, abs=1.0)


@pytest.mark.usefixtures("quickly")
def test_tolerance_with_max_predict_us_means_both(within_tolerance: SparseGPRegressor) -> None:
    both = SparseGPRegressor("rbf", tolerance=0.05, max_predict_us=1e6, random_state=0).fit(X, y)
    assert both.n_inducing_ == within_tolerance.n_inducing_


@pytest.mark.usefixtures("quickly")
def test_max_points_alone_keeps_as_many_as_useful(within_tolerance: SparseGPRegressor) -> None:
    more = within_tolerance.n_inducing_ + 2
    assert SparseGPRegressor("rbf", max_points=more, random_state=0).fit(X, y).n_inducing_ == more


def test_gplvm_tolerance_with_max_points_means_both() -> None:
    settings: dict[str, Any] = {"n_components": 1, "max_iter": 9, "random_state": 0}
    enough = GPLVM(tolerance=0.05, max_points=30, **settings).fit(TABLE).n_inducing_
    assert GPLVM(tolerance=0.05, max_points=2, **settings).fit(TABLE).n_inducing_ == 2 < enough < 30


@pytest.mark.slow
def test_deep_tolerance_with_max_cost_means_both() -> None:
    settings: dict[str, Any] = {
        "epochs": (2, 10, 2),
        "n_candidates": 8,
        "hidden_mean": "identity",
        "random_state": 0,
    }
    few = DeepGPRegressor(tolerance=0.01, max_cost=8, **settings).fit(X, y)
    assert sum(M**2 for M in few.n_inducing_) <= 8
    plenty = DeepGPRegressor(tolerance=0.5, max_cost=1e6, **settings).fit(X, y)
    assert plenty.n_inducing_ == DeepGPRegressor(tolerance=0.5, **settings).fit(X, y).n_inducing_


@pytest.mark.filterwarnings("ignore::winnowgp.errors.FitWarning")
@pytest.mark.usefixtures("quickly")
def test_n_candidates_is_the_most_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    # The exact evidence of all rows is not affordable, and five rows explain nothing.
    monkeypatch.setitem(budget.WORK, "cpu", 3e9)
    rows = rng.uniform(0, 6, (300, 1))
    noisy = np.sin(14 * rows[:, 0]) + 0.5 * rng.normal(size=300)
    assert SparseGPRegressor("rbf", n_candidates=5, random_state=0).fit(rows, noisy).n_inducing_ < 6


def test_n_candidates_is_the_most_that_a_gplvm_keeps() -> None:
    model = GPLVM(1, n_candidates=3, tolerance=1e-3, max_iter=9, random_state=0).fit(TABLE)
    assert model.n_inducing_ <= 3
