"""Fits that several processes share end as those of one process do."""

import sys

import numpy as np
import pytest

from helpers.forks import Forks
from helpers.shared_fits import fits, more_fits
from helpers.shared_work import together

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")


def test_two_processes_find_what_one_finds_to_the_last_digit(forks: Forks) -> None:
    (alone,) = forks.call(together, fits, 1)
    assert 2 < len(alone["array"]["points"]) < 20
    assert forks.call(together, fits, 2) == [alone, alone]


@pytest.mark.slow
def test_so_do_four_with_any_source_and_plan(forks: Forks) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    (alone,) = forks.call(together, more_fits, 1)
    assert forks.call(together, more_fits, 2) == [alone] * 2
    assert forks.call(together, more_fits, 4) == [alone] * 4
    # Whether rows are in memory decides nothing but where they are read from.
    assert alone["dataset"] == alone["parquet"]


@pytest.mark.slow
def test_three_processes_sum_in_another_order_and_find_nearly_the_same(forks: Forks) -> None:
    (alone,) = forks.call(together, fits, 1)
    found = forks.call(together, fits, 3)
    assert found == [found[0]] * 3
    for name, expected in alone.items():
        for finding, value in expected.items():
            # L-BFGS carries the last digits of a sum along; it ends within its tolerance.
            np.testing.assert_allclose(found[0][name][finding], value, rtol=1e-5, atol=1e-5)
