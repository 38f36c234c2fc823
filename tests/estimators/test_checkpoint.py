"""Estimators resume from checkpoints; checkpoints of other fits are refused."""

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import cross_val_score

from winnowgp import GPLVM, Checkpoint, DeepGPClassifier, SparseGPRegressor, load
from winnowgp.errors import CheckpointError, InputError
from winnowgp.estimators import base as base_module
from winnowgp.estimators import selection
from winnowgp.training import MaxPoints, Progress

pytestmark = pytest.mark.usefixtures("quick_module")

PAPER: dict[str, Any] = {
    "schedule": "paper",
    "alpha": 0.1,
    "epochs": (2, 4, 2),
    "n_candidates": 6,
}


class Stopped(Exception):
    """Something else than the library would raise."""


def stop(progress: Any) -> None:
    if progress.step == 2:
        raise Stopped


def rows(N: int = 20) -> tuple[np.ndarray, np.ndarray]:
    X = np.linspace(0, 6, N)[:, None]
    return X, np.sin(X[:, 0])


def stopped(model: Any, *rows: np.ndarray, after: int = 0) -> None:
    """Fit, and be stopped at the second step of a phase, or of one after some steps."""
    events = count()

    def watch(progress: Any) -> None:
        if next(events) >= after:
            stop(progress)

    with pytest.raises(Stopped):
        model.set_params(callbacks=watch).fit(*rows)


def same(a: SparseGPRegressor, b: SparseGPRegressor) -> bool:
    return a.elbo_ == b.elbo_ and np.array_equal(a.inducing_points_, b.inducing_points_)


# Fits of a few steps without a seed may select all candidates, or none.
@pytest.mark.filterwarnings("ignore::winnowgp.errors.AllCandidatesWarning")
@pytest.mark.filterwarnings("ignore::winnowgp.errors.NoInducingPointsWarning")
def test_fit_without_random_state_resumes_with_the_drawn_seed(tmp_path: Path) -> None:
    """Two copies of one folder end alike; two fits without a folder do not."""
    first, second = tmp_path / "first", tmp_path / "second"
    stopped(SparseGPRegressor(**PAPER, checkpoint=first), *rows())
    second.mkdir()
    for path in first.iterdir():
        (second / path.name).write_bytes(path.read_bytes())
    a, b = (SparseGPRegressor(**PAPER, checkpoint=where).fit(*rows()) for where in (first, second))
    assert same(a, b)
    free = [SparseGPRegressor(**PAPER).fit(*rows()) for _ in range(2)]
    assert not same(*free)


def test_max_predict_us_is_measured_once_per_checkpoint(tmp_path: Path, monkeypatch) -> None:
    planned: list[Any] = []

    def fit(*_: Any, schedule: Any, **__: Any) -> None:
        planned.append(schedule.goal)
        raise Stopped

    measured = iter([3, 5, 7])
    monkeypatch.setattr(selection, "points_within", lambda *_, **__: next(measured))
    monkeypatch.setattr(base_module, "fit", fit)
    for where in (tmp_path / "kept", tmp_path / "kept", tmp_path / "other", None):
        stopped(SparseGPRegressor(max_predict_us=50.0, checkpoint=where), *rows())
    assert planned == [MaxPoints(3), MaxPoints(3), MaxPoints(5), MaxPoints(7)]
    # Not for another request, though.
    with pytest.raises(CheckpointError, match=r"`max_predict_us` was 50\.0 and is 60\.0"):
        SparseGPRegressor(max_predict_us=60.0, checkpoint=tmp_path / "kept").fit(*rows())


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"alpha": 0.2}, "`alpha` was 0.1 and is 0.2"),
        ({"random_state": 1}, "`random_state` was 0 and is 1"),
        ({"kernel": "matern32"}, "`kernel` was 'auto' and is 'matern32'"),
    ],
)
def test_checkpoint_of_other_parameters_is_refused_by_name(
    tmp_path: Path, changed: dict[str, Any], named: str
) -> None:
    settings = {**PAPER, "random_state": 0}
    stopped(SparseGPRegressor(**settings, checkpoint=tmp_path), *rows())
    with pytest.raises(CheckpointError, match=named):
        SparseGPRegressor(**{**settings, **changed}, checkpoint=tmp_path).fit(*rows())
    with pytest.raises(CheckpointError, match="`X` was"):
        SparseGPRegressor(**settings, checkpoint=tmp_path).fit(*rows(21))
    with pytest.raises(CheckpointError, match="`estimator` was 'SparseGPRegressor'"):
        GPLVM(1, checkpoint=tmp_path).fit(rows()[0])


