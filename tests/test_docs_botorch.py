"""The page on BoTorch is run."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).parents[1] / "docs" / "botorch.md"


@pytest.mark.slow
def test_the_loops_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("botorch", reason="needs winnowgp[botorch]")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    printed = capsys.readouterr().out
    found = re.search(r"20 evaluations, (\d+\.\d+) below", printed)
    assert found is not None
    # Of a thousand random designs of 20 rows, 84 in a hundred end worse.
    assert float(found.group(1)) < 0.5
    first, second = (int(count) for count in re.findall(r"(\d+) points", printed))
    assert 3 < first <= 20
    assert 3 < second <= 20
    low, high = names["low"], names["high"]
    assert torch.equal(names["candidate"].clamp(low, high), names["candidate"])
