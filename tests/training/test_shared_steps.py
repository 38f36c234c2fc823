"""Processes that share a fit stay in step, whatever happens in one of them."""

import sys

import numpy as np
import pytest

from helpers import shared_steps as work
from helpers.forks import Forks
from helpers.shared_work import together

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")


def test_a_step_that_one_process_cannot_compute_is_taken_back_in_all(forks: Forks) -> None:
    found = {of: forks.call(together, work.one_fails, of) for of in (1, 2)}
    (alone,) = found[1]
    assert alone["calls"] == 7
    assert len(alone["values"]) == 6
    assert found[2][0] == found[2][1]
    for name, value in alone.items():
        np.testing.assert_allclose(found[2][0][name], value, rtol=1e-12)


def test_nats_of_a_minibatch_have_the_same_digits_in_all(forks: Forks) -> None:
    first, second = forks.call(together, work.uneven, 2)
    assert first == second
    np.testing.assert_allclose(first[0], 0.1 / 6, atol=1e-10)
    assert first[1] == [1 / 3] * 50


def test_scores_that_one_cannot_compute_fail_in_all_and_the_next_ones_come_through(
    forks: Forks,
) -> None:
    assert forks.call(together, work.failed_scores, 2) == [[1.0, 1.0]] * 2


def test_a_stage_begins_where_the_first_begins(forks: Forks) -> None:
    assert forks.call(together, work.starts, 2) == [[1.0, 0.0]] * 2


def test_a_watcher_that_cannot_be_written_down_is_refused_in_all(forks: Forks) -> None:
    first, second = forks.call(together, work.watched, 2)
    assert first == second
    assert "got object for" in first


def test_the_first_decides_what_is_chosen(forks: Forks) -> None:
    first, second = forks.call(together, work.choices, 2)
    # Each has found something else.
    assert first.pop("own") != second.pop("own")
    assert first == second


def test_machines_that_round_differently_stay_in_step(forks: Forks) -> None:
    first, second = forks.call(together, work.other_machines, 2)
    assert first == second
    assert len(first["steps"]) > 8
    assert 2 < len(first["points"]) < 10


@pytest.mark.slow
def test_so_they_do_where_starts_race(forks: Forks) -> None:
    first, second = forks.call(together, work.more_machines, 2)
    assert first == second
    assert len(first["points"]) == 20


def test_numbers_of_threads_may_differ(forks: Forks) -> None:
    for each in forks.call(together, work.threads, 2):
        assert each["refused"] == (
            "all processes must be given the same fit; `rows` is 4 in the first and 5 in number 2."
        )


def test_blocks_may_be_of_other_sizes_in_each(forks: Forks) -> None:
    found = {of: forks.call(together, work.blocks, of) for of in (1, 2)}
    assert found[2] == [found[1][0]] * 2


def test_rows_that_are_standardised_already_are_shared_all_the_same(forks: Forks) -> None:
    found = {of: forks.call(together, work.standard_twice, of) for of in (1, 2)}
    assert [each["read"] for each in found[2]] == [15, 15]
    assert [each["elbo"] for each in found[2]] == [found[1][0]["elbo"]] * 2
