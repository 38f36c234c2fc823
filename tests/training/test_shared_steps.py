"""Processes that share a fit stay in step, whatever happens in one of them."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared_steps import in_processes

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")


def test_a_step_that_one_process_cannot_compute_is_taken_back_in_all(tmp_path: Path) -> None:
    found = in_processes("one_fails", tmp_path, 1, 2)
    (alone,) = found[1]
    assert alone["calls"] == 7
    assert len(alone["values"]) == 6
    assert found[2][0] == found[2][1]
    for name, value in alone.items():
        np.testing.assert_allclose(found[2][0][name], value, rtol=1e-12)


def test_nats_of_a_minibatch_have_the_same_digits_in_all(tmp_path: Path) -> None:
    first, second = in_processes("uneven", tmp_path, 2)[2]
    assert first == second
    np.testing.assert_allclose(first[0], 0.1 / 6, atol=1e-10)
    assert first[1] == [1 / 3] * 50


def test_a_stage_begins_where_the_first_begins(tmp_path: Path) -> None:
    assert in_processes("starts", tmp_path, 2)[2] == [[1.0, 0.0]] * 2


def test_a_watcher_that_cannot_be_written_down_is_refused_in_all(tmp_path: Path) -> None:
    first, second = in_processes("watched", tmp_path, 2)[2]
    assert first == second
    assert "got object for" in first


def test_the_first_decides_what_is_chosen(tmp_path: Path) -> None:
    first, second = in_processes("choices", tmp_path, 2)[2]
    # Each has found something else.
    assert first.pop("own") != second.pop("own")
    assert first == second


def test_machines_that_round_differently_stay_in_step(tmp_path: Path) -> None:
    first, second = in_processes("other_machines", tmp_path, 2)[2]
    assert first == second
    assert len(first["steps"]) > 8
    assert 2 < len(first["points"]) < 10


@pytest.mark.slow
def test_so_they_do_where_starts_race(tmp_path: Path) -> None:
    first, second = in_processes("more_machines", tmp_path, 2)[2]
    assert first == second
    assert len(first["points"]) == 20


def test_numbers_of_threads_may_differ(tmp_path: Path) -> None:
    for each in in_processes("threads", tmp_path, 2)[2]:
        assert each["refused"] == (
            "all processes must be given the same fit; `rows` is 4 in the first and 5 in number 2."
        )


def test_blocks_may_be_of_other_sizes_in_each(tmp_path: Path) -> None:
    found = in_processes("blocks", tmp_path, 1, 2)
    assert found[2] == [found[1][0]] * 2


def test_rows_that_are_standardised_already_are_shared_all_the_same(tmp_path: Path) -> None:
    found = in_processes("standard_twice", tmp_path, 1, 2)
    assert [each["read"] for each in found[2]] == [40, 40]
    assert [each["elbo"] for each in found[2]] == [found[1][0]["elbo"]] * 2


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    return in_processes("deep_layers", tmp_path_factory.mktemp("layers"), 1, 2)


@pytest.mark.parametrize("name", ["paper", "fast", "classes", "all rows"])
def test_layers_of_two_processes_take_the_steps_of_one(
    layers: dict[int, list[Any]], name: str
) -> None:
    (alone,) = layers[1]
    first, second = layers[2]
    assert first[name] == second[name]
    assert first[name]["sizes"] == alone[name]["sizes"]
    assert len(alone[name]["values"]) > 9
    for finding in ("values", "bound", "state"):
        np.testing.assert_allclose(first[name][finding], alone[name][finding], rtol=1e-8, atol=1e-8)
