"""`winnow evaluate`, `winnow compare`, held-out rows of `winnow fit`, and quantiles."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import winnowgp
from helpers.commands import refusal
from winnowgp.cli.app import run


def printed(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_evaluate_prints_quality(
    shop: Path, models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["evaluate", str(models["y"]), str(shop)]) == 0
    text = capsys.readouterr().out
    assert "60 rows of shop.csv, target y" in text
    assert "note: shop.csv is the file that y.winnow was fitted to" in text
    assert "log density per observation" in text
    assert "constant" in text


@pytest.mark.parametrize(
    ("target", "metric"), [("y", "RMSE"), ("visits", "RMSE"), ("up", "accuracy")]
)
def test_evaluate_json_equals_the_library(
    target: str,
    metric: str,
    shop: Path,
    models: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["evaluate", str(models[target]), str(shop), "--json"]) == 0
    found = printed(capsys)
    expected = winnowgp.evaluate_model(winnowgp.load(models[target]), winnowgp.read_table(shop))
    (value,) = [m for m in expected["metrics"] if m["name"] == metric]
    assert (found["target"], found["rows"]) == (target, 60)
    assert found["used_for_training"] is True
    assert found[metric] == pytest.approx(value["value"])
    assert found["constant"][metric] == pytest.approx(value["baseline"])


def test_evaluate_other_rows_have_no_note(
    shop: Path, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.csv"
    other.write_text("\n".join(shop.read_text(encoding="utf-8").splitlines()[:40]), "utf-8")
    assert run(["evaluate", str(models["y"]), str(other)]) == 0
    assert "note:" not in capsys.readouterr().out
    assert run(["compare", str(models["y"]), str(models["y"]), str(other), "--json"]) == 0
    assert printed(capsys)["used_for_training"] is False


def test_compare_says_which_model_is_better(
    shop: Path, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = winnowgp.load(models["y"])
    smallest = model.estimator.available_sizes_[0]
    small = model.resized(smallest).save(tmp_path / "small.winnow")
    assert run(["compare", str(small), str(models["y"]), str(shop), "--json"]) == 0
    found = printed(capsys)
    density = found["measures"][0]
    assert density["difference"] == pytest.approx(density["second"] - density["first"])
    assert density["standard_error"] >= 0
    assert run(["compare", str(models["y"]), str(models["y"]), str(shop)]) == 0
    text = capsys.readouterr().out
    assert "No clear difference in log density" in text
    assert "shop.csv is the file that y.winnow was fitted to" in text
    assert run(["compare", str(models["y"]), str(models["up"]), str(shop)]) == 2
    assert "same column; got 'y' and 'up'" in capsys.readouterr().err


@pytest.mark.usefixtures("quickly")
def test_fit_cv_prints_folds_and_saves_a_model_of_all_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "a.csv", tmp_path / "m.winnow"
    lines = [f"{x:.2f},{np.sin(x):.3f}" for x in np.linspace(0, 6, 24)]
    data.write_text("\n".join(["x,y", *lines]))
    arguments = ["fit", str(data), "-t", "y", "--kernel", "rbf", "--tolerance", "1", "--cv", "2"]
    assert run([*arguments, "-o", str(out), "--json"]) == 0
    found = printed(capsys)
    validation = found["cross_validation"]
    assert [fold["rows"] for fold in validation["folds"]] == [12, 12]
    values = [fold["RMSE"] for fold in validation["folds"]]
    assert validation["mean"]["RMSE"] == pytest.approx(np.mean(values))
    assert validation["standard_error"]["RMSE"] == pytest.approx(np.ptp(values) / 2)
    assert (found["held_out"]["rows"], found["train_rows"]) == (24, 24)
    assert found["settings"]["likelihood"] == "gaussian"
    assert run(["info", str(out)]) == 0
    text = capsys.readouterr().out
    assert "24 for training; held out in 2 folds" in text
    assert "Rows of all 2 folds" in text
    assert "Held-out rows" not in text


@pytest.mark.usefixtures("quickly")
def test_fit_log_target_and_test_file(
    shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with shop.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    parts = {"train": rows[:40], "test": rows[40:]}
    for name, part in parts.items():
        lines = [f"{r['town']},{np.exp(float(r['y']))}" for r in part]
        (tmp_path / f"{name}.csv").write_text("\n".join(["town,price", *lines]), "utf-8")
    out = tmp_path / "m.winnow"
    arguments = [
        "fit",
        str(tmp_path / "train.csv"),
        "-t",
        "price",
        "--log-target",
        "--kernel",
        "rbf",
    ]
    arguments += ["--tolerance", "1", "--test-file", str(tmp_path / "test.csv"), "-o", str(out)]
    assert run(arguments) == 0
    text = capsys.readouterr().out
    assert "gaussian, of the logarithm of the target" in text
    assert "40 for training, 20 held out" in text
    assert run(["evaluate", str(out), str(tmp_path / "test.csv"), "--json"]) == 0
    evaluated = printed(capsys)
    assert run(["info", str(out), "--json"]) == 0
    held_out = printed(capsys)["held_out"]
    # The rows of the test file are those that were held out.
    assert evaluated["RMSE"] == pytest.approx(held_out["RMSE"])
    predictions = tmp_path / "p.csv"
    arguments = ["predict", str(out), str(tmp_path / "test.csv"), "--quantiles", "0.05, 0.5"]
    assert run([*arguments, "-o", str(predictions), "-q"]) == 0
    table = winnowgp.read_table(predictions)
    assert table.names == ("mean", "sd", "lower", "upper", "q0.05", "q0.5")
    low, median, mean = (table.numbers(name) for name in ("q0.05", "q0.5", "mean"))
    assert low is not None
    assert median is not None
    assert mean is not None
    # The median of a log-normal distribution lies below its mean.
    assert ((low > 0) & (low < median) & (median < mean)).all()


def test_predict_quantiles_of_counts_are_integers(
    shop: Path, models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["predict", str(models["visits"]), str(shop), "--json", "--quantiles", "0.1,0.9"]
    assert run(arguments) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    values = np.array([[row["q0.1"], row["q0.9"]] for row in rows])
    assert (values == np.round(values)).all()
    assert (values[:, 0] <= values[:, 1]).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("fit {shop} -t y --cv 3 --test-size 0.1", "`--test-size` and `--cv` both say"),
        ("fit {shop} -t y --test-file {shop} --split-by id", "`--test-file` and `--split-by`"),
        ("fit {shop} -t y --split-by towns", "'towns' is not among"),
        ("fit {shop} -t y --likelihood normal", "must be one of auto, gaussian, student-t"),
        ("fit {shop} -t up --log-target", "must be numeric for regression"),
        (
            "fit {shop} -t y --log-target --missing impute --id id",
            "must be positive for `--log-target`",
        ),
        ("fit {shop} -t y --cv 2 --checkpoint {shop}.d", "`--cv` does not work with"),
        ("predict {y} {shop} --quantiles 5,95", "probabilities between 0 and 1"),
        ("predict {y} {shop} --quantiles half", "such as 0.05,0.5,0.95; got 'half'"),
        ("predict {up} {shop} --quantiles 0.5", "classes have no quantiles"),
        ("evaluate {y} {shop}.not", "No such file"),
    ],
)
def test_impossible_options_are_refused(
    arguments: str,
    message: str,
    shop: Path,
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    line = arguments.format(shop=shop, y=models["y"], up=models["up"])
    assert message in refusal(line.split(), capfd)


def test_evaluate_notes_left_out_rows_and_unseen_categories(
    shop: Path, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with shop.open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    town, y = header.index("town"), header.index("y")
    rows[0][town], rows[1][y], rows[2][y] = "Lima", "", ""
    other = tmp_path / "other.csv"
    with other.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    for command in (["evaluate"], ["compare", str(models["y"])]):
        assert run([*command, str(models["y"]), str(other)]) == 0
        error = capsys.readouterr().err
        assert "note: 2 rows without a target were left out." in error
        assert "column 'town' has 1 value that was not in the training rows ('Lima')" in error


def test_evaluate_of_one_row_is_refused(
    shop: Path, models: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one = tmp_path / "one.csv"
    one.write_text("\n".join(shop.read_text(encoding="utf-8").splitlines()[:2]), "utf-8")
    message = refusal(["evaluate", str(models["y"]), str(one)], capfd)
    assert "at least 2 rows with a target; got 1" in message
