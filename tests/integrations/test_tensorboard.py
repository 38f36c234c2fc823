"""Events that TensorBoard reads from the callback."""

import pickle
from copy import deepcopy
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from helpers.short_fits import smaller_sizes
from winnowgp import Checkpoint, Dataset, SparseGP, fit
from winnowgp.data import hills
from winnowgp.errors import InputError, MissingExtraError
from winnowgp.integrations import TensorBoard
from winnowgp.training import FastSchedule, Progress, Tolerance
from winnowgp.training import checkpoint as checkpoint_log


def step(number: int, phase: str = "inclusion", objective: float = 0.0) -> Progress:
    inclusion = (torch.full((4,), 0.5),) if phase == "inclusion" else None
    return Progress(phase, number, 20, objective, inclusion, (torch.zeros(4, 1),))


def read(folder: Path) -> Any:
    # Zero loads all of them.
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    found.Reload()
    return found


def curve(found: Any, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in found.Scalars(name)]


def test_tensorboard_writes_curves_and_histograms(tmp_path: Path) -> None:
    callback = TensorBoard(tmp_path, histogram_every=10)
    for number in (1, 2):
        callback(step(number, "pre-train", objective=10.0 * number))
    for number in range(1, 21):
        callback(step(number, objective=float(number)))
    callback.close()
    found = read(tmp_path)
    assert curve(found, "objective/pre-train") == [(1, 10.0), (2, 20.0)]
    assert curve(found, "objective/inclusion") == [(2 + n, float(n)) for n in range(1, 21)]
    assert curve(found, "points") == [(n, 4.0) for n in range(1, 23)]
    assert curve(found, "expected points") == [(n, 2.0) for n in range(3, 23)]
    assert [event.step for event in found.Histograms("inclusion")] == [12, 22]


def test_tensorboard_resumed_fit_writes_no_step_twice(tmp_path: Path) -> None:
    killed = TensorBoard(tmp_path)
    for number in range(1, 4):
        killed(step(number, objective=float(number)))
    memory = killed.state_dict()
    # Two more steps reach the disk, and then it is killed.
    for number in (4, 5):
        killed(step(number, objective=-1.0))
    killed.close()
    again = TensorBoard(tmp_path)
    again.load_state_dict(memory)
    for number in (4, 5, 6):
        again(step(number, objective=float(number)))
    again.close()
    assert curve(read(tmp_path), "objective/inclusion") == [(n, float(n)) for n in range(1, 7)]


class Stopped(Exception):
    """An exception that the library does not raise."""


def fast_fit(folder: Path, checkpoint: Checkpoint | None, stop: int = 0) -> list[str]:
    """Fit with curves in a folder, stop at a step, and return the phases that were reported."""
    reported: list[str] = []

    def watch(progress: Progress) -> None:
        reported.append(progress.phase)
        if len(reported) == stop:
            raise Stopped

    rows = hills()
    data = Dataset(rows.X[::6], rows.Y[::6])
    # Only points move: warming up takes most of the time and tells a single step.
    kernel = ScaleKernel(RBFKernel()).requires_grad_(False)
    model = SparseGP(kernel, data.X[:0], noise=0.1)
    model.likelihood.requires_grad_(False)
    board = TensorBoard(folder)
    schedule = FastSchedule(Tolerance(0.01), n_candidates=7, rounds=2, inclusion_steps=10)
    try:
        with smaller_sizes(0):
            fit(model, data, schedule=schedule, callbacks=[board, watch], checkpoint=checkpoint)
    finally:
        # As if all that was written before it was killed had reached the disk.
        board.close()
    return reported


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = read(folder)
    return {name: curve(found, name) for name in found.Tags()["scalars"]}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, Any]]:
    """The phase of each step of a fast fit, and its curves."""
    folder = tmp_path_factory.mktemp("undisturbed")
    phases = fast_fit(folder, None)
    found = curves(folder)
    assert [step for step, _ in found["points"]] == list(range(1, len(phases) + 1))
    assert {f"objective/{phase}" for phase in phases} == {*found, "objective/initialisation"} - {
        "points"
    }
    return phases, found


@pytest.mark.parametrize(
    ("moment", "events"),
    [
        ("first", 0),
        ("selection", 0),
        ("optimisation", 0),
        ("last", 0),
        ("selection", 3),
        ("last", 1000),
    ],
)
def test_tensorboard_resumed_fast_fit_keeps_whole_curve(
    moment: str, events: int, undisturbed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step twice and none missing, whenever it was stopped and however often it was written."""
    ticks = count()
    monkeypatch.setattr(checkpoint_log, "monotonic", lambda: next(ticks))
    phases, expected = undisturbed
    choose = 1 + phases.index("selection", phases.index("optimisation"))
    stop = {"first": 1, "selection": choose, "optimisation": choose + 3, "last": len(phases)}[
        moment
    ]
    where = Checkpoint(tmp_path / "kept", events)
    with pytest.raises(Stopped):
        fast_fit(tmp_path / "curves", where, stop)
    reported = fast_fit(tmp_path / "curves", where)
    # The last steps are reported again, whether they were written or not.
    assert reported == phases[-len(reported) :]
    assert len(phases) - stop < len(reported)
    assert curves(tmp_path / "curves") == expected


def test_tensorboard_finished_fit_opens_no_file(undisturbed: Any, tmp_path: Path) -> None:
    where, folder = Checkpoint(tmp_path / "kept"), tmp_path / "curves"
    assert fast_fit(folder, where) == undisturbed[0]
    files = {path: path.read_bytes() for path in folder.iterdir()}
    for _ in range(2):
        assert fast_fit(folder, where) == []
    assert {path: path.read_bytes() for path in folder.iterdir()} == files
    assert curves(folder) == undisturbed[1]


@pytest.mark.parametrize("copied", [deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
def test_tensorboard_callback_can_be_copied_while_open(tmp_path: Path, copied: Any) -> None:
    """As `sklearn.clone` and `joblib` do."""
    callback = TensorBoard(tmp_path)
    callback(step(1))
    other = copied(callback)
    other(step(2))
    assert (callback.state_dict(), other.state_dict()) == ({"step": 1}, {"step": 2})
    callback.close()
    other.close()


def test_tensorboard_invalid_interval_raises(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`histogram_every`"):
        TensorBoard(tmp_path, histogram_every=0)


def test_tensorboard_missing_extra_raises(tmp_path: Path, monkeypatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'winnowgp\[tensorboard\]'"):
        TensorBoard(tmp_path)
