"""Sentences about the selection of inducing points, and the report, opened in a browser."""

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import winnowgp
from helpers.browser import Browser, absent
from helpers.short_fits import short_fits
from winnowgp import DataTable, TabularModel, fit_table
from winnowgp.errors import RandomSplitWarning
from winnowgp.report import report_page, save_report
from winnowgp.report.summary import (
    Summary,
    evidence_sentence,
    growth_sentence,
    kernel_sentence,
    selection_lines,
)


def choice(lower: float, upper: float, method: str) -> Any:
    """Return the entries that the sentence reads."""
    return {"kl": (lower, upper), "evidence_method": method, "rows": 200}


def test_evidence_sentence_distinguishes_exact_and_bounded() -> None:
    exact = evidence_sentence(choice(3.2, 3.2, "exact"))
    assert exact == (
        "exact, ELBO is 0.0160 nats per observation below (KL[q ‖ posterior] = 3.2 nats)"
    )
    bounded = evidence_sentence(choice(1.0, 5.0, "conjugate-gradient"))
    assert bounded.startswith("between 0.0050 and 0.0250 nats per observation above the ELBO")
    assert "between 1 and 5 nats" in bounded


@pytest.mark.parametrize(
    ("limit", "gain", "expected"),
    [
        (None, 0.0, "more candidates gain less than the tolerance"),
        ("work", 0.21, "still pay: the last doubling gained 0.21 nats per observation"),
        ("memory", 1e-5, "may still pay"),
        ("max_points", 0.3, "twice as many inducing points would gain at least 0.3 nats"),
        ("work", float("nan"), "an unknown number of nats"),
    ],
)
def test_growth_sentence_names_limit_and_gain(
    limit: str | None, gain: float, expected: str
) -> None:
    sentence = growth_sentence(limit, gain)
    assert expected in sentence
    assert (f"(limit: {limit})" in sentence) == (limit is not None)


def test_kernel_sentence_ranks_kernels_and_omits_failures() -> None:
    sentence = kernel_sentence("rbf", {"matern52": -0.5, "rbf": 0.0, "matern32": None})
    assert sentence.endswith("relative to the best: rbf 0, matern52 -0.5")
    assert kernel_sentence("periodic", {}) == "periodic"


EVIL = "</script><script>window.evil=1</script><img src=x onerror='window.evil=2'>"
FILES = Path(__file__).parent.parent / "numbers" / "files"
needs_browser = pytest.mark.skipif(absent() is not None, reason=absent() or "")


def table(N: int = 50) -> DataTable:
    rng = np.random.default_rng(3)
    x, town = rng.uniform(0, 6, N), rng.choice(["Oslo", EVIL], N)
    y = np.sin(x) + (town == "Oslo") + 0.1 * rng.normal(size=N)
    day = [f"2024-01-{1 + i % 28:02d}" for i in range(N)]
    labels = np.where(y > 1, "high", np.where(y > 0, "middle", "low"))
    return DataTable.of({EVIL: x, "town": town, "day": day, "y": y, "class": labels})


@pytest.fixture(scope="module")
def models() -> dict[str, TabularModel]:
    settings = {"command": f"winnow fit '{EVIL}'"}
    quick: dict[str, Any] = {"tolerance": 0.5, "settings": settings}
    # The table has dates.
    with short_fits(sizes=1), pytest.warns(RandomSplitWarning):
        return {
            "regression": fit_table(table(), "y", drop=("class",), **quick),
            "classification": fit_table(table(), "class", drop=("y", "day"), kernel="rbf", **quick),
            "untested": fit_table(
                table(30), "y", drop=("class", "town"), kernel="rbf", test_size=0, **quick
            ),
        }


@pytest.fixture(scope="module")
def resized(models: dict[str, TabularModel]) -> TabularModel:
    model = models["regression"]
    smallest = model.estimator.available_sizes_[0]
    assert isinstance(smallest, int)
    return model.resized(smallest)


@pytest.fixture
def page(request: pytest.FixtureRequest, models: dict[str, TabularModel], tmp_path: Path) -> Path:
    return save_report(models[request.param].summary, tmp_path / "report.html")


