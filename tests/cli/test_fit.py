"""`winnow fit`: seeds, held-out rows, and ambiguous tables."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import winnowgp
from helpers.forks import Forks
from helpers.interrupted_fit import interrupted_fit
from winnowgp.cli.app import run
from winnowgp.cli.summary import print_summary
from winnowgp.report.summary import Choice, Summary


def held_out(model: winnowgp.TabularModel) -> list[float]:
    """Targets that the fit never saw."""
    quality = model.summary["quality"]
    assert quality is not None
    assert quality["residuals"] is not None
    return quality["residuals"]["actual"]


@pytest.mark.usefixtures("quickly")
def test_fit_same_seed_gives_the_same_model(shop: Path, tmp_path: Path) -> None:
    arguments = [
        "fit",
        str(shop),
        "-t",
        "y",
        "--drop",
        "up,visits,day,id,x",
        "--tolerance",
        "1",
        "-q",
    ]
    table, models, predictions = winnowgp.read_table(shop), [], []
    for seed in ("1", "1", "2"):
        out = tmp_path / f"{len(models)}.winnow"
        assert run([*arguments, "--kernel", "rbf", "--seed", seed, "-o", str(out)]) == 0
        models.append(winnowgp.load(out))
        predictions.append(models[-1].predict(table)["mean"])
    np.testing.assert_array_equal(predictions[0], predictions[1])
    assert (predictions[0] != predictions[2]).any()
    # A seed decides both which rows are held out and what the estimator draws.
    first, _, other = map(held_out, models)
    assert set(first) != set(other)
    assert [model.estimator.random_state for model in models] == [1, 1, 2]


@pytest.mark.filterwarnings("ignore::winnowgp.errors.FitWarning")
@pytest.mark.usefixtures("quickly")
def test_fit_ignores_held_out_rows() -> None:
    """Whatever stands in them, the model is the same, and its quality another."""
    x = np.linspace(0, 6, 40)
    table = {"x": x, "y": np.sin(x)}
    settings: dict[str, Any] = {"tolerance": 1.0, "kernel": "rbf"}
    first = winnowgp.fit_table(winnowgp.DataTable.of(table), "y", **settings)
    unseen = np.isin(table["y"], held_out(first))
    assert unseen.sum() == 8
    other = {name: np.where(unseen, 9 + column, column) for name, column in table.items()}
    second = winnowgp.fit_table(winnowgp.DataTable.of(other), "y", **settings)
    rows = winnowgp.DataTable.of({"x": x})
    np.testing.assert_array_equal(second.predict(rows)["mean"], first.predict(rows)["mean"])
    assert held_out(second) == other["y"][unseen].tolist()


@pytest.mark.usefixtures("quickly")
def test_fit_without_held_out_rows_reports_no_quality(
    shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "m.winnow"
    arguments = ["fit", str(shop), "-t", "y", "--drop", "up,visits,day,id,x", "--test-size", "0"]
    assert run([*arguments, "--json", "-o", str(out)]) == 0
    assert json.loads(capsys.readouterr().out)["held_out"] is None
    assert run(["plot", str(out), "--what", "calibration", "-o", str(tmp_path / "a.png")]) == 2


@pytest.mark.usefixtures("quickly")
def test_fit_precision_reaches_the_estimator(
    shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "m.winnow"
    arguments = ["fit", str(shop), "--precision", "mixed", "-o", str(out), "-q"]
    assert run([*arguments, "-t", "y", "--drop", "up,visits,day,id,x"]) == 0
    saved = winnowgp.load(out)
    assert saved.estimator.precision == "mixed"
    assert saved.summary["settings"]["precision"] == "mixed"
    out.unlink()
    for task, target in (("classification", "up"), ("counts", "visits")):
        assert run([*arguments, "-t", target, "--task", task, "--id", "id"]) == 2
        assert f"must be 'double' for {task}; got 'mixed'" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize("priors", ["weak", "none"])
def test_fit_priors_reach_the_estimator(priors: str, shop: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.winnow"
    arguments = ["fit", str(shop), "-t", "y", "--drop", "up,visits,day,id,x", "--priors", priors]
    assert run([*arguments, "--kernel", "rbf", "--max-points", "2", "-o", str(out), "-q"]) == 0
    saved = winnowgp.load(out)
    assert saved.estimator.priors == (None if priors == "none" else "weak")
    assert saved.summary["settings"].get("priors", "weak") == priors


def test_inputs_of_a_constant_model_have_no_order(
    models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    summary: Summary = winnowgp.load(models["y"]).summary
    print_summary(summary)
    assert "(most important first)" in capsys.readouterr().out
    constant: Choice = {**summary["choice"], "points": 0}
    print_summary({**summary, "choice": constant})
    text = capsys.readouterr().out
    assert "most important first" not in text
    assert "none of which the constant model uses" in text


@pytest.mark.usefixtures("quickly")
def test_fit_column_names_with_brackets_are_shown_verbatim(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Brackets are not rich's markup, dollars not matplotlib's mathematics."""
    rows = [f"{x:.2f},{x * x:.2f},{np.sin(x):.4f}" for x in np.linspace(0, 5, 30)]
    table = tmp_path / "a.csv"
    table.write_text("\n".join(["speed [/s],$a_$ [kg],y", *rows]))
    model = tmp_path / "a.winnow"
    assert run(["fit", str(table), "-t", "y", "--max-points", "3", "-o", str(model)]) == 0
    output = capsys.readouterr().out
    assert "speed [/s]" in output
    assert "$a_$ [kg]" in output
    assert run(["plot", str(model), "-o", str(tmp_path / "a.png")]) == 0


