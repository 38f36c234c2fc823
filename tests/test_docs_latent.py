"""What the page on latent-variable models says is run."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "latent.md"


def test_the_examples_run(capsys) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    found = re.search(r"(\d+) points kept; Y\[3, 1\] is (\S+) ±", capsys.readouterr().out)
    assert found is not None
    assert 3 < int(found.group(1)) < 25
    # cos of an angle near −1.9
    assert -0.6 < float(found.group(2)) < 0.1


def test_the_picture_is_there() -> None:
    (picture,) = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", PAGE.read_text(encoding="utf-8"))
    assert (PAGE.parent / picture).is_file()
