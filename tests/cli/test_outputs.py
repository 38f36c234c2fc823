"""`winnow fit` and `winnow predict` of several targets."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest

import winnowgp
from helpers.short_fits import short_process_fits
from winnowgp.cli.app import run
from winnowgp.cli.options import target_likelihoods
from winnowgp.errors import (
    ExtrapolationWarning,
    FewRowsWarning,
    InputError,
    NoInducingPointsWarning,
)
from winnowgp.tabular import cross_validate_outputs, fit_outputs_table, update_outputs_table
from winnowgp.tabular.outputs import MultiOutputTable


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
        restored = again.predict(rows)[name]
        if values.dtype == object:
            assert restored.tolist() == values.tolist()
        else:
            np.testing.assert_allclose(restored, values, rtol=1e-10, atol=1e-12)


def test_other_commands_and_options_refuse_several_targets(
    table: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["compare", str(model), str(model), str(table)]) == 2
    assert "`plot`, `update` and `export` can use" in capsys.readouterr().err
    assert run(["predict", str(model), str(table), "--quantiles", "0.5"]) == 2
    assert "`--quantiles` are for models of one target" in capsys.readouterr().err
    assert run(["fit", str(table), "-t", "wave", "-t", "level", "--hyper", "point"]) == 2
    assert "`--hyper` is for models of one target" in capsys.readouterr().err
    assert run(["fit", str(table), "-t", "wave", "-t", "level", "--layers", "2"]) == 2
    assert "`--layers` is for models of one target" in capsys.readouterr().err
    for targets, message in (
        (["wave", "wave"], "at least two different columns"),
        (["wave", "side"], "must be numbers; 'side' is not"),
    ):
        with pytest.raises(InputError, match=message):
            fit_outputs_table(winnowgp.read_table(table), targets, drop=("name",))
    rows = winnowgp.read_table(table)
    values = {**rows.values, "wave_mean": rows.values["name"]}
    with pytest.raises(InputError, match="name of a prediction; got 'wave_mean'"):
        fit_outputs_table(values, ["wave", "level"], id_column="wave_mean", drop=("name",))


def test_info_evaluate_and_frontier_describe_several_targets(
    table: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["info", str(model)]) == 0
    shown = capsys.readouterr().out
    assert "wave, level" in shown
    assert re.search(r"^inputs +x, side *$", shown, re.MULTILINE)
    assert "inducing points" in shown
    assert f"data: {table.name}" in shown
    assert run(["info", str(model), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    loaded = winnowgp.load(model)
    assert isinstance(loaded, MultiOutputTable)
    assert info["inputs"] == list(loaded.encoder.features)
    assert np.shape(info["mixing"]) == (2, len(info["inducing_points"]))
    assert run(["evaluate", str(model), str(table), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    rows = winnowgp.read_table(table)
    y = rows.values["level"].astype(float)
    error = float(np.sqrt(np.mean((loaded.predict(rows)["level_mean"] - y) ** 2)))
    assert result["quality"]["level"]["rmse"] == pytest.approx(error)
    assert result["quality"]["wave"]["rows"] == 40
    assert result["used_for_training"] is True
    assert run(["evaluate", str(model), str(table)]) == 0
    assert "fitted to" in capsys.readouterr().out
    assert run(["frontier", str(model), "--json"]) == 0
    frontier = json.loads(capsys.readouterr().out)
    assert frontier["selected"] == sum(loaded.estimator.n_inducing_)
    at = {row["inducing_points"]: row["elbo_nats"] for row in frontier["frontier"]}
    assert at[frontier["selected"]] >= loaded.estimator.elbo_ - 1e-6
    assert run(["frontier", str(model)]) == 0


@pytest.mark.parametrize(("column", "message"), [("x", "column 'x'"), ("level", "target 'level'")])
def test_update_of_several_targets_in_other_units_is_refused(
    table: Path,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    column: str,
    message: str,
) -> None:
    other, updated = tmp_path / "other.csv", tmp_path / "updated.winnow"
    with table.open(encoding="utf-8") as file, other.open("w", encoding="utf-8") as changed:
        rows = list(csv.DictReader(file))[:20]
        writer = csv.DictWriter(changed, rows[0])
        writer.writeheader()
        writer.writerows({**row, column: str(1000 * float(row[column]))} for row in rows)
    assert run(["update", str(model), str(other), "-o", str(updated)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "in other units" in error
    assert not updated.exists()


def test_update_learns_more_rows_of_several_targets(
    table: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = np.linspace(6, 9, 24)
    rows = [f"n{i},{x[i]:.4f},left,{np.sin(x[i]):.4f},{3 - np.sin(x[i]):.4f}" for i in range(24)]
    more, updated = tmp_path / "more.csv", tmp_path / "updated.winnow"
    more.write_text("\n".join(["name,x,side,wave,level", *rows]), encoding="utf-8")
    assert run(["update", str(model), str(more), "-o", str(updated), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["rows"] == 24
    assert printed["held_out"] == 5
    assert printed["log_density"] > printed["log_density_before"] + 0.5
    assert sum(printed["inducing_points"]) > sum(printed["inducing_points_before"])
    loaded = winnowgp.load(updated)
    assert isinstance(loaded, MultiOutputTable)
    predicted = loaded.predict(winnowgp.read_table(more))["level_mean"]
    assert np.abs(predicted - (3 - np.sin(x))).max() < 0.3
    # The file describes the update.
    assert run(["info", str(updated)]) == 0
    shown = capsys.readouterr().out
    assert "of the last update" in shown
    assert "Rows held out of the last update" in shown
    assert "updates: 1" in shown
    assert run(["frontier", str(updated), "--json"]) == 0
    frontier = json.loads(capsys.readouterr().out)
    assert frontier["selected"] == sum(printed["inducing_points"])
    elbos = [row["elbo_nats"] for row in frontier["frontier"]]
    at = {row["inducing_points"]: row["elbo_nats"] for row in frontier["frontier"]}
    gap = (max(elbos) - at[frontier["selected"]]) / (2 * 24)
    assert loaded.estimator.elbo_gap_ == pytest.approx(gap)
    assert run(["frontier", str(updated)]) == 0
    assert "nats per observed target" in capsys.readouterr().out
    # The file remembers what it has learnt.
    assert run(["update", str(updated), str(more), "-o", str(updated)]) == 2
    assert "has learnt from more.csv before" in capsys.readouterr().err
    assert run(["update", str(model), str(more), "--window", "2"]) == 2
    assert "`--window` is for models of one target" in capsys.readouterr().err
    other = tmp_path / "other.csv"
    other.write_text("name,x,side,wave,level\na,1,middle,1,2\n", encoding="utf-8")
    assert run(["update", str(model), str(other), "--test-size", "0"]) == 2
    assert "'side' has categories that the model does not know: 'middle'" in capsys.readouterr().err
    assert run(["export", str(updated), "-o", str(tmp_path / "model.py"), "-q"]) == 0
    assert (tmp_path / "model.py").exists()


def test_cross_validation_refuses_a_checkpoint(table: Path, tmp_path: Path) -> None:
    rows = winnowgp.read_table(table)
    with pytest.raises(InputError, match="`checkpoint` is for one fit"):
        cross_validate_outputs(rows, ["wave", "level"], checkpoint=tmp_path / "fit")


def test_cross_validation_reports_means_over_folds(
    table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--tolerance", "0.5", "--cv", "2", "--drop", "name,side"]
    out = str(table.with_name("validated.winnow"))
    assert run(["fit", str(table), "-t", "wave", "-t", "level", *arguments, "-o", out]) == 0
    assert "Mean of 2 folds" in capsys.readouterr().out
    quality = winnowgp.load(out).quality
    # Every row is held out once.
    assert quality["level"]["rows"] == 50
    assert quality["wave"]["rows"] == 40
    assert quality["level"]["r2"] > 0.9


def test_constant_held_out_target_has_no_r2(table: Path, model: Path) -> None:
    loaded = winnowgp.load(model)
    rows = winnowgp.read_table(table)
    same = loaded.evaluate({**rows.values, "level": np.full(50, 3.0)})
    assert "r2" not in same["level"]
    assert same["level"]["rows"] == 50


def test_json_reports_points_of_each_process(
    table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--tolerance", "0.5", "--test-size", "0", "--drop", "name,side", "--json"]
    out = str(table.with_name("other.winnow"))
    assert run(["fit", str(table), "-t", "wave", "-t", "level", *arguments, "-o", out]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["inducing_points"]) == 2
    assert result["quality"] == {}


def test_commas_in_targets_mean_what_they_meant_in_the_fit(tmp_path: Path, capfd) -> None:
    data, path = tmp_path / "commas.csv", tmp_path / "m.winnow"
    rows = [f'{x},"{x % 4 + 1},{100 + x}","{x % 3 + 1},{500 + x}"' for x in range(24)]
    data.write_text("\n".join(["x,a,b", *rows]))
    options = ["-t", "a", "-t", "b", "--decimal", ",", "--tolerance", "0.5", "-q"]
    assert run(["fit", str(data), *options, "-o", str(path)]) == 0
    capfd.readouterr()
    assert run(["evaluate", str(path), str(data), "--json"]) == 0
    quality = json.loads(capfd.readouterr().out)["quality"]
    assert quality["a"]["rmse"] < 5
    assert quality["a"]["rows"] == 24


@pytest.mark.parametrize("targets", [["-t", "wave"], ["-t", "wave", "-t", "level"]])
def test_one_row_is_fitted_with_a_note_and_not_evaluated(
    table: Path, capfd, targets: list[str]
) -> None:
    single, path = table.with_name("single.csv"), table.with_name("single.winnow")
    lines = table.read_text().splitlines()
    single.write_text(f"{lines[0]}\n{lines[2]}\n")
    assert run(["fit", str(single), *targets, "-o", str(path)]) == 0
    said = capfd.readouterr()
    assert "fitted to 1 row: priors" in said.out + said.err
    # As in Python: the only target is predicted everywhere.
    assert run(["predict", str(path), str(single)]) == 0
    header, row = (line.split(",") for line in capfd.readouterr().out.splitlines())
    predicted = dict(zip(header, row, strict=True))
    mean = predicted["mean" if len(targets) == 2 else "wave_mean"]
    observed = dict(zip(lines[0].split(","), lines[2].split(","), strict=True))
    assert float(mean) == pytest.approx(float(observed["wave"]))
    assert run(["evaluate", str(path), str(single)]) == 2
    assert "at least 2 rows" in capfd.readouterr().err


def test_no_row_with_a_target_is_an_error(table: Path, capfd) -> None:
    empty = table.with_name("empty.csv")
    lines = table.read_text().splitlines()
    at = lines[0].split(",").index("wave")
    cells = lines[2].split(",")
    empty.write_text(f"{lines[0]}\n{','.join([*cells[:at], '', *cells[at + 1 :]])}\n")
    assert run(["fit", str(empty), "-t", "wave", "--missing", "impute"]) == 2
    assert "wave" in capfd.readouterr().err


def test_fit_without_effects_warns_for_several_targets() -> None:
    rng = np.random.default_rng(0)
    noise = dict(zip("ab", rng.normal(size=(2, 24)), strict=True))
    table = {"x": np.ones(24), **noise}
    with pytest.warns(NoInducingPointsWarning, match="no process has inducing points"):
        fit_outputs_table(table, ["a", "b"])
    table |= {"a": np.full(24, 3.0), "b": np.full(24, np.nan)}
    table["b"][:12] = 4.0
    with pytest.warns(NoInducingPointsWarning) as found:
        fit_outputs_table(table, ["a", "b"], test_size=0)
    messages = [str(warning.message) for warning in found]
    assert [message[11:29] for message in messages] == ["'a' is 3 in all 24", "'b' is 4 in all 12"]


def test_fit_few_rows_warns_for_several_targets() -> None:
    x = np.arange(4.0)
    with pytest.warns(FewRowsWarning, match="fitted to 4 rows: priors"):
        fit_outputs_table({"x": x, "a": x, "b": -x}, ["a", "b"], test_size=0)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a table of a measurement, a count and a class."""
    path, rng = tmp_path_factory.mktemp("kinds") / "kinds.csv", np.random.default_rng(1)
    x = np.linspace(0, 6, 36)
    wave = np.sin(x)
    columns = [wave + 0.1 * rng.normal(size=36), rng.poisson(np.exp(1 + wave)), wave > 0]
    rows = zip(x, *(np.asarray(column, dtype=float) for column in columns), strict=True)
    lines = [",".join(f"{value:.4g}" for value in row) for row in rows]
    path.write_text("\n".join(["x,a,n,c", *lines]), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def kinds_model(kinds: Path) -> Path:
    path = kinds.with_name("kinds.winnow")
    targets = ["-t", "a", "-t", "n", "-t", "c"]
    likelihoods = ["--likelihood", "n=poisson", "--likelihood", "c=bernoulli"]
    options = ["--tolerance", "0.5", "-q", "-o", str(path)]
    with short_process_fits():
        assert run(["fit", str(kinds), *targets, *likelihoods, *options]) == 0
    return path


def test_targets_have_likelihoods_of_their_own(
    kinds: Path, kinds_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["info", str(kinds_model), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["likelihoods"] == {"a": "gaussian", "n": "poisson", "c": "bernoulli"}
    assert run(["info", str(kinds_model)]) == 0
    assert "a, n (poisson), c (bernoulli)" in capsys.readouterr().out
    out = tmp_path / "predicted.csv"
    assert run(["predict", str(kinds_model), str(kinds), "-q", "-o", str(out)]) == 0
    with out.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    # Counts have whole limits, and a class 0 or 1.
    assert all(float(row["n_lower"]).is_integer() for row in rows)
    assert float(rows[9]["c_lower"]) == float(rows[9]["c_upper"]) == 1.0
    assert 0 <= float(rows[9]["c_mean"]) <= 1
    assert run(["evaluate", str(kinds_model), str(kinds), "--json"]) == 0
    quality = json.loads(capsys.readouterr().out)["quality"]
    assert quality["c"]["log_density"] > np.log(0.6)
    assert quality["a"]["r2"] > 0.8
    for extra, name in ((["--what", "frontier"], "f.png"), ([], "m.png")):
        assert run(["plot", str(kinds_model), *extra, "-q", "-o", str(tmp_path / name)]) == 0
        assert (tmp_path / name).stat().st_size > 5000
    assert run(["plot", str(kinds_model), "--what", "effects", "-o", str(tmp_path / "e.png")]) == 2
    assert "must be mixing or frontier" in capsys.readouterr().err


def test_update_of_several_likelihoods(
    kinds_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more, updated = tmp_path / "more.csv", tmp_path / "updated.winnow"
    x = np.linspace(6, 9, 30)
    lines = [f"{v:.3f},{np.sin(v):.3f},{round(np.exp(1 + np.sin(v)))},{int(v < 9)}" for v in x]
    more.write_text("\n".join(["x,a,n,c", *lines]), encoding="utf-8")
    assert run(["update", str(kinds_model), str(more), "-o", str(updated), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["log_density"] > printed["log_density_before"] + 0.2
    more.write_text("x,a,n,c\n1,0.8,2.5,1\n2,0.9,3,1\n", encoding="utf-8")
    assert run(["update", str(kinds_model), str(more), "--test-size", "0"]) == 2
    assert "target 'n': counts must be whole numbers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--likelihood", "poisson"], "target 'a': counts must be whole numbers"),
        (["--likelihood", "b=poisson"], "must name a target, a, n; got 'b'"),
        (["--likelihood", "n=heteroscedastic"], "got 'heteroscedastic' for 'n'"),
        (["--likelihood", "beta", "--likelihood", "laplace"], "was given twice, beta and laplace"),
        (["-t", "a"], "`--target` has 'a' twice"),
    ],
)
def test_wrong_likelihoods_of_targets_are_refused(
    options: list[str], message: str, kinds: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["fit", str(kinds), "-t", "a", "-t", "n", *options]) == 2
    assert message in capsys.readouterr().err


def test_one_target_may_be_named_in_its_likelihood() -> None:
    assert target_likelihoods(["y=1=poisson"], ["y=1"]) == {"y=1": "poisson"}
    assert target_likelihoods([], ["y"]) == {"y": "auto"}
    with pytest.raises(InputError, match="of 'c' was given twice"):
        target_likelihoods(["c=poisson", "c=gaussian"], ["a", "c"])


def test_unknown_categories_are_warned_of(table: Path, model: Path) -> None:
    loaded = winnowgp.load(model)
    rows = winnowgp.read_table(table)
    other = {**rows.values, "side": np.full(50, "middle", dtype=object)}
    with pytest.warns(ExtrapolationWarning, match="'side' has 1 value that was not in"):
        loaded.predict(other)
    with pytest.warns(ExtrapolationWarning, match="'middle'"):
        loaded.evaluate(other)
    blocks = [winnowgp.DataTable.of(other)]
    with pytest.warns(ExtrapolationWarning, match="'middle'"):
        list(loaded.predict_blocks(blocks))


def test_target_without_values_is_refused_by_a_fit_and_missing_in_an_update(
    table: Path, model: Path, tmp_path: Path
) -> None:
    rows = winnowgp.read_table(table)
    empty = {**rows.values, "wave": np.full(50, "", dtype=object)}
    with pytest.raises(InputError, match="the target 'wave' has no values; leave it out of"):
        fit_outputs_table(empty, ["wave", "level"], drop=("name",))
    loaded = winnowgp.load(model)
    updated = update_outputs_table(loaded, empty, test_size=0).model
    assert np.isfinite(updated.predict(rows)["wave_mean"]).all()
    assert list(loaded.evaluate(empty)) == ["level"]


def test_fit_of_several_targets_prints_its_alarms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["x,a,b", *(f"{i / 7},{(i % 5) / 3},4" for i in range(24))]
    table = tmp_path / "constant.csv"
    table.write_text("\n".join(lines), "utf-8")
    with short_process_fits():
        assert run(["fit", str(table), "-t", "a", "-t", "b", "-o", str(tmp_path / "m.winnow")]) == 0
    assert "the target 'b' is 4 in all" in capsys.readouterr().err


def test_update_by_a_constant_target_is_warned_of(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = np.linspace(1, 5, 20)
    rows = [f"n{i},{x[i]:.4f},left,{np.sin(x[i]):.4f},3" for i in range(20)]
    more = tmp_path / "more.csv"
    more.write_text("\n".join(["name,x,side,wave,level", *rows]), encoding="utf-8")
    assert run(["update", str(model), str(more), "-q", "-o", str(tmp_path / "m.winnow")]) == 0
    error = capsys.readouterr().err
    assert "the target 'level' is 3 in all 20 new rows" in error
    assert "'wave'" not in error


def test_info_of_several_targets_has_the_alarms_of_the_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = np.linspace(0, 6, 30)
    values = {"x": x, "wave": np.sin(x), "level": np.cos(x), "flat": np.ones(30)}
    names = ["wave", "level", "flat"]
    with pytest.warns(NoInducingPointsWarning) as seen:
        fitted = fit_outputs_table(values, names, tolerance=0.5, test_size=0)
    assert [str(each.message)[:41] for each in seen] == [
        "the target 'flat' is 1 in all 30 training"
    ]
    file = fitted.save(tmp_path / "model.winnow")
    assert run(["info", str(file)]) == 0
    assert "note: the target 'flat' is 1 in all 30" in capsys.readouterr().out
    assert run(["info", str(file), "--json"]) == 0
    (alarm,) = json.loads(capsys.readouterr().out)["alarms"]
    assert alarm == {"warning": "NoInducingPointsWarning", "message": str(seen[0].message)}


def test_frontier_of_several_targets_says_whose_hyperparameters(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["frontier", str(model)]) == 0
    shown = capsys.readouterr().out
    assert "at the hyper-parameters of the fit" in shown
    assert "Best ELBO known" not in shown
    assert "held-out" not in shown
