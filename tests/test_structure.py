"""The walk through a fit in the documentation, against the files that a fit passes through."""

import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def structure(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.delitem(sys.modules, "structure", raising=False)
    return import_module("structure")


@pytest.mark.slow
def test_architecture_page_names_every_file_of_a_fit(structure: ModuleType) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    _, _, walk = page.partition("## From `fit` to `predict`")
    walk, _, _ = walk.partition("\n## ")
    named = set(re.findall(r"`((?:\w+/)?\w+\.py)`", walk))
    title = "SparseGPRegressor().fit"
    passed = structure.files_of_fit(structure.SOURCE, *structure.FITS[title])
    assert len(passed) > 30
    assert set(passed) - named == set()
