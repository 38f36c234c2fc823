"""What the README says is run."""

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.short_fits import short_fits
from winnowgp.point_processes import Bernoulli, kl_divergence

IMPORTS = """
from dataclasses import dataclass
from typing import final
import torch
from winnowgp.point_processes import Budget, CardinalityPrior
"""
README = Path(__file__).parents[1] / "README.md"


def shortened(text: str) -> str:
    """The same examples on a third of the rows, the long ones stopped early."""
    for long, short in (
        (r"size=\(300, 1\)", "size=(100, 1)"),
        (r"size=300", "size=100"),
        (r"epochs=\(.*?\)", "epochs=(2, 4, 4)"),
        (r"GPLVM\((?=n)", "GPLVM(max_iter=30, "),
        (r"\[::6\]", "[::3]"),
        (r"pre=50, joint=100, post=50", "pre=4, joint=8, post=4"),
    ):
        text, count = re.subn(long, short, text)
        assert count == 1, f"{long} is {count} times in the README"
    return text


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_examples_run(capsys: pytest.CaptureFixture[str], whole: bool) -> None:
    text = README.read_text(encoding="utf-8")
    text = text if whole else shortened(text)
    first, *others = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(others) == 4
    names: dict[str, object] = {}
    exec(first, names)
    with nullcontext() if whole else short_fits():
        for block in others:
            exec(block, names)
    printed = capsys.readouterr().out
    up = re.search(r"(\d+) points kept, P\(up at 2\.5\) = (\d\.\d+)", printed)
    assert up is not None
    assert float(up.group(2)) > 0.9
    kept = re.search(r"(\d+) points kept, R² = (0\.\d+)", printed)
    assert kept is not None
    assert 4 < int(kept.group(1)) < 15
    assert float(kept.group(2)) > 0.95


def test_the_prior_of_the_contributing_page_works() -> None:
    text = (README.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    block = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(IMPORTS + block, names)
    prior = names["CubicCardinality"](6, 0.1)
    q = Bernoulli(torch.linspace(-1, 1, 6, dtype=torch.float64))
    assert kl_divergence(q, prior) > 0
    assert (prior.expected_slope(q) < 0).all()


def test_the_map_of_rooms_is_complete() -> None:
    table = README.read_text(encoding="utf-8").split("## The rooms")[1]
    rooms = [p for p in (README.parent / "src" / "winnowgp").iterdir() if p.is_dir()]
    missing = {p.name for p in rooms if f"`{p.name}`" not in table} - {"__pycache__"}
    assert not missing


def test_the_pictures_are_there() -> None:
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README.read_text(encoding="utf-8"))
    assert pictures
    assert all((README.parent / p).is_file() for p in pictures)
