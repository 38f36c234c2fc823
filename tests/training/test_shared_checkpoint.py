"""Checkpoints of fits that several processes share, and what happens when one of them ends."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from launched import SHARED_WORK, forked, torchrun

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    found = forked("checkpoints", tmp_path_factory.mktemp("kept"), (1, 2))
    return {of: [each["checkpoints"] for each in found[of]] for of in found}


def test_all_go_on_from_what_the_first_has_read(kept: dict[int, list[Any]]) -> None:
    (alone,) = kept[1]
    for each in kept[2]:
        assert each["unbroken"] == each["again"] == each["once more"] == alone["unbroken"]
        # Seven steps were over before, and a fit that had ended is told of nothing.
        assert each["told"] == alone["told"] == [alone["told"][0], 0]
        assert each["told"][0] > 3


def test_only_the_first_writes(kept: dict[int, list[Any]]) -> None:
    assert [each["folder"] for each in kept[2]] == [True, False]


def test_what_chance_or_a_clock_decides_is_decided_by_the_first(kept: dict[int, list[Any]]) -> None:
    assert [each["once"] for each in kept[2]] == [[3, 4], [3, 4]]


def test_the_first_ends_a_phase_for_all(kept: dict[int, list[Any]]) -> None:
    (alone,) = kept[1]
    assert alone["early"][0] != alone["unbroken"]
    assert [each["early"] for each in kept[2]] == [alone["early"]] * 2


def test_a_full_disk_is_said_once_and_the_fit_goes_on(kept: dict[int, list[Any]]) -> None:
    (alone,) = kept[1]
    first, second = (each["full"] for each in kept[2])
    assert first[0] == second[0] == first[2] == second[2] == alone["unbroken"]
    assert len(first[1]) == 1
    assert "No space left on device" in first[1][0]
    assert second[1] == []


def test_errors_of_the_first_are_raised_in_all(kept: dict[int, list[Any]]) -> None:
    for each in kept[2]:
        kind, words = each["damaged"]
        assert kind == "CheckpointError"
        assert "2-damaged-0/fit.checkpoint is not a checkpoint" in words


def test_different_fits_are_refused_in_all(kept: dict[int, list[Any]]) -> None:
    for each in kept[2]:
        kind, words = each["different"]
        assert kind == "InputError"
        assert words.startswith("all processes must be given the same fit; `model` is SparseGP")
        assert each["shards"] == [
            "InputError",
            "every process must make the whole source, of which `shared` gives it a part; got 203 "
            "rows with 2 inputs and 1 targets, 202 rows with 2 inputs and 1 targets.",
        ]


@pytest.mark.slow
def test_a_fit_whose_processes_are_killed_ends_with_the_same_answer(
    tmp_path: Path, kept: dict[int, list[Any]]
) -> None:
    words = (str(SHARED_WORK), "elastic", str(tmp_path))
    done = torchrun(*words, processes=2, restarts=3, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / f"2-{rank}.json").read_text())["elastic"] for rank in range(2)]
    (alone,) = kept[1]
    for each in found:
        assert each["attempt"] == 2, done.stderr
        assert each["found"] == alone["unbroken"]
        # It did not begin again: each try was told of five or six steps that the next was not.
        assert each["told"] < alone["told"][0]
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["fit.checkpoint"]
