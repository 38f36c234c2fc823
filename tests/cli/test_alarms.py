"""Alarms on the command line: notes, JSON, warnings on stderr, and the report."""

import json
from pathlib import Path

import numpy as np
import pytest

from helpers.short_fits import shortest_fits
from winnowgp.cli.app import run
from winnowgp.cli.options import with_options


@pytest.fixture(scope="module")
def leaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table with a column that is the target in other units."""
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 6, 80)
    y = np.sin(x) + 0.2 * rng.normal(size=80)
    lines = [f"{a:.4f},{100 * b:.1f},{b:.4f}" for a, b in zip(x, y, strict=True)]
    path = tmp_path_factory.mktemp("leak") / "leak.csv"
    path.write_text("\n".join(["x,cents,y", *lines]))
    return path


def fit(table: Path, *arguments: str) -> Path:
    out = table.parent / "m.winnow"
    with shortest_fits():
        settings = ["--max-points", "8", "--kernel", "rbf", "-o", str(out)]
        assert run(["fit", str(table), "-t", "y", *settings, *arguments]) == 0
    return out


def test_fit_prints_alarms_once_as_notes(leaking: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = fit(leaking)
    printed = capsys.readouterr()
    assert printed.out.count("column 'cents' alone determines the target") == 1
    assert "note: R² on held-out rows" in printed.out
    assert "cents" not in printed.err
    assert run(["info", str(model)]) == 0
    assert "note: R² on held-out rows" in capsys.readouterr().out
    page = leaking.parent / "report.html"
    assert run(["report", str(model), "-o", str(page)]) == 0
    assert "alone determines the target" in page.read_text(encoding="utf-8")


def test_fit_json_has_alarms_and_importance_and_stderr_the_warnings(
    leaking: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = fit(leaking, "--json")
    printed = capsys.readouterr()
    summary = json.loads(printed.out)
    (alarm,) = summary["alarms"]
    assert alarm["warning"] == "LeakageWarning"
    assert with_options(alarm["message"]) in printed.err
    assert summary["importance"]["columns"][0]["column"] == "cents"
    out = leaking.parent / "a.svg"
    assert run(["plot", str(model), "--what", "importance", "-q", "-o", str(out)]) == 0
    assert b"<svg" in out.read_bytes()[:1000]
    assert run(["plot", str(model), "--what", "terms", "-o", str(out)]) == 2
    assert "needs a model whose kernel is a sum" in capsys.readouterr().err


def test_predict_warns_of_rows_far_outside(
    leaking: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = fit(leaking, "--quiet")
    rows = leaking.parent / "new.csv"
    rows.write_text("x,cents\n1,50\n900,50\n")
    capsys.readouterr()
    assert run(["predict", str(model), str(rows)]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("\n") == 3
    assert "winnow: 1 of 2 rows lie far outside the training rows: column 'x'" in printed.err


@pytest.mark.parametrize("split", [(), ("--cv", "2")], ids=["held out", "folds"])
def test_fit_notes_of_target_and_split_are_printed_and_saved(
    split: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    days = np.datetime64("2024-01-01") + np.arange(60)
    counts = np.random.default_rng(0).poisson(2.0, 60)
    lines = [f"{day},{count}" for day, count in zip(days, counts, strict=True)]
    table = tmp_path / "counts.csv"
    table.write_text("\n".join(["day,y", *lines]))
    model = fit(table, *split)
    expected = ("the target 'y' has integers from", "rows were held out at random")
    printed = capsys.readouterr().out
    assert [printed.count(f"note: {text}") for text in expected] == [1, 1]
    assert run(["info", str(model), "--json"]) == 0
    kinds = {alarm["warning"] for alarm in json.loads(capsys.readouterr().out)["alarms"]}
    assert {"LikelihoodWarning", "RandomSplitWarning"} <= kinds
