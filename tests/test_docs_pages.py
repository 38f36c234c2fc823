"""The examples of the documentation pages run, and the pages' links and figures exist."""

import importlib
import pkgutil
import re
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import FunctionType

import pytest

import winnowgp
from helpers.short_fits import short_fits
from run_pages import FENCE, ExampleError, run_page, run_pages, with_outputs
from winnowgp.errors import MissingExtraError
from winnowgp.io.format import FORMAT_VERSION

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {page.name: page for page in sorted(DOCS.glob("*.md"))}
PAGES |= {f"benchmarks/{page.name}": page for page in sorted((DOCS / "benchmarks").glob("*.md"))}
PAGES["contributing.md"] = ROOT / "CONTRIBUTING.md"
# Pages that take more than a few seconds.
SLOW = {
    "alarms.md",
    "architecture.md",
    "botorch.md",
    "checkpoints.md",
    "choosing-the-number.md",
    "command-line.md",
    "deep.md",
    "gpytorch.md",
    "how-many-points.md",
    "kernels.md",
    "large-data.md",
    "likelihoods.md",
    "multi-output.md",
    "quick-start.md",
    "regression.md",
    "scikit-learn.md",
    "streams.md",
    "subset-posterior.md",
}
# Code that is replaced by a shorter computation unless the page is run in the slow tests.
SHORTER = {
    "gplvm.md": {
        "GPLVM(n_components=1": "GPLVM(n_components=1, max_iter=50",
        "FastSchedule(MaxPoints(8))": "FastSchedule(MaxPoints(8), rounds=1, iterations=60)",
    }
}
# Pages whose fits are short ones unless they are run in the slow tests.
SHORT_FITS = {"additive.md", "averages.md", "index.md", "multi-fidelity.md", "saving.md"}


def text(page: str) -> str:
    return PAGES[page].read_text(encoding="utf-8")


def printed(page: str, *, whole: bool = True) -> str:
    """Run a page once and return what it prints."""
    return _printed(page, whole)


@cache
def _printed(page: str, whole: bool) -> str:
    markdown = text(page)
    for long, short in {} if whole else SHORTER.get(page, {}).items():
        assert markdown.count(long) == 1, f"{long} occurs {markdown.count(long)} times in {page}"
        markdown = markdown.replace(long, short)
    try:
        with nullcontext() if whole else short_fits(sizes=1):
            return "".join(output.text for output in run_page(markdown, page))
    except ExampleError as error:
        if isinstance(error.__cause__, MissingExtraError):
            pytest.skip(str(error.__cause__))
        raise


def page_params() -> list:
    """Return every page with examples, and whether it is run without abbreviations."""
    pages = [page for page in PAGES if FENCE.search(text(page))]
    shorter = {*SHORTER, *SHORT_FITS}
    quick = [pytest.param(page, page not in shorter) for page in pages if page not in SLOW]
    slow = [page for page in pages if page in SLOW or page in shorter]
    return quick + [pytest.param(page, True, marks=pytest.mark.slow) for page in slow]


@pytest.mark.parametrize(("page", "whole"), page_params())
def test_page_examples_run(page: str, whole: bool) -> None:
    printed(page, whole=whole)


def test_gplvm_page_fills_in_missing_entry() -> None:
    match = re.search(
        r"(\d+) inducing points; Y\[3, 1\] is (\S+) ±", printed("gplvm.md", whole=False)
    )
    assert match is not None
    assert 3 < int(match.group(1)) < 25
    # cos of an angle near −1.9
    assert -0.6 < float(match.group(2)) < 0.1


def test_theory_page_agrees_with_dense_computations() -> None:
    """Numbers printed side by side on the page are equal."""
    pairs = re.findall(
        r"(?:closed form|collapsed|evidence|masked|gain|through sites) +(-?[\d.]+),? +"
        r"(?:summed|dense|left out|difference of two bounds|collapsed) +(-?[\d.]+)",
        printed("theory.md"),
    )
    assert len(pairs) == 8
    for value, dense in pairs:
        assert float(value) == pytest.approx(float(dense), rel=1e-6)
    lines = re.findall(r"^(collapsed|exact|upper) +(-?[\d.]+)", printed("theory.md"), re.M)
    bounds = dict(lines)
    values = [float(bounds[name]) for name in ("collapsed", "exact", "upper")]
    assert values == sorted(values)
    lower, upper = re.findall(r"between (-?[\d.]+) and (-?[\d.]+)", printed("theory.md"))[0]
    assert float(lower) <= float(bounds["exact"]) <= float(upper)


