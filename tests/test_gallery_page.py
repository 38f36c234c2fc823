"""The script that writes outputs and figures into the gallery, on a short page."""

import runpy
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "gallery_page.py"))
PAGE = """Text.

```console
$ echo a > a.png; echo one
old
$ cat a.png; echo two >&2; exit 2
```

![a](images/a.png) ![b](images/b.png)
"""


def test_run_commands_replaces_outputs(tmp_path: Path) -> None:
    page = SCRIPT["run_commands"](PAGE, tmp_path)
    assert page == PAGE.replace("old\n", "one\n").replace("exit 2\n", "exit 2\na\ntwo\n")
    assert SCRIPT["run_commands"](page, tmp_path) == page


def test_run_commands_wraps_lines_and_drops_progress(tmp_path: Path) -> None:
    command = "$ printf 'fit ━━━ 1/1\\n'; printf 'word %.0s' {1..30}"
    page = SCRIPT["run_commands"](f"```console\n{command}\n```\n", tmp_path)
    first, second = page.splitlines()[2:-1]
    assert len(first) <= 100
    assert f"{first} {second}".split() == ["word"] * 30


def test_run_commands_internal_error_raises(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"ends with 1:\nhelp"):
        SCRIPT["run_commands"]("```console\n$ (echo help; exit 1) | cat\n```\n", tmp_path)


def test_copy_figures_copies_those_that_were_drawn(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("a")
    assert SCRIPT["copy_figures"](PAGE, tmp_path, tmp_path / "docs") == ["a.png"]
    assert (tmp_path / "docs" / "images" / "a.png").read_text() == "a"
