"""Checkpoints of fits that several processes share."""

import json
import sys
from pathlib import Path

import pytest

from helpers import shared_checkpoints as work
from helpers.forks import Forks
from helpers.shared_work import SHARED_WORK, together, torchrun

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")


def test_all_processes_resume_from_the_first(forks: Forks) -> None:
    (unbroken,), (alone,) = (forks.call(together, w, 1) for w in (work.unbroken, work.resumed))
    assert forks.call(together, work.unbroken, 2) == [unbroken] * 2
    for each in forks.call(together, work.resumed, 2):
        assert each["again"] == each["once more"] == unbroken
        # Seven steps were taken before, and a finished fit reports none.
        assert each["steps"] == alone["steps"] == [alone["steps"][0], 0]
        assert each["steps"][0] > 3


def test_only_the_first_process_writes(forks: Forks) -> None:
    assert [each["folder"] for each in forks.call(together, work.resumed, 2)] == [True, False]


def test_once_returns_the_first_processes_value(forks: Forks) -> None:
    assert forks.call(together, work.once, 2) == [[3, 4], [3, 4]]


def test_end_phase_of_first_process_applies_to_all(forks: Forks) -> None:
    (unbroken,), (alone,) = (forks.call(together, w, 1) for w in (work.unbroken, work.early))
    assert alone[0] != unbroken
    assert forks.call(together, work.early, 2) == [alone] * 2


def test_full_disk_warns_once_and_fit_continues(forks: Forks) -> None:
    (unbroken,) = forks.call(together, work.unbroken, 1)
    first, second = forks.call(together, work.full_disk, 2)
    assert first[0] == second[0] == first[2] == second[2] == unbroken
    assert len(first[1]) == 1
    assert "No space left on device" in first[1][0]
    assert second[1] == []


def test_checkpoint_error_is_raised_in_all_processes(forks: Forks) -> None:
    for kind, message in forks.call(together, work.damaged, 2):
        assert kind == "CheckpointError"
        assert "damaged-0/fit.checkpoint is not a checkpoint" in message


def test_different_fits_are_refused_in_all_processes(forks: Forks) -> None:
    for kind, message in forks.call(together, work.different, 2):
        assert kind == "InputError"
        assert message.startswith("all processes must be given the same fit; `model` is SparseGP")
    assert forks.call(together, work.shards, 2) == 2 * [
        [
            "InputError",
            "every process must create the whole source, which `shard` divides; got 203 rows "
            "with 2 inputs and 1 targets, 202 rows with 2 inputs and 1 targets.",
        ]
    ]


@pytest.mark.slow
def test_killed_processes_resume_to_same_result(tmp_path: Path, forks: Forks) -> None:
    message = (SHARED_WORK, "shared_checkpoints:elastic")
    done = torchrun(*message, processes=2, restarts=3, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (unbroken,), (alone,) = (forks.call(together, w, 1) for w in (work.unbroken, work.resumed))
    for rank in range(2):
        each = json.loads((tmp_path / f"elastic-{rank}.json").read_text())
        assert each["attempt"] == 2, done.stderr
        assert each["found"] == unbroken
        # It did not start again: each attempt reports five or six steps that the next does not.
        assert each["steps"] < alone["steps"][0]
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["fit.checkpoint"]
