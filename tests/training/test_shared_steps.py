"""Processes that share a fit take the same steps, also when one of them fails."""

import sys

import numpy as np
import pytest

from helpers import shared_steps as work
from helpers.forks import Forks
from helpers.shared_work import together

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")


def test_step_failed_in_one_process_is_reverted_in_all(forks: Forks) -> None:
    found = {of: forks.call(together, work.one_fails, of) for of in (1, 2)}
    (alone,) = found[1]
    assert alone["calls"] == 7
    assert len(alone["values"]) == 6
    assert found[2][0] == found[2][1]
    for name, value in alone.items():
        np.testing.assert_allclose(found[2][0][name], value, rtol=1e-12)


def test_mean_over_processes_is_identical_in_all(forks: Forks) -> None:
    first, second = forks.call(together, work.uneven, 2)
    assert first == second
    np.testing.assert_allclose(first[0], 0.1 / 6, atol=1e-10)
    assert first[1] == [1 / 3] * 50


def test_scores_failed_in_one_process_fail_in_all(
    forks: Forks,
) -> None:
    assert forks.call(together, work.failed_scores, 2) == [[1.0, 1.0]] * 2


def test_stage_starts_where_the_first_process_does(forks: Forks) -> None:
    assert forks.call(together, work.starts, 2) == [[1.0, 0.0]] * 2


def test_unsaveable_callback_raises_in_all_processes(forks: Forks) -> None:
    first, second = forks.call(together, work.watched, 2)
    assert first == second
    assert "got object, which cannot be saved" in first


def test_first_process_decides_selection(forks: Forks) -> None:
    first, second = forks.call(together, work.choices, 2)
    # Each process computed another value.
    assert first.pop("own") != second.pop("own")
    assert first == second


def test_processes_with_other_rounding_stay_in_step(forks: Forks) -> None:
    first, second = forks.call(together, work.other_machines, 2)
    assert first == second
    assert len(first["steps"]) > 8
    assert 2 < len(first["points"]) < 30


@pytest.mark.slow
def test_successive_halving_with_other_rounding_stays_in_step(forks: Forks) -> None:
    first, second = forks.call(together, work.more_machines, 2)
    assert first == second
    assert len(first["points"]) == 20


def test_numbers_of_threads_may_differ(forks: Forks) -> None:
    for each in forks.call(together, work.threads, 2):
        assert each["refused"] == (
            "all processes must be given the same fit; `rows` is 4 in the first and 5 in number 2."
        )


def test_block_sizes_may_differ(forks: Forks) -> None:
    found = {of: forks.call(together, work.blocks, of) for of in (1, 2)}
    assert found[2] == [found[1][0]] * 2


def test_standardised_sources_are_sharded(forks: Forks) -> None:
    found = {of: forks.call(together, work.standard_twice, of) for of in (1, 2)}
    assert [each["read"] for each in found[2]] == [15, 15]
    assert [each["elbo"] for each in found[2]] == [found[1][0]["elbo"]] * 2