@pytest.mark.slow
def test_gpytorch_page_prunes_within_tolerance() -> None:
    match = re.search(r"(\d+) of 100 inducing points, ELBO gap (\d\.\d+)", printed("gpytorch.md"))
    assert match is not None
    assert 5 < int(match.group(1)) < 50
    assert float(match.group(2)) <= 0.01
    difference = re.search(r"largest difference: (\S+)", printed("gpytorch.md"))
    assert difference is not None
    assert float(difference.group(1)) < 1e-6


@pytest.mark.slow
def test_how_many_points_page_reports_gaps_and_limits() -> None:
    text = printed("how-many-points.md")
    gap = re.search(r"ELBO gap: +(\d\.\d+) nats", text)
    assert gap is not None
    assert float(gap.group(1)) <= 0.01
    exact, elbo = re.findall(r"log evidence (-?[\d.]+) nats, ELBO (-?[\d.]+) nats", text)[0]
    assert float(elbo) <= float(exact)
    assert "limit: None" in text
    assert "8 inducing points; limit: max_points" in text
    pattern = r"^predictive: .* predictive gap (-?[\d.]+) ± ([\d.]+)"
    (predictive_gap, error) = re.findall(pattern, text, re.M)[0]
    # Both are rounded to three digits.
    assert float(predictive_gap) + float(error) <= 0.011


@pytest.mark.slow
def test_botorch_page_finds_a_good_design() -> None:
    regret = re.search(r"20 evaluations, (\d+\.\d+) below", printed("botorch.md"))
    assert regret is not None
    # Of a thousand random designs of 20 rows, 84 % end worse.
    assert float(regret.group(1)) < 0.5
    candidate = re.search(r"next evaluation at \[(\S+), (\S+)\]", printed("botorch.md"))
    assert candidate is not None
    assert -5 <= float(candidate.group(1)) <= 10
    assert 0 <= float(candidate.group(2)) <= 15
    counts = [int(count) for count in re.findall(r"(\d+) inducing points", printed("botorch.md"))]
    assert len(counts) == 2
    assert all(3 < count <= 20 for count in counts)


@pytest.mark.slow
def test_kernels_page_finds_the_seasonal_kernel() -> None:
    scores = re.findall(r"R² a year ahead (-?[\d.]+)", printed("kernels.md"))
    assert float(scores[0]) > 0.9 > float(scores[1])
    assert "best: periodic(period=12) + linear" in printed("kernels.md")
    assert "'rbff' at character 7 of 'rbf + rbff': the kernels are rbf" in printed("kernels.md")


@pytest.mark.slow
def test_scikit_learn_page_keeps_column_names() -> None:
    assert "['size' 'age']" in printed("scikit-learn.md")
    assert re.search(r"\d inducing points", printed("scikit-learn.md"))
    assert "'gp__kernel': " in printed("scikit-learn.md")


@pytest.mark.slow
def test_checkpoints_page_resumes_to_the_same_predictions() -> None:
    assert "[ True  True  True  True  True]" in printed("checkpoints.md")


def test_run_page_failing_block_raises_with_line_number() -> None:
    page = "Text.\n\n```python\nx = 1\n```\n\n    ```python\n    assert x == 2\n    ```\n"
    with pytest.raises(ExampleError, match=r"a\.md, line 8"):
        run_page(page, "a.md")


def test_run_page_warning_raises() -> None:
    with pytest.raises(ExampleError, match="UserWarning"):
        run_page("```python\nimport warnings\nwarnings.warn('!')\n```\n", "a.md")


def test_with_outputs_inserts_text_and_figure_after_the_block() -> None:
    code = "import matplotlib.pyplot as plt\nplt.plot([0, 1], color='black')\nprint(6 * 7)"
    page = f"```python\n{code}\n```\nAfter."
    before, _, after = with_outputs(page, run_page(page, "a.md")).partition("42")
    assert before.startswith("```python")
    assert after.endswith("````\nAfter.")
    assert after.count("<svg") == 1
    assert "currentColor" in after
    assert "#000000" not in after


