"""What TensorBoard itself reads of a fit that was watched."""

import pickle
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from winnowgp.errors import InputError, MissingExtraError
from winnowgp.integrations import TensorBoard
from winnowgp.training import Progress

pytest.importorskip("tensorboard", reason="needs winnowgp[tensorboard]")


def step(number: int, phase: str = "inclusion", objective: float = 0.0) -> Progress:
    inclusion = torch.full((4,), 0.5) if phase == "inclusion" else None
    return Progress(phase, number, 20, objective, inclusion, torch.zeros(4, 1))


def read(folder: Path) -> Any:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    # Zero stands for all of them.
    found = reader.EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    found.Reload()
    return found


def curve(found: Any, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in found.Scalars(name)]


def test_curves_and_histograms_are_where_tensorboard_looks_for_them(tmp_path: Path) -> None:
    watcher = TensorBoard(tmp_path, histogram_every=10)
    for number in (1, 2):
        watcher(step(number, "pre-train", objective=10.0 * number))
    for number in range(1, 21):
        watcher(step(number, objective=float(number)))
    watcher.close()
    found = read(tmp_path)
    assert curve(found, "objective/pre-train") == [(1, 10.0), (2, 20.0)]
    assert curve(found, "objective/inclusion") == [(2 + n, float(n)) for n in range(1, 21)]
    assert curve(found, "points") == [(n, 4.0) for n in range(1, 23)]
    assert curve(found, "expected points") == [(n, 2.0) for n in range(3, 23)]
    assert [event.step for event in found.Histograms("inclusion")] == [12, 22]


def test_a_fit_that_goes_on_writes_no_step_twice(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("copied", [deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
def test_a_watcher_can_be_copied_while_its_file_is_open(tmp_path: Path, copied: Any) -> None:
    """As `sklearn.clone` and `joblib` do."""
    watcher = TensorBoard(tmp_path)
    watcher(step(1))
    other = copied(watcher)
    other(step(2))
    assert (watcher.state_dict(), other.state_dict()) == ({"step": 1}, {"step": 2})
    watcher.close()
    other.close()


def test_senseless_intervals_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`histogram_every`"):
        TensorBoard(tmp_path, histogram_every=0)


def test_the_extra_that_is_missing_is_named(tmp_path: Path, monkeypatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'winnowgp\[tensorboard\]'"):
        TensorBoard(tmp_path)
