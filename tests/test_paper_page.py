"""The script that writes figures and claims into the page on the paper, on made-up results."""

import runpy
from pathlib import Path

import pytest

from winnowgp.errors import InputError
from winnowgp.experiments.runner import Reproduction

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "paper_page.py"))
PAGE = "text\n<!-- a -->\nold\n<!-- end -->\nmore\n<!-- b -->\nkept\n<!-- end -->\n"


def result(missing: int) -> Reproduction:
    claims = ["agrees: one (1)", "does not agree: two (2)"]
    return Reproduction("a", "figure a", "a.jsonl", "a.png", 4, missing, "", claims)


def test_section_has_figure_claims_and_missing_runs() -> None:
    complete = "![figure a](results/a.png)\n\n- agrees: one (1)\n- does not agree: two (2)"
    assert SCRIPT["section"](result(missing=0)) == complete
    assert SCRIPT["section"](result(missing=2)) == f"{complete}\n- missing: 2 of 6 runs"


def test_replace_section_changes_only_its_section() -> None:
    page = SCRIPT["replace_section"](PAGE, "a", r"new \1")
    assert page == PAGE.replace("old\n", "\nnew \\1\n\n")
    assert SCRIPT["replace_section"](page, "a", r"new \1") == page


def test_replace_section_unknown_name_raises() -> None:
    with pytest.raises(InputError, match="one section `<!-- c -->`; it has 0"):
        SCRIPT["replace_section"](PAGE, "c", "new")
