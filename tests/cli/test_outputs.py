"""`winnow fit` and `winnow predict` of several targets."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

import winnowgp
from winnowgp.cli.app import run
from winnowgp.errors import InputError
from winnowgp.tabular import MultiOutputTable, fit_outputs_table


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a table of two targets, one of which is missing in some rows."""
    path, rng = tmp_path_factory.mktemp("outputs") / "table.csv", np.random.default_rng(0)
    x = rng.uniform(0, 6, 50)
    wave = np.sin(x) + 0.02 * rng.normal(size=50)
    with path.open("w", encoding="utf-8") as file:
        file.write("name,x,side,wave,level\n")
        for i in range(50):
            cell = "" if i % 5 == 0 else f"{wave[i]:.4f}"
            file.write(f"r{i},{x[i]:.4f},{'left' if i % 2 else 'right'},{cell},{3 - wave[i]:.4f}\n")
    return path


@pytest.fixture(scope="module")
def model(table: Path) -> Path:
    """Return the file of a fitted model."""
    path = table.with_name("model.winnow")
    targets = ["-t", "wave", "-t", "level", "--tolerance", "0.2"]
    assert run(["fit", str(table), *targets, "--id", "name", "-q", "-o", str(path)]) == 0
    return path


def test_several_targets_are_predicted_with_their_names(table: Path, model: Path) -> None:
    out = table.with_name("predicted.csv")
    assert run(["predict", str(model), str(table), "-q", "-o", str(out)]) == 0
    with out.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 50
    assert list(rows[0])[:3] == ["name", "wave_mean", "wave_sd"]
    assert float(rows[7]["wave_mean"]) == pytest.approx(3 - float(rows[7]["level_mean"]), abs=0.1)
    assert float(rows[0]["level_lower"]) < float(rows[0]["level_mean"])


def test_saved_model_has_quality_and_equal_predictions(table: Path, model: Path) -> None:
    loaded = winnowgp.load(model)
    assert isinstance(loaded, MultiOutputTable)
    assert loaded.targets == ["wave", "level"]
    assert loaded.quality["level"]["r2"] > 0.9
    again = winnowgp.load(loaded.save(table.with_name("again.winnow")))
    rows = winnowgp.read_table(table)
    for name, values in loaded.predict(rows).items():
        np.testing.assert_array_equal(again.predict(rows)[name], values)


def test_other_commands_and_options_refuse_several_targets(
    table: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["info", str(model)]) == 2
    assert "only `winnow predict` can use" in capsys.readouterr().err
    assert run(["predict", str(model), str(table), "--quantiles", "0.5"]) == 2
    assert "`quantiles` are for models of one target" in capsys.readouterr().err
    assert run(["fit", str(table), "-t", "wave", "-t", "level", "--cv", "5"]) == 2
    assert "`--cv` is for models of one target" in capsys.readouterr().err
    assert run(["fit", str(table), "-t", "wave", "-t", "level", "--layers", "2"]) == 2
    assert "`--layers` is for models of one target" in capsys.readouterr().err
    for targets, message in (
        (["wave", "wave"], "at least two different columns"),
        (["wave", "side"], "must be numbers; 'side' is not"),
    ):
        with pytest.raises(InputError, match=message):
            fit_outputs_table(winnowgp.read_table(table), targets, drop=("name",))


def test_json_reports_points_of_each_process(
    table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--tolerance", "0.5", "--test-size", "0", "--drop", "name,side", "--json"]
    out = str(table.with_name("other.winnow"))
    assert run(["fit", str(table), "-t", "wave", "-t", "level", *arguments, "-o", out]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["inducing_points"]) == 2
    assert result["quality"] == {}
