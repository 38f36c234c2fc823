"""`winnow update`: more rows for a model, without those that it was fitted to."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import winnowgp
from winnowgp.cli.app import run


def more(shop: Path, path: Path, **changes: Any) -> Path:
    """Write all rows of the table but the first, some cells of which are replaced."""
    with shop.open(encoding="utf-8") as file:
        header, *rows = list(csv.reader(file))
    for name, value in changes.items():
        for row in rows:
            row[header.index(name)] = value(row[header.index(name)])
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows[1:]])
    return path


@pytest.mark.parametrize("target", ["y", "up", "visits"])
def test_update_learns_new_rows_and_says_what_changed(
    target: str,
    models: dict[str, Path],
    shop: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    new, output = more(shop, tmp_path / "new.csv"), tmp_path / "updated.winnow"
    words = ["update", str(models[target]), str(new), "-o", str(output)]
    assert run([*words, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    before, after = winnowgp.load(models[target]), winnowgp.load(output)
    assert (printed["rows"], printed["held_out"]) == (47, 12)
    assert printed["rows_seen"] == after.estimator.n_rows_seen_ == 95
    assert printed["batches"] == after.estimator.n_batches_ == 2
    points = before.estimator.n_inducing_ + printed["added"] - printed["dropped"]
    assert points == printed["inducing_points"] == after.estimator.n_inducing_
    assert np.isfinite([printed["log_density"], printed["log_density_before"]]).all()
    assert after.summary["train_rows"] == 95
    assert after.summary["quality"]["rows"] == 12
    assert after.summary["settings"]["rows_seen"] == "95"
    assert " && winnow" in after.summary["settings"]["command"]
    # The updated model is a model like any other.
    assert run(["info", str(output)]) == 0
    assert "95 for training" in " ".join(capsys.readouterr().out.split())
    assert run(["predict", str(output), str(new), "--quiet"]) == 0
    other = more(shop, tmp_path / "other.csv", x=lambda cell: cell)
    other.write_text("".join(other.read_text().splitlines(keepends=True)[:-1]))
    assert run(["update", str(output), str(other), "-o", str(output), "--test-size", "0"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "153 rows, 3 batches" in text
    assert "held out (nats" not in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"town": lambda town: town.replace("Oslo", "Bergen")}, "does not know: 'Bergen'"),
        ({"x": lambda x: x and f"{1000 * float(x)}"}, "seems to be in other units"),
        ({"y": lambda _: ""}, "must have rows with a target"),
        ({"y": lambda _: "high"}, "must be numeric"),
    ],
)
def test_update_other_columns_are_errors(
    changes: dict[str, Any],
    message: str,
    models: dict[str, Path],
    shop: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    new, output = more(shop, tmp_path / "new.csv", **changes), tmp_path / "updated.winnow"
    assert run(["update", str(models["y"]), str(new), "-o", str(output)]) == 2
    assert message in capsys.readouterr().err
    assert not output.exists()


def test_update_table_leaves_the_model_as_it_was(models: dict[str, Path], shop: Path) -> None:
    model, table = winnowgp.load(models["y"]), winnowgp.read_table(shop)
    before = model.predict(table)["mean"]
    updated = winnowgp.estimators.update_table(model, table, forgetting=0.5).model
    np.testing.assert_array_equal(model.predict(table)["mean"], before)
    assert not np.allclose(updated.predict(table)["mean"], before)
    assert updated.estimator.forgetting is None
    assert updated.estimator._record().remembered == pytest.approx(24 + 48)


def test_update_twice_with_one_file_is_refused(
    models: dict[str, Path], shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "updated.winnow"
    assert run(["update", str(models["y"]), str(shop), "-o", str(output)]) == 2
    assert "has learnt from shop.csv before" in capsys.readouterr().err
    assert not output.exists()


def test_update_with_a_missing_file_is_a_sentence(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["update", str(models["y"]), str(tmp_path / "new.csv")]) == 2
    message = capsys.readouterr().err
    assert "new.csv" in message
    assert "Errno" not in message
