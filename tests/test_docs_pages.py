"""What the pages say is run, and what they link to is there."""

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest

from executed_page import FENCE, ExampleError, ExecutedPage, executed_page
from given import given
from room_pages import drawers, room_page, rooms
from winnowgp.errors import MissingExtraError

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {page.relative_to(DOCS).as_posix(): page for page in sorted(DOCS.rglob("*.md"))}
PAGES["contributing.md"] = ROOT / "CONTRIBUTING.md"
# More than a few seconds.
LONG = {"alpha.md", "checkpoints.md", "deep.md", "large-data.md", "likelihoods.md"}
LONG |= {"regression.md", "start.md"}
# Run by tests of their own, which also look at what they print.
LONG |= {"botorch.md", "gpytorch.md", "kernels.md", "scikit-learn.md"}
# What a page does for fewer steps, where it is not run whole.
SHORTER = {
    "latent.md": {
        "GPLVM(n_components=1": "GPLVM(n_components=1, max_iter=50",
        "FastLatent(MaxPoints(8))": "FastLatent(MaxPoints(8), rounds=1, iterations=60)",
    }
}
REFERENCE = re.compile(r"\]\[(winnowgp[\w.]*)\]")


def text(page: str) -> str:
    return PAGES[page].read_text(encoding="utf-8")


@cache
def executed(page: str, *, whole: bool) -> ExecutedPage:
    markdown = text(page)
    shorter = {} if whole else SHORTER.get(page, {})
    for long, short in shorter.items():
        assert markdown.count(long) == 1, f"{long} is {markdown.count(long)} times in {page}"
        markdown = markdown.replace(long, short)
    return executed_page(markdown, name=page, given=given)


def executable() -> list:
    """Pages, and whether they are run whole."""
    pages = [page for page in PAGES if FENCE.search(text(page))]
    quick = [pytest.param(page, False) for page in pages if page not in LONG]
    slow = [page for page in pages if page in LONG | set(SHORTER)]
    return quick + [pytest.param(page, True, marks=pytest.mark.slow) for page in slow]


def resolved(name: str) -> object:
    """What a dotted name in a link stands for."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize(("page", "whole"), executable())
def test_every_example_of_a_page_runs(page: str, whole: bool) -> None:
    try:
        executed(page, whole=whole)
    except ExampleError as error:
        if isinstance(error.__cause__, MissingExtraError):
            pytest.skip(str(error.__cause__))
        raise


def test_the_example_of_maps_fills_in_what_is_missing() -> None:
    printed = executed("latent.md", whole=False).printed
    found = re.search(r"(\d+) points kept; Y\[3, 1\] is (\S+) ±", printed)
    assert found is not None
    assert 3 < int(found.group(1)) < 25
    # cos of an angle near −1.9
    assert -0.6 < float(found.group(2)) < 0.1


def test_the_theory_agrees_with_its_twins() -> None:
    """Numbers that stand side by side on the page are the same."""
    printed = executed("theory.md", whole=False).printed
    pairs = re.findall(
        r"(?:closed form|collapsed|switched off|flip|through sites) +(-?[\d.]+),? +"
        r"(?:summed|dense|left out|difference of two bounds|collapsed) +(-?[\d.]+)",
        printed,
    )
    assert len(pairs) == 7
    for ours, twin in pairs:
        assert float(ours) == pytest.approx(float(twin), rel=1e-6)
    bounds = dict(re.findall(r"^(collapsed|exact|upper) +(-?[\d.]+)", printed, re.M))
    values = [float(bounds[name]) for name in ("collapsed", "exact", "upper")]
    assert values == sorted(values)


def test_an_example_that_fails_fails_its_page() -> None:
    page = "Words.\n\n```python\nx = 1\n```\n\n    ```python\n    assert x == 2\n    ```\n"
    with pytest.raises(ExampleError, match=r"a\.md, line 8"):
        executed_page(page, name="a.md")
    with pytest.raises(ExampleError, match="UserWarning"):
        executed_page("```python\nimport warnings\nwarnings.warn('!')\n```\n", name="a.md")


def test_what_an_example_prints_and_draws_follows_it() -> None:
    code = "import matplotlib.pyplot as plt\nplt.plot([0, 1], color='black')\nprint(6 * 7)"
    page = executed_page(f"```python\n{code}\n```\nAfter.", name="a.md")
    before, _, after = page.markdown.partition("42")
    assert before.startswith("```python")
    assert after.endswith("<!-- picture 0 -->\nAfter.")
    html = page.with_pictures("<p>a</p><!-- picture 0 -->")
    assert html.count("<svg") == 1
    assert "currentColor" in html
    assert "#000000" not in html


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_refers_to_exists(page: str) -> None:
    # Words in code are not links; what is left of a link around them still is.
    for name in REFERENCE.findall(re.sub(r"`[^`\n]*`", "", text(page))):
        assert resolved(name) is not None


def test_the_reference_holds_every_public_name() -> None:
    for room in rooms():
        module = importlib.import_module(f"winnowgp.{room}")
        names = set(getattr(module, "__all__", ()))
        shown = {name for d in drawers(room) for name in d.names if d.package == module.__name__}
        assert names == shown
        entries = re.findall(r"^::: (\S+)$", room_page(room), re.M)
        assert len(entries) == len(set(entries)) == max(len(drawers_names(room)), 1)


def written(module: str) -> set[str]:
    """Names that a reader of a module's text finds: griffe sees none in `A, B = 1, 2`."""
    file = ROOT.joinpath("src", *module.split("."))
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    names: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {each.id for each in targets if isinstance(each, ast.Name)}
    return names


def test_the_reference_can_read_every_public_name() -> None:
    for room in rooms():
        for drawer in drawers(room):
            assert set(drawer.names) <= written(drawer.module)


def drawers_names(room: str) -> list[str]:
    return [name for drawer in drawers(room) for name in drawer.names]


def test_every_room_has_a_place_in_the_navigation() -> None:
    places = re.findall(r"reference/(\w+)\.md$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.M)
    assert set(places) - {"index"} == set(rooms())


def test_every_page_has_a_place_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[2]
    assert [page for page in PAGES if page not in nav] == []


@pytest.mark.parametrize("page", PAGES)
def test_the_pictures_of_a_page_are_there(page: str) -> None:
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text(page))
    assert [p for p in pictures if not (PAGES[page].parent / p).is_file()] == []
