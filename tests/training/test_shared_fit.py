"""Fits that several processes share end as those of one process do."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launched import SHARED_WORK, forked, torchrun

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")


def _of(piece: str, folder: Path, *counts: int) -> dict[int, list[Any]]:
    found = forked(piece, folder, counts)
    return {of: [each[piece] for each in found[of]] for of in counts}


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    return _of("fits", tmp_path_factory.mktemp("fits"), 1, 2)


def test_two_processes_find_what_one_finds_to_the_last_digit(fits: dict[int, list[Any]]) -> None:
    (alone,) = fits[1]
    assert 2 < len(alone["array"]["points"]) < 20
    assert fits[2] == [alone, alone]


@pytest.mark.slow
def test_so_do_four_with_any_source_and_plan(tmp_path: Path) -> None:
    found = _of("more fits", tmp_path, 1, 2, 4)
    (alone,) = found[1]
    assert found[2] == [alone] * 2
    assert found[4] == [alone] * 4
    # Whether rows are in memory decides nothing but where they are read from.
    assert alone["dataset"] == alone["parquet"]


@pytest.mark.slow
def test_three_processes_sum_in_another_order_and_find_nearly_the_same(tmp_path: Path) -> None:
    found = _of("fits", tmp_path, 1, 3)
    (alone,) = found[1]
    assert found[3] == [found[3][0]] * 3
    for name, expected in alone.items():
        for finding, value in expected.items():
            # L-BFGS carries the last digits of a sum along; it ends within its tolerance.
            np.testing.assert_allclose(found[3][0][name][finding], value, rtol=1e-5, atol=1e-5)


def test_processes_of_torchrun_are_introduced_to_each_other(
    tmp_path: Path, fits: dict[int, list[Any]]
) -> None:
    done = torchrun(str(SHARED_WORK), "sums,fits", str(tmp_path), processes=2, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / f"2-{rank}.json").read_text()) for rank in range(2)]
    assert [each["fits"] for each in found] == fits[2]
    assert [each["sums"]["gathered"] for each in found] == [[[0, ""], [1, "x"]]] * 2