# The first row has no target and is left out; with this seed row 8 is held out.
STRAY = "\n".join(f"{'tall' if i == 8 else i},{'' if i == 1 else i * i}" for i in range(1, 12))

HUGE = "x,y\n1,\n2,\n3,1\n4,2\n5,1e200\n6,4\n"


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("x,y\n1,2\ninf,3\n4,5\n5,6\n6,7\n", "-t y", "inf in row 2"),
        ("x;y\n1;2,5\n2;3,5\n3;4,1\n", "-t y", "'2,5' looks like a number with a decimal comma"),
        ("x;y\n1,5;2\n2,5;3\n3,5;4\n", "-t y", "column 'x': '1,5' looks like a number with"),
        (f"x,y\n{STRAY}", "-t y --missing impute --seed 0", "'tall', first in row 8. Correct"),
        (HUGE, "-t y --missing impute", "got 1e+200 in row 5"),
        ("x,y\n1,2\n2,\n3,4\n", "-t y", "must not be missing; it is in 1 row, first in row 2"),
        (
            "x,y\n1,35 %\n2,40 %\n3,50 %\n",
            "-t y --likelihood beta",
            "got 35 % in row 1, and 3 such rows in all. Divide per cents by 100: write 0.35",
        ),
        (
            "x,y\n1,0.3\n2,1\n3,0.5\n",
            "-t y --likelihood beta",
            "got 1 in row 2, and 1 such row in all. Move 0 and 1",
        ),
        ("x,y\n1,2\n2,3\n3,4\n", "-t y --priors strong", "`--priors` must be weak or none"),
        (
            "x,y\n1,2\n2,3\n3,4\n",
            "-t y --mean foo",
            "`--mean` must be one of auto, zero, constant, linear; got 'foo'",
        ),
        ("mean,x,y\na,1,2\nb,2,3\nc,3,4\n", "-t y --id mean", "column of predictions"),
    ],
)
def test_fit_ambiguous_table_is_refused(
    text: str, arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "a.csv"
    table.write_text(text)
    assert run(["fit", str(table), *arguments.split(), "-o", str(tmp_path / "a.winnow")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")
def test_fit_interrupted_leaves_no_file(forks: Forks) -> None:
    """A fit that would go on for seconds, interrupted once it has begun."""
    code, output, left = forks.call(interrupted_fit)
    assert code == 130, output
    assert "interrupted; nothing was written" in output
    assert left == {"big.csv": None, "m.winnow": "what was there"}
