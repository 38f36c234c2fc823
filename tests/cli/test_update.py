"""`winnow update`: more rows for a model, without those that it was fitted to."""

import csv
import json
import os
import re
import warnings
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import winnowgp
from winnowgp.cli.app import run
from winnowgp.data import DataTable
from winnowgp.errors import InputError, NoInducingPointsWarning
from winnowgp.tabular import fit_table, update_table
from winnowgp.tabular.splits import held_out_split


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


def test_update_warns_of_a_target_that_is_the_same_in_all_new_rows(
    models: dict[str, Path], shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new, output = more(shop, tmp_path / "new.csv", y=lambda _: "0"), tmp_path / "updated.winnow"
    words = ["update", str(models["y"]), str(new), "-o", str(output), "--test-size", "0"]
    assert run(words) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "the target 'y' is 0 in all 59 new rows" in said
    # Fewer rows may well be equal.
    new.write_text("".join(new.read_text().splitlines(keepends=True)[:10]))
    assert run(words) == 0
    assert "in all" not in capsys.readouterr().err


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
    assert (printed["rows"], printed["held_out"]) == (59, 12)
    # Those that were held out for the comparison are learnt as well.
    assert printed["rows_seen"] == after.estimator.n_rows_seen_ == 107
    assert printed["batches"] == after.estimator.n_batches_ == 2
    points = before.estimator.n_inducing_ + printed["added"] - printed["dropped"]
    assert points == printed["inducing_points"] == after.estimator.n_inducing_
    assert np.isfinite([printed["log_density"], printed["log_density_before"]]).all()
    assert after.summary["train_rows"] == 107
    assert after.summary["quality"]["rows"] == 12
    assert after.summary["settings"]["rows_seen"] == "107"
    assert " && winnow" in after.summary["settings"]["command"]
    # The updated model is a model like any other.
    assert run(["info", str(output)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "107 for training in 2 batches, 12 of the first table held out" in text
    assert "12 rows of the last update, predicted before they were learnt" in text
    assert "Held-out rows" not in text
    assert run(["predict", str(output), str(new), "--quiet"]) == 0
    other = more(shop, tmp_path / "other.csv", x=lambda cell: cell)
    other.write_text("".join(other.read_text().splitlines(keepends=True)[:-1]))
    assert run(["update", str(output), str(other), "-o", str(output), "--test-size", "0"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "165 rows, 3 batches" in text
    assert "held out (nats" not in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"town": lambda town: town.replace("Oslo", "Bergen")}, "does not know: 'Bergen'"),
        ({"x": lambda x: x and f"{1000 * float(x)}"}, "seems to be in other units"),
        ({"y": lambda _: ""}, "must have rows with a target"),
        ({"y": lambda _: "high"}, "must be numeric"),
        ({"y": lambda _: "inf"}, "'y' has inf in row 1"),
        ({"x": lambda _: "abc"}, "must have numbers"),
        ({"y": lambda y: f"{1000 * float(y)}"}, "the target 'y' .* seems to be in other units"),
        ({"y": lambda y: f"{0.001 * float(y)}"}, "the target 'y' .* seems to be in other units"),
        ({"y": lambda y: f"{273 + float(y)}"}, "the target 'y' .* seems to be in other units"),
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
    output.write_bytes(models["y"].read_bytes())
    assert run(["update", str(output), str(new), "-o", str(output)]) == 2
    assert re.search(message, " ".join(capsys.readouterr().err.split()))
    assert output.read_bytes() == models["y"].read_bytes()


@pytest.mark.parametrize("slope", [0.0, 1.5])
@pytest.mark.parametrize("log", [False, True])
def test_update_of_a_noisy_target_tells_units_by_its_spread(log: bool, slope: float) -> None:
    rng = np.random.default_rng(0)

    def rows(factor: float) -> DataTable:
        """Rows whose target follows the input with a correlation below 0.9, or not at all."""
        x = rng.uniform(-2, 2, 60)
        y = slope * x + rng.normal(size=60)
        return DataTable({"x": x, "y": factor * (np.exp(0.3 * y) if log else y)})

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoInducingPointsWarning)
        model = fit_table(rows(1.0), target="y", log_target=log, kernel="rbf", hyper="point")
    assert (model.estimator.n_inducing_ == 0) == (slope == 0)
    # A constant is updated as any other model.
    assert update_table(model, rows(1.0), test_size=0).rows == 60
    for factor in (0.02, 20.0):
        with pytest.raises(InputError, match=r"the target 'y' .* seems to be in other units"):
            update_table(model, rows(factor), test_size=0)


@pytest.mark.parametrize("content", ["", "id,x,town,day,y,up,visits\n", "id,town,y\nr,Rome,1\n"])
def test_update_without_rows_or_columns_leaves_the_file(
    content: str, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new, output = tmp_path / "new.csv", tmp_path / "model.winnow"
    new.write_text(content)
    output.write_bytes(models["y"].read_bytes())
    assert run(["update", str(output), str(new), "-o", str(output)]) == 2
    assert "internal error" not in capsys.readouterr().err
    assert output.read_bytes() == models["y"].read_bytes()


@pytest.mark.parametrize("rows", [1, 6])
def test_update_with_one_row_or_equal_rows_is_used(
    rows: int, models: dict[str, Path], shop: Path, tmp_path: Path
) -> None:
    new, output = tmp_path / "new.csv", tmp_path / "model.winnow"
    header, first = shop.read_text(encoding="utf-8").splitlines()[:2]
    new.write_text("\n".join([header, *[first] * rows]), encoding="utf-8")
    words = ["update", str(models["y"]), str(new), "-o", str(output), "--test-size", "0"]
    assert run([*words, "--quiet"]) == 0
    assert winnowgp.load(output).estimator.n_rows_seen_ == 48 + rows


def test_update_killed_while_writing_leaves_the_file(
    models: dict[str, Path], shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, output = more(shop, tmp_path / "new.csv"), tmp_path / "model.winnow"
    output.write_bytes(models["y"].read_bytes())

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with suppress(KeyboardInterrupt):
        run(["update", str(output), str(new), "-o", str(output)])
    assert output.read_bytes() == models["y"].read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.winnow", "new.csv"]


def test_update_with_a_window_is_remembered_by_the_file(
    models: dict[str, Path], shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new, output = more(shop, tmp_path / "new.csv"), tmp_path / "model.winnow"
    words = [str(new), "-o", str(output), "--test-size", "0"]
    words += ["--window", "2", "--move-points"]
    assert run(["update", str(models["y"]), *words]) == 0
    assert re.search(r"[1-9]\d* moved", " ".join(capsys.readouterr().out.split()))
    estimator = winnowgp.load(output).estimator
    assert (estimator.window, estimator.move_points) == (2, False)
    assert [memory.N for memory in estimator._record().memories] == [48, 59]
    assert run(["info", str(output)]) == 0
    assert "in 2 batches" in " ".join(capsys.readouterr().out.split())
    assert run(["update", str(models["y"]), *words, "--window", "1"]) == 2
    assert "at least 2 batches" in capsys.readouterr().err


def test_gaps_of_a_window_are_per_remembered_observation(
    models: dict[str, Path], shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (more(shop, tmp_path / name) for name in ("first.csv", "second.csv"))
    second.write_text("".join(second.read_text().splitlines(keepends=True)[:-1]))
    output = tmp_path / "model.winnow"
    for model, new in ((models["y"], first), (output, second)):
        words = [str(model), str(new), "-o", str(output), "--test-size", "0", "--window", "2"]
        assert run(["update", *words]) == 0
    summary = winnowgp.load(output).summary
    assert summary["choice"]["observations"] < summary["train_rows"]
    capsys.readouterr()
    assert run(["frontier", str(output)]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "<- selected" in line]
    assert float(row.split("│")[3]) == pytest.approx(summary["choice"]["elbo_gap"], abs=6e-5)


def test_update_table_leaves_the_model_as_it_was(models: dict[str, Path], shop: Path) -> None:
    model, table = winnowgp.load(models["y"]), winnowgp.read_table(shop)
    before = model.predict(table)["mean"]
    updated = winnowgp.tabular.update_table(model, table, forgetting=0.5).model
    np.testing.assert_array_equal(model.predict(table)["mean"], before)
    assert not np.allclose(updated.predict(table)["mean"], before)
    assert updated.estimator.forgetting is None
    assert updated.estimator._record().remembered == pytest.approx(24 + 60)


def test_update_table_compares_without_the_rows_that_it_holds_out(
    models: dict[str, Path], shop: Path
) -> None:
    model, table = winnowgp.load(models["y"]), winnowgp.read_table(shop)
    result = winnowgp.tabular.update_table(model, table, seed=3)
    train, test = held_out_split(table, 0.2, seed=3)
    X, y = model.encoder.encode(table), table.numbers("y")
    assert y is not None
    without = deepcopy(model.estimator).partial_fit(X[train], y[train])
    assert result.density == pytest.approx(without.log_density(X[test], y[test]).mean())
    every = deepcopy(model.estimator).partial_fit(X, y)
    np.testing.assert_allclose(result.model.estimator.predict(X), every.predict(X))


def test_update_table_holds_out_by_the_column_of_the_fit(
    models: dict[str, Path], shop: Path
) -> None:
    model, table = winnowgp.load(models["y"]), winnowgp.read_table(shop)
    model.summary["settings"]["split_by"] = "day"
    X, y = model.encoder.encode(table), table.numbers("y")
    assert y is not None
    for given, column in ((None, "day"), ("town", "town")):
        result = winnowgp.tabular.update_table(model, table, split_by=given)
        _, test = held_out_split(table, 0.2, split_by=column)
        expected = model.estimator.log_density(X[test], y[test]).mean()
        assert result.density_before == pytest.approx(expected)
    day = DataTable({**table.values, "day": np.repeat(table.values["day"][:1], table.N)})
    with pytest.raises(InputError, match=r"fitted with split_by='day'.*test_size=0"):
        winnowgp.tabular.update_table(model, day)
    assert winnowgp.tabular.update_table(model, day, test_size=0).held_out == 0


def test_update_table_widens_the_range_of_the_target(models: dict[str, Path], shop: Path) -> None:
    model, table = winnowgp.load(models["y"]), winnowgp.read_table(shop)
    values = {**table.values, "y": np.array([*table.values["y"][:-1], "9.5"], dtype=object)}
    after = winnowgp.tabular.update_table(model, DataTable(values), test_size=0).model.summary
    spread = after["target_summary"]["spread"]
    before = model.summary["target_summary"]["spread"]
    assert spread == [*before[:-1], 9.5]
    assert before[-1] < 9.5


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
