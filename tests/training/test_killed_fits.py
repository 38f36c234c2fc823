"""Fits killed with SIGKILL, while they compute and while they write, and run again."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

KILLED_FITS = Path(__file__).parents[1] / "killed_fits.py"
PROBLEMS = [
    "fast",
    "count of points",
    "classes",
    "paper",
    "paper, classes",
    "deep",
    "deep, paper",
    "latent",
    "latent, paper",
    "command",
]

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="processes are forked and sent SIGKILL"
)


def killed(problem: str, points: int, folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(KILLED_FITS), problem, str(points), str(folder)],
        capture_output=True,
        check=False,
        text=True,
        # What has once asked for a GPU cannot be forked.
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("problem", ["paper, classes", "command"])
def test_killed_and_gone_on_with_the_answer_is_the_same(problem: str, tmp_path: Path) -> None:
    found = killed(problem, 4, tmp_path)
    # One of the four is killed twice.
    assert found["kills"] == 5
    assert found["left"] == []
    assert found["found"] == 4 * [found["expected"]]


@pytest.mark.slow
@pytest.mark.parametrize("problem", PROBLEMS)
def test_killed_at_twenty_points_the_answer_is_the_same(problem: str, tmp_path: Path) -> None:
    found = killed(problem, 20, tmp_path)
    assert found["kills"] == 25
    assert found["left"] == []
    assert found["found"] == 20 * [found["expected"]]