def test_run_pages_runs_a_page_again_only_if_it_changed(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def page(text: str) -> str:
        return (
            f"{text}\n```python\nfrom pathlib import Path\n"
            f"with Path({str(log)!r}).open('a') as log:\n    _ = log.write('x')\nprint(1)\n```\n"
        )

    for pages in ({"a": page("A"), "b": page("B")}, {"a": page("A"), "b": page("C")}):
        outputs = run_pages(pages, cache=tmp_path / "cache", processes=1)
        assert [each.text for each in outputs["a"]] == ["1\n"]
    assert log.read_text() == "xxx"
    assert len(list((tmp_path / "cache").iterdir())) == 2


@pytest.mark.parametrize("page", PAGES)
def test_page_reference_links_resolve(page: str) -> None:
    documented = {name for name, _ in classes_of_the_reference()}
    for name in re.findall(r"\]\(#(winnowgp[\w.]*)\)", text(page)):
        package, _, attribute = name.rpartition(".")
        public = getattr(importlib.import_module(package), "__all__", ())
        assert name in documented or attribute in public, name


def test_reference_classes_exist_and_are_not_public() -> None:
    """Classes that a page lists by the module that defines them are not in any `__all__`."""
    classes = classes_of_the_reference()
    assert len(classes) > 30
    for name, page in classes:
        module, _, attribute = name.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), attribute)
            package = importlib.import_module(f"winnowgp.{module.split('.')[1]}")
        except MissingExtraError:
            continue
        assert isinstance(found, type), name
        assert found.__module__ == module, f"{page}: {name} is defined in {found.__module__}"
        assert attribute not in getattr(package, "__all__", ()), name


def classes_of_the_reference() -> list[tuple[str, str]]:
    """Return the classes that pages of the reference list one by one, and their pages."""
    return [
        (name, page.name)
        for page in (DOCS / "reference").glob("*.md")
        for name in re.findall(r"autoclass:: (\S+)", page.read_text(encoding="utf-8"))
    ]


@pytest.mark.parametrize("page", PAGES)
def test_page_figures_exist(page: str) -> None:
    figures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text(page))
    assert [name for name in figures if not (PAGES[page].parent / name).is_file()] == []


def test_pages_name_existing_benchmarks() -> None:
    named = {name for page in PAGES for name in re.findall(r"benchmarks/(\w+\.py)", text(page))}
    table = set(re.findall(r"\| `(\w+\.py)[^`|]*` \|$", text("benchmarks.md"), re.M))
    assert len(table) > 8
    assert len(named) > 20
    files = {path.name for path in (ROOT / "benchmarks").glob("*.py")}
    assert (named | table) - files == set()


def test_saving_page_names_the_format_version() -> None:
    assert f"the version of this layout, now {FORMAT_VERSION} |" in text("saving.md")


def test_architecture_page_names_existing_files() -> None:
    source = ROOT / "src" / "winnowgp"
    named = re.findall(r"`(\w+/\w+\.py)`", text("architecture.md"))
    assert len(named) > 20
    assert [name for name in named if not (source / name).is_file()] == []


def test_architecture_page_lists_every_module() -> None:
    """The table of packages names every module, except those of experiments and commands."""
    source = ROOT / "src" / "winnowgp"
    rows = re.findall(r"^\|.*\|$", text("architecture.md"), re.M)
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    modules = {
        path.stem
        for path in source.rglob("*.py")
        if path.relative_to(source).parts[0] not in ("experiments", "cli", "integrations")
        and not path.stem.startswith("__")
    }
    assert modules - listed == set()


def test_reference_has_every_package_with_public_names() -> None:
    documented = set()
    for page in (DOCS / "reference").glob("*.md"):
        documented |= set(re.findall(r"automodule:: (\S+)", page.read_text(encoding="utf-8")))
    public = {
        module.name
        for module in pkgutil.walk_packages(winnowgp.__path__, "winnowgp.")
        if (module.ispkg or module.name.count(".") == 1)
        and hasattr(importlib.import_module(module.name), "__all__")
    }
    assert public | {"winnowgp.typing", "winnowgp.errors"} == documented


def test_reference_names_public_constants_and_aliases() -> None:
    """autodoc skips values without a docstring, so the pages name them."""
    pages = "".join(page.read_text("utf-8") for page in (DOCS / "reference").glob("*.md"))
    missing = []
    for module in re.findall(r"automodule:: (\S+)", pages):
        try:
            package = importlib.import_module(module)
        except MissingExtraError:
            continue
        for name in getattr(package, "__all__", ()):
            documented = isinstance(getattr(package, name), type | FunctionType)
            if not documented and f":: {module}.{name}\n" not in pages:
                missing.append(f"{module}.{name}")
    assert missing == []
