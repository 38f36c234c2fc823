"""What the pages on kernels and on scikit-learn say is run."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def run(page: str) -> int:
    blocks = re.findall(
        r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL
    )
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    return len(blocks)


@pytest.mark.slow
def test_kernels(capsys) -> None:
    assert run("kernels.md") == 3
    said = capsys.readouterr().out
    scores = re.findall(r"R² two years ahead (-?[\d.]+)", said)
    assert float(scores[0]) > 0.9 > float(scores[1])
    assert "best: periodic(period=12) + linear" in said
    assert "'rbff' at character 7 of 'rbf + rbff': the kernels are rbf" in said


@pytest.mark.slow
def test_scikit_learn(capsys) -> None:
    assert run("scikit-learn.md") == 2
    said = capsys.readouterr().out
    assert "['size' 'age']" in said
    assert re.search(r"\d points", said)
    assert "'gp__kernel': " in said
