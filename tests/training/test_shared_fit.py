"""Fits that several processes share give the result of one process."""

import sys

import numpy as np
import pytest

from helpers.forks import Forks
from helpers.shared_fits import fits, more_fits
from helpers.shared_work import together

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")


def test_two_processes_give_the_result_of_one(forks: Forks) -> None:
    (alone,) = forks.call(together, fits, 1)
    assert 2 < len(alone["array"]["points"]) < 20
    assert forks.call(together, fits, 2) == [alone, alone]


@pytest.mark.slow
def test_four_processes_give_the_result_of_one(forks: Forks) -> None:
    (alone,) = forks.call(together, more_fits, 1)
    assert forks.call(together, more_fits, 2) == [alone] * 2
    assert forks.call(together, more_fits, 4) == [alone] * 4
    # The result does not depend on whether rows are in memory.
    assert alone["dataset"] == alone["parquet"]


@pytest.mark.slow
def test_three_processes_agree_up_to_rounding(forks: Forks) -> None:
    (alone,) = forks.call(together, fits, 1)
    found = forks.call(together, fits, 3)
    assert found == [found[0]] * 3
    for name, expected in alone.items():
        for finding, value in expected.items():
            # L-BFGS amplifies rounding; it ends within its tolerance.
            np.testing.assert_allclose(found[0][name][finding], value, rtol=1e-5, atol=1e-5)
