"""Fits killed with SIGKILL, while they compute and while they write, and run again."""

import sys

import pytest

from helpers.forks import Forks
from helpers.killed_fits import PROBLEMS, killed

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="processes are forked and sent SIGKILL"
)


@pytest.mark.parametrize(
    "problem", ["paper, classes", pytest.param("command", marks=pytest.mark.slow)]
)
def test_killed_fit_resumes_to_same_result(problem: str, forks: Forks) -> None:
    found = forks.call(killed, problem, 4)
    # One of the four is killed twice.
    assert found["kills"] == 5
    assert found["left"] == []
    assert found["found"] == 4 * [found["expected"]]


@pytest.mark.slow
@pytest.mark.parametrize("problem", PROBLEMS)
def test_killed_at_twenty_points_resumes_to_same_result(problem: str, forks: Forks) -> None:
    found = forks.call(killed, problem, 20)
    # Five of the twenty are killed twice, unless the last of them ends before its second kill.
    assert found["kills"] in (24, 25)
    assert found["left"] == []
    assert found["found"] == 20 * [found["expected"]]
