"""The page on the paper says what the rows say."""

import re
from pathlib import Path

import pytest

from winnowgp.experiments.base import Experiment, Runs, Scope
from winnowgp.experiments.runner import EXPERIMENTS, asked

DOCS = Path(__file__).parents[1] / "docs"
TEXT = (DOCS / "paper.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", EXPERIMENTS, ids=lambda kind: kind.name)
def test_the_claims_on_the_page_are_those_of_the_rows(kind: type[Experiment]) -> None:
    found = re.search(rf"<!-- {kind.name} -->\n(.*?)<!-- end -->", TEXT, re.DOTALL)
    assert found is not None, f"docs/paper.md has no place for {kind.name}"
    results = Runs(DOCS / "results" / f"{kind.name}.jsonl")
    asked_for = asked(kind(), results, Scope())
    assert asked_for.rows, f"{results.path.name} has no rows of the full settings"
    shown = [line[2:] for line in found.group(1).splitlines() if line.startswith("- ")]
    lines = kind().claims(asked_for.rows)
    assert shown[: len(lines)] == lines, "run benchmarks/paper_page.py"


@pytest.mark.parametrize("kind", EXPERIMENTS, ids=lambda kind: kind.name)
def test_no_run_is_missing(kind: type[Experiment]) -> None:
    results = Runs(DOCS / "results" / f"{kind.name}.jsonl")
    missing = asked(kind(), results, Scope()).missing
    assert not missing, f"run `winnow reproduce {kind.name} -o docs/results`"


def test_every_picture_is_there() -> None:
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", TEXT)
    assert pictures
    assert [p for p in pictures if not (DOCS / p).is_file()] == []
