"""Processes that share a fit stay in step, whatever happens in one of them."""

import sys
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from shared_steps import in_processes

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")


Steps: TypeAlias = dict[str, dict[int, list[Any]]]
PIECES = "one_fails,uneven,other_machines,threads,blocks,standard_twice,starts,watched,choices"


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    return in_processes(PIECES, tmp_path_factory.mktemp("steps"), 1, 2)


def test_a_step_that_one_process_cannot_compute_is_taken_back_in_all(steps: Steps) -> None:
    found = steps["one_fails"]
    (alone,) = found[1]
    assert alone["calls"] == 7
    assert len(alone["values"]) == 6
    assert found[2][0] == found[2][1]
    for name, value in alone.items():
        np.testing.assert_allclose(found[2][0][name], value, rtol=1e-12)


def test_nats_of_a_minibatch_have_the_same_digits_in_all(steps: Steps) -> None:
    first, second = steps["uneven"][2]
    assert first == second
    np.testing.assert_allclose(first[0], 0.1 / 6, atol=1e-10)
    assert first[1] == [1 / 3] * 50


def test_a_stage_begins_where_the_first_begins(steps: Steps) -> None:
    assert steps["starts"][2] == [[1.0, 0.0]] * 2


def test_a_watcher_that_cannot_be_written_down_is_refused_in_all(steps: Steps) -> None:
    first, second = steps["watched"][2]
    assert first == second
    assert "got object for" in first


def test_the_first_decides_what_is_chosen(steps: Steps) -> None:
    first, second = steps["choices"][2]
    # Each has found something else.
    assert first.pop("own") != second.pop("own")
    assert first == second


def test_machines_that_round_differently_stay_in_step(steps: Steps) -> None:
    first, second = steps["other_machines"][2]
    assert first == second
    assert len(first["steps"]) > 8
    assert 2 < len(first["points"]) < 10


@pytest.mark.slow
def test_so_they_do_where_starts_race(tmp_path: Path) -> None:
    first, second = in_processes("more_machines", tmp_path, 2)["more_machines"][2]
    assert first == second
    assert len(first["points"]) == 20


def test_numbers_of_threads_may_differ(steps: Steps) -> None:
    for each in steps["threads"][2]:
        assert each["refused"] == (
            "all processes must be given the same fit; `rows` is 4 in the first and 5 in number 2."
        )


def test_blocks_may_be_of_other_sizes_in_each(steps: Steps) -> None:
    found = steps["blocks"]
    assert found[2] == [found[1][0]] * 2


def test_rows_that_are_standardised_already_are_shared_all_the_same(steps: Steps) -> None:
    found = steps["standard_twice"]
    assert [each["read"] for each in found[2]] == [15, 15]
    assert [each["elbo"] for each in found[2]] == [found[1][0]["elbo"]] * 2