def test_report_page_refers_to_no_other_file(models: dict[str, TabularModel]) -> None:
    text = report_page(models["regression"].summary)
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)""", text.replace(EVIL, ""))
    assert EVIL not in text
    addresses = set(re.findall(r"https?://[^\s\"'`)]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
def test_report_page_opens_in_each_theme_and_width(
    models: dict[str, TabularModel],
    resized: TabularModel,
    dark: bool,
    width: int,
    tmp_path: Path,
) -> None:
    earlier = winnowgp.load(FILES / "TabularModel-regression.winnow")
    every = {**models, "resized": resized, "earlier": earlier}
    with Browser(width=width, dark=dark) as browser:
        for task, model in every.items():
            browser.open(save_report(model.summary, tmp_path / f"{task}.html"))
            assert browser.run("return location.pathname").endswith(f"/{task}.html")
            assert browser.complaints() == []
            drawn = browser.run("return document.querySelectorAll('svg').length")
            assert drawn >= (3 if task == "resized" else 5)
            assert browser.run("return document.documentElement.scrollWidth") == width
            assert browser.run("return window.evil") is None
            assert browser.run("return performance.getEntriesByType('resource').length") == 0
            shade = browser.run("return getComputedStyle(document.body).backgroundColor")
            assert (max(map(int, re.findall(r"\d+", shade))) < 60) == dark
            # Nothing drawn is NaN, and no text is undefined.
            assert "NaN" not in browser.run("return document.querySelector('main').innerHTML")
            assert "undefined" not in browser.run("return document.body.innerText")


def test_report_page_says_what_the_summary_knows(
    models: dict[str, TabularModel], resized: TabularModel
) -> None:
    summary = models["regression"].summary
    lines = dict(selection_lines(summary["choice"]))
    text = report_page(summary)
    for label in ("kernel", "log evidence", "predictive gap", "growth", "sizes"):
        assert json.dumps([label, lines[label]])[1:-1] in text
    small = dict(selection_lines(resized.summary["choice"]))
    assert not {"log evidence", "growth"} & small.keys()
    assert small["resized"] == f"from {summary['choice']['points']} inducing points"


@needs_browser
def test_report_page_shows_importances_next_to_nothing_as_such(
    models: dict[str, TabularModel], tmp_path: Path
) -> None:
    summary = deepcopy(models["regression"].summary)
    assert summary["importance"] is not None
    first, *others = summary["importance"]["columns"]
    first |= {"loss": 0.5, "standard_error": 0.02}
    for column in others:
        column |= {"loss": -4.49e-6, "standard_error": 2.8e-6}
    for column in summary["columns"]:
        column["relevance"] = 3.2e-7
    with Browser() as browser:
        browser.open(save_report(summary, tmp_path / "report.html"))
        shown = browser.run("return document.querySelector('main').innerText")
    assert "0.5 ± 0.02" in shown
    assert "e-6" not in shown
    assert "e-7" not in shown
    assert shown.count("< 0.0001") == len(others) + len(summary["columns"])


@needs_browser
def test_report_page_of_a_resized_model_has_no_quality(
    resized: TabularModel, models: dict[str, TabularModel], tmp_path: Path
) -> None:
    with Browser() as browser:
        browser.open(save_report(resized.summary, tmp_path / "report.html"))
        text = browser.run("return document.getElementById('quality').innerText")
        assert "Its quality was not measured" in text
        # A summary of folds says how they were predicted.
        quality = models["regression"].summary["quality"]
        settings = {**resized.summary["settings"], "folds": "5"}
        folds: Summary = {**resized.summary, "quality": quality, "settings": settings}
        browser.open(save_report(folds, str(tmp_path / "folds.html")))
        text = browser.run("return document.getElementById('quality').innerText")
        assert "in 5 folds, each predicted by a model of the rows of other folds" in text
        assert "not used for training" not in text
        browser.open(tmp_path / "report.html")
        text = browser.run("return document.getElementById('choice').innerText")
        assert "full GP" in text
        assert "Inclusion probabilities" not in text


@needs_browser
@pytest.mark.parametrize("page", ["regression"], indirect=True)
def test_report_page_controls_work(page: Path, models: dict[str, TabularModel]) -> None:
    summary = models["regression"].summary
    moments = summary["training"]["moments"]
    with Browser() as browser:
        browser.open(page)
        status = "return document.getElementById('now').textContent"
        assert browser.run(status).startswith(f"Step {moments[-1]['step']} of")
        # The slider shows the step at its position, with the inducing points of that step.
        for i in (0, len(moments) // 2):
            browser.run(
                f"const s = document.getElementById('step'); s.value = {i};"
                "s.dispatchEvent(new Event('input'));"
            )
            assert browser.run(status).startswith(f"Step {moments[i]['step']} of")
            circles = "#training .card:first-child circle:not([visibility])"
            drawn = browser.run(f"return document.querySelectorAll('{circles}').length")
            assert drawn == len(moments[i]["x"])
        browser.run("document.getElementById('play').click()")
        assert "pause" in browser.run("return document.getElementById('play').textContent")
        browser.run("document.getElementById('play').click()")
        assert "play" in browser.run("return document.getElementById('play').textContent")
        browser.run("document.getElementById('theme').click()")
        assert browser.run("return document.documentElement.dataset.theme") == "dark"
        browser.run("document.getElementById('copy').click()")
        assert browser.complaints() == []


@needs_browser
@pytest.mark.parametrize("page", ["regression"], indirect=True)
def test_report_page_shows_a_tooltip_under_the_pointer(
    page: Path, models: dict[str, TabularModel]
) -> None:
    choice = models["regression"].summary["choice"]
    with Browser() as browser:
        browser.open(page)
        box = browser.run(
            "const s = document.querySelector('#choice svg'); s.scrollIntoView();"
            "const b = s.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]"
        )
        tip = "return document.getElementById('tip').hidden"
        assert browser.run(tip) is True
        browser.command(
            "Input.dispatchMouseEvent",
            type="mouseMoved",
            x=box[0] + 0.97 * box[2],
            y=box[1] + 0.5 * box[3],
        )
        assert browser.run(tip) is False
        text = browser.run("return document.getElementById('tip').textContent")
        assert choice["frontier"] is not None
        assert text.startswith(f"{len(choice['frontier']) - 1} inducing points: ")
        browser.command("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
        assert browser.run(tip) is True


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_report_page_shows_alarms_importance_terms_and_dates(
    models: dict[str, TabularModel], width: int, tmp_path: Path
) -> None:
    """The box is first; every label fits; inducing points along a date have dates on their axis."""
    summary = deepcopy(models["regression"].summary)
    message = f"residuals repeat every 7 days of column {EVIL!r}. Add a periodic term."
    summary["alarms"] = [{"warning": "PeriodicResidualsWarning", "message": message}]
    summary["terms"] = [{**summary["effects"][0], "term": "rbf", "note": "the last 3 are shown"}]
    summary["training"]["inputs"] = ["day", EVIL]
    with Browser(width=width) as browser:
        browser.open(save_report(summary, tmp_path / "report.html"))
        assert browser.complaints() == []
        assert browser.run("return document.documentElement.scrollWidth") == width
        box = browser.run("return document.getElementById('alarms').innerText")
        assert "1 thing to look at" in box
        assert message[0].upper() + message[1:] in box
        text = browser.run("return document.getElementById('inputs').innerText")
        for title in ("Importance", "Inverse lengthscales", "Terms of the kernel", "rbf, along"):
            assert title in text
        bars = browser.run("return document.querySelectorAll('#inputs rect.density').length")
        assert bars >= 40
        # No label reaches beyond its figure.
        beyond = browser.run(
            "return [...document.querySelectorAll('svg')].flatMap((svg) => {"
            "const outer = svg.getBoundingClientRect();"
            "return [...svg.querySelectorAll('text')].filter((t) => {"
            "const b = t.getBoundingClientRect();"
            "return b.left < outer.left - 3 || b.right > outer.right + 3"
            " || b.bottom > outer.bottom + 3; }).map((t) => t.textContent); })"
        )
        assert beyond == []
        axis = "return document.querySelector('#training svg').textContent"
        assert re.search(r"20\d\d-\d\d|\d\d-\d\d", browser.run(axis))


def test_report_page_without_alarms_has_no_box(models: dict[str, TabularModel]) -> None:
    summary = models["untested"].summary
    assert summary["alarms"] == []
    assert '<div id="alarms" role="note" hidden></div>' in report_page(summary)
