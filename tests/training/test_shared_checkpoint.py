"""Checkpoints of fits that several processes share, and what happens when one of them ends."""

import json
import sys
from pathlib import Path

import pytest

from helpers import shared_checkpoints as work
from helpers.forks import Forks
from helpers.launched import SHARED_WORK, torchrun
from helpers.shared_work import together

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")


def test_all_go_on_from_what_the_first_has_read(forks: Forks) -> None:
    (unbroken,), (alone,) = (forks.call(together, w, 1) for w in (work.unbroken, work.resumed))
    assert forks.call(together, work.unbroken, 2) == [unbroken] * 2
    for each in forks.call(together, work.resumed, 2):
        assert each["again"] == each["once more"] == unbroken
        # Seven steps were over before, and a fit that had ended is told of nothing.
        assert each["told"] == alone["told"] == [alone["told"][0], 0]
        assert each["told"][0] > 3


def test_only_the_first_writes(forks: Forks) -> None:
    assert [each["folder"] for each in forks.call(together, work.resumed, 2)] == [True, False]


def test_what_chance_or_a_clock_decides_is_decided_by_the_first(forks: Forks) -> None:
    assert forks.call(together, work.once, 2) == [[3, 4], [3, 4]]


def test_the_first_ends_a_phase_for_all(forks: Forks) -> None:
    (unbroken,), (alone,) = (forks.call(together, w, 1) for w in (work.unbroken, work.early))
    assert alone[0] != unbroken
    assert forks.call(together, work.early, 2) == [alone] * 2


def test_a_full_disk_is_said_once_and_the_fit_goes_on(forks: Forks) -> None:
    (unbroken,) = forks.call(together, work.unbroken, 1)
    first, second = forks.call(together, work.full_disk, 2)
    assert first[0] == second[0] == first[2] == second[2] == unbroken
    assert len(first[1]) == 1
    assert "No space left on device" in first[1][0]
    assert second[1] == []


def test_errors_of_the_first_are_raised_in_all(forks: Forks) -> None:
    for kind, words in forks.call(together, work.damaged, 2):
        assert kind == "CheckpointError"
        assert "damaged-0/fit.checkpoint is not a checkpoint" in words


def test_different_fits_are_refused_in_all(forks: Forks) -> None:
    for kind, words in forks.call(together, work.different, 2):
        assert kind == "InputError"
        assert words.startswith("all processes must be given the same fit; `model` is SparseGP")
    assert forks.call(together, work.shards, 2) == 2 * [
        [
            "InputError",
            "every process must create the whole source, which `shard` divides; got 203 rows "
            "with 2 inputs and 1 targets, 202 rows with 2 inputs and 1 targets.",
        ]
    ]


@pytest.mark.slow
def test_a_fit_whose_processes_are_killed_ends_with_the_same_answer(
    tmp_path: Path, forks: Forks
) -> None:
    words = (SHARED_WORK, "shared_checkpoints:elastic")
    done = torchrun(*words, processes=2, restarts=3, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (unbroken,), (alone,) = (forks.call(together, w, 1) for w in (work.unbroken, work.resumed))
    for rank in range(2):
        each = json.loads((tmp_path / f"elastic-{rank}.json").read_text())
        assert each["attempt"] == 2, done.stderr
        assert each["found"] == unbroken
        # It did not begin again: each try was told of five or six steps that the next was not.
        assert each["told"] < alone["told"][0]
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["fit.checkpoint"]
