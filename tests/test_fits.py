"""The comparison of bounds against CPU seconds: its ratios, on made rows."""

import sys
from importlib import import_module
from math import inf
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
fits: Any = import_module("fits")
sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize(
    ("margin", "expected"), [(0.0, (6.0, 8.0)), (0.01, (3.0, 2.0)), (-0.01, (inf, 8.0))]
)
def test_seconds_of_both_are_to_the_same_bound(
    margin: float, expected: tuple[float, float]
) -> None:
    ours = {"n_train": 1000, "curve": [[1.0, -50.0], [3.0, -8.0], [6.0, 1.0]]}
    # The last bound is rounded down in the curve, not in the mark.
    curve = [[1.0, -30.0], [2.0, -9.0], [4.0, -5.0], [8.0, 0.0]]
    peer = {"curve": curve, "after": {"300": [8.0, 0.0004]}}
    assert fits.seconds_of_both(ours, peer, 300, margin=margin) == expected
