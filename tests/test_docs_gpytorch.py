"""What the page for users of GPyTorch says is run."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "gpytorch.md"


def test_the_examples_run(capsys) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    printed = capsys.readouterr().out
    found = re.search(r"(\d+) of 100 points kept, (\d\.\d+) nats a row given up", printed)
    assert found is not None
    assert 5 < int(found.group(1)) < 50
    assert float(found.group(2)) <= 0.01
    same = re.search(r"largest difference: (\S+)", printed)
    assert same is not None
    assert float(same.group(1)) < 1e-6