def test_random_state_object_is_identified_by_its_state(tmp_path: Path) -> None:
    def settings(seed: int) -> SparseGPRegressor:
        state = np.random.RandomState(seed)
        return SparseGPRegressor(**PAPER, random_state=state, checkpoint=tmp_path)

    stopped(settings(3), *rows())
    with pytest.raises(CheckpointError, match="`random_state` was"):
        settings(4).fit(*rows())
    whole = SparseGPRegressor(**PAPER, random_state=np.random.RandomState(3))
    assert same(settings(3).fit(*rows()), whole.fit(*rows()))


def test_cross_validation_reuses_one_checkpoint_folder(tmp_path: Path) -> None:
    settings = {**PAPER, "random_state": 0}
    plain = cross_val_score(SparseGPRegressor(**settings), *rows(), cv=3)
    kept = cross_val_score(SparseGPRegressor(**settings, checkpoint=tmp_path), *rows(), cv=3)
    assert np.array_equal(plain, kept)


def test_checkpoint_argument_is_cloned_and_not_saved(tmp_path: Path) -> None:
    where = Checkpoint(tmp_path / "kept", every=5)
    for given in (None, str(tmp_path / "kept"), tmp_path / "kept", where):
        copied: Any = clone(SparseGPRegressor(checkpoint=given))
        assert copied.checkpoint == given
    model = SparseGPRegressor(**PAPER, random_state=0, checkpoint=where).fit(*rows())
    model.save(tmp_path / "model.winnow")
    assert load(tmp_path / "model.winnow").checkpoint is None


@pytest.mark.parametrize("wrong", [3, True, b"folder"])
def test_checkpoint_that_is_no_folder_is_refused(wrong: Any) -> None:
    with pytest.raises(InputError, match="`checkpoint` must be a folder"):
        SparseGPRegressor(checkpoint=wrong).fit(*rows())


def test_gplvm_n_iter_counts_steps_of_all_runs(tmp_path: Path) -> None:
    table = np.stack([np.sin(rows()[0][:, 0]), rows()[0][:, 0]], axis=1)
    settings: dict[str, Any] = {"schedule": "paper", "alpha": 0.1, "epochs": 5, "n_candidates": 4}
    where = Checkpoint(tmp_path, every=0)
    stopped(GPLVM(1, **settings, random_state=0, checkpoint=where), table)
    events: list[Progress] = []
    model = GPLVM(1, **settings, random_state=0, checkpoint=where, callbacks=events.append)
    assert model.fit(table).n_iter_ == 5
    assert [progress.step for progress in events] == [2, 3, 4, 5]


def test_resumed_deep_fit_does_not_repeat_the_initial_comparison(
    tmp_path: Path, monkeypatch
) -> None:
    settings: dict[str, Any] = {"epochs": (2, 10, 2), "n_candidates": 5, "random_state": 0}
    X, y = rows()
    steps, real = [0], torch.optim.Adam.step

    def step(self: Any, *arguments: Any) -> Any:
        steps[0] += 1
        return real(self, *arguments)

    monkeypatch.setattr(torch.optim.Adam, "step", step)
    whole, all_steps = DeepGPClassifier(2, **settings).fit(X, y > 0), steps[0]
    raced = 3 * 2 + 2 * 2
    there = Checkpoint(tmp_path, 0)
    stopped(DeepGPClassifier(2, **settings, checkpoint=there), X, y > 0, after=raced)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"fit.checkpoint"}
    steps[0] = 0
    again = DeepGPClassifier(2, **settings, checkpoint=Checkpoint(tmp_path, 0)).fit(X, y > 0)
    assert np.array_equal(again.predict_proba(X), whole.predict_proba(X))
    # The race trains one layer of one start and two of the other, two steps each, then each start
    # for two steps; and the fit had taken one step.
    assert steps[0] == all_steps - raced - 1
