"""fit, predict, info, frontier, plot, data: as a person types them."""

import csv
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import winnowgp
from winnowgp.cli.main import run

WINNOW = [sys.executable, "-W", "ignore", "-m", "winnowgp"]


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text.splitlines()))


def test_a_newcomer_s_whole_way(shop: Path, tmp_path: Path) -> None:
    """In processes of their own, in a folder of their own."""

    def winnow(*words: str) -> str:
        result = subprocess.run(
            [*WINNOW, *words], cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    options = "--id id --drop up,visits --missing impute --tolerance 0.3"
    said = winnow("fit", str(shop), "--target", "y", *options.split(), "-o", "m.winnow")
    assert "regression: the target holds numbers" in said
    assert "48 to learn from, 12 held out" in said
    assert "model: m.winnow" in said
    winnow("predict", "m.winnow", str(shop), "-o", "out.csv")
    found = read((tmp_path / "out.csv").read_text(encoding="utf-8"))
    assert list(found[0]) == ["id", "mean", "sd", "lower", "upper"]
    assert [row["id"] for row in found] == [f"r{i}" for i in range(60)]
    truth = [float(row["y"]) for row in read(shop.read_text(encoding="utf-8"))]
    error = np.array([float(row["mean"]) for row in found]) - truth
    assert np.sqrt(np.mean(error**2)) < 0.3
    assert "command: winnow fit" in winnow("info", "m.winnow")
    assert "<- kept" in winnow("frontier", "m.winnow", "-o", "f.png")
    assert {p.name for p in tmp_path.iterdir()} == {"m.winnow", "out.csv", "f.png"}


def test_predictions_are_those_of_the_library(
    shop: Path, models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["predict", str(models["y"]), str(shop), "--level", "0.5"]) == 0
    found = read(capsys.readouterr().out)
    model = winnowgp.load(models["y"])
    X = model.encoder.encode(winnowgp.read_columns(shop))
    mean, sd = model.estimator.predict(X, return_std=True)
    np.testing.assert_allclose([float(r["mean"]) for r in found], mean, rtol=1e-12)
    # Half of a Gaussian lies within 0.6745 standard deviations.
    np.testing.assert_allclose([float(r["upper"]) for r in found], mean + 0.67449 * sd, rtol=1e-4)


def test_classes_have_probabilities(
    shop: Path, models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["predict", str(models["up"]), str(shop), "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert list(found[0]) == ["id", "class", "p_no", "p_yes"]
    for row in found:
        assert row["p_no"] + row["p_yes"] == pytest.approx(1)
        assert row["class"] == ("yes" if row["p_yes"] > 0.5 else "no")
    truth = [row["up"] for row in read(shop.read_text(encoding="utf-8"))]
    hits = np.mean([row["class"] == t for row, t in zip(found, truth, strict=True)])
    most_frequent = max(truth.count("yes"), truth.count("no")) / len(truth)
    assert hits > most_frequent + 0.1


def test_counts_have_whole_intervals(shop: Path, models: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    out = tmp_path / "out.parquet"
    assert run(["predict", str(models["visits"]), str(shop), "-o", str(out), "-q"]) == 0
    table = winnowgp.read_columns(out)
    assert table.names == ("id", "mean", "sd", "lower", "upper")
    lower = table.numbers("lower")
    assert lower is not None
    assert (lower == np.round(lower)).all()
    assert (lower >= 0).all()


def test_new_files_are_read_as_the_first_one(
    shop: Path, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another order of columns, compressed, an unseen town, a hole where there was none."""
    lines = ["town,day,x,id", "Oslo,2024-03-03,1.0,a", "Paris,,2.0,b"]
    path = tmp_path / "new.csv.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    out = tmp_path / "out.csv.gz"
    assert run(["predict", str(models["y"]), str(path), "-o", str(out)]) == 0
    said = capsys.readouterr().err
    assert "1 words of column 'town' were not in the training rows ('Paris')" in said
    found = read(gzip.decompress(out.read_bytes()).decode())
    model = winnowgp.load(models["y"])
    typical = {c.name: c.typical for c in model.encoder.columns}
    row = [2.0, 0.0, 0.0, 0.0, 0.0, typical["day"]]
    assert model.encoder.features[:2] == ("x", "x missing")
    assert float(found[1]["mean"]) == pytest.approx(model.estimator.predict([row])[0])


def test_info_and_frontier_speak_json(
    models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["info", str(models["y"]), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert (info["task"], info["rows"], info["train_rows"]) == ("regression", 60, 48)
    assert info["held_out"]["R²"] > 0.5
    assert {c["name"]: c["kind"] for c in info["inputs"]} == {
        "x": "number",
        "town": "words",
        "day": "date",
    }
    assert run(["frontier", str(models["y"]), "--json"]) == 0
    frontier = json.loads(capsys.readouterr().out)
    assert frontier["chosen"] == info["points"]
    bounds = [row["bound_nats"] for row in frontier["frontier"]]
    assert [row["points"] for row in frontier["frontier"]] == list(range(len(bounds)))
    assert bounds[-1] > bounds[0]


@pytest.mark.parametrize("what", ["effects", "frontier", "inclusion", "trace", "calibration"])
@pytest.mark.parametrize("target", ["y", "up", "visits"])
def test_every_plot_of_every_task_is_drawn(
    what: str, target: str, models: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "a.svg"
    assert run(["plot", str(models[target]), "--what", what, "-o", str(out), "-q"]) == 0
    assert b"<svg" in out.read_bytes()[:1000]


def test_the_same_seed_gives_the_same_model(shop: Path, tmp_path: Path) -> None:
    words = ["fit", str(shop), "-t", "y", "--drop", "up,visits,day,id,x", "--tolerance", "1", "-q"]
    predictions = []
    for seed in ("1", "1", "2"):
        out = tmp_path / f"{len(predictions)}.winnow"
        assert run([*words, "--seed", seed, "-o", str(out)]) == 0
        predictions.append(winnowgp.load(out).predict(winnowgp.read_columns(shop))["mean"])
    np.testing.assert_array_equal(predictions[0], predictions[1])
    assert (predictions[0] != predictions[2]).any()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("fit SHOP -t z", "`target` must name columns.*'z' is not among 'id', 'x'"),
        ("fit SHOP -t y --drop zz", "'zz' is not among"),
        ("fit SHOP -t y --drop y", "cannot be the target and be left out"),
        ("fit SHOP -t y --id id", "column 'x' has 3 missing values, the first in row 8"),
        ("fit SHOP -t x --id id", "the target 'x' is missing in 3 rows, first in row 8"),
        ("fit SHOP -t y --missing impute", "column 'id' has 48 different words.*--id"),
        ("fit SHOP -t town --task regression", "holds words; `--task regression` needs numbers"),
        ("fit SHOP -t y --task counts", "whole numbers"),
        ("fit SHOP -t y --task magic", "`task` must be"),
        ("fit SHOP -t id", "60 different values; classification takes 2 to 50"),
        ("fit SHOP -t y --alpha many", "`--alpha` must be auto or a number"),
        ("fit SHOP -t y --test-size 1", "`test_size` must be a share"),
        ("fit SHOP -t y --id id --drop x --kernel cubic", "`kernel` must be one of"),
        ("fit SHOP -t y --id id --drop x --device quantum", "`device` must be one"),
        ("fit SHOP -t y --id id --drop x --alpha -1", "`alpha` must be"),
        ("fit SHOP -t y --missing guess", "`missing` must be 'error' or 'impute'"),
        ("fit SHOP -t y -o nowhere/m.winnow", "folder that exists"),
        ("predict y.winnow SHOP -o out.xlsx", r"must end in one of \.csv"),
        ("predict y.winnow SHOP --level 95", "`level` must lie between 0 and 1"),
        ("predict SHOP SHOP", "is not a winnowgp model"),
        ("predict nope.winnow SHOP", "No such file"),
        ("predict . SHOP", "is a folder"),
        ("predict posterior.winnow SHOP", "holds a SparseGPRegressor, saved from Python"),
        ("plot y.winnow --what art", "`--what` must be one of"),
        ("plot y.winnow -o a.doc", r"must end in one of \.png"),
        ("data moon", "`name` must be one of"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    words: str,
    message: str,
    shop: Path,
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    typed = words.replace("SHOP", str(shop)).replace("y.winnow", str(models["y"])).split()
    if "posterior.winnow" in typed:
        model = winnowgp.load(models["y"]).estimator
        typed[1] = str(model.save(shop.parent / "posterior.winnow"))
    assert run([*typed, *(["-q"] if typed[0] == "fit" else [])]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("winnow: ")
    import re

    assert re.search(message, said), said
    assert list(tmp_path.iterdir()) == []


def test_no_command_and_wrong_words_are_told_what_there_is(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run([]) == 2
    assert "frontier" in "".join(capfd.readouterr())
    assert run(["fly"]) == 2
    assert "No such command" in capfd.readouterr().err
    assert run(["fit"]) == 2
    assert "Missing argument" in capfd.readouterr().err


def test_a_mistake_of_ours_has_exit_code_1_and_no_traceback(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(path: Path) -> None:
        raise ZeroDivisionError("no\nway")

    monkeypatch.setattr("winnowgp.cli.loaded.load", broken)
    assert run(["info", str(models["y"])]) == 1
    said = capfd.readouterr().err
    assert "a mistake of ours (ZeroDivisionError: no way)" in said
    assert said.count("\n") == 1


def test_ctrl_c_leaves_nothing_behind(shop: Path, tmp_path: Path) -> None:
    """A fit that would take minutes, interrupted once it has begun."""
    rng = np.random.default_rng(0)
    table = rng.normal(size=(4000, 6))
    np.savetxt(tmp_path / "big.csv", table, delimiter=",", header="a,b,c,d,e,f", comments="")
    before = (tmp_path / "m.winnow").write_bytes(b"what was there")
    process = subprocess.Popen(
        [*WINNOW, "fit", "big.csv", "-t", "f", "-o", "m.winnow"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "COLUMNS": "100", "FORCE_COLOR": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stderr is not None
    os.set_blocking(process.stderr.fileno(), False)
    seen, deadline = b"", time.monotonic() + 120
    while b"warm up" not in seen and time.monotonic() < deadline and process.poll() is None:
        seen += process.stderr.read() or b""
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    os.set_blocking(process.stderr.fileno(), True)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert b"interrupted; nothing was written" in said
    assert {p.name for p in tmp_path.iterdir()} == {"big.csv", "m.winnow"}
    assert (tmp_path / "m.winnow").stat().st_size == before


def test_the_paper_s_data_are_listed_and_fetched(
    paper_data: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if folder := os.environ.get("WINNOWGP_DATA"):
        # It may be relative to where the tests were started.
        monkeypatch.setenv("WINNOWGP_DATA", str(Path(folder).absolute()))
    monkeypatch.chdir(tmp_path)
    assert run(["data", "--json"]) == 0
    names = [row["name"] for row in json.loads(capsys.readouterr().out)]
    assert names == ["concrete", "energy", "kin8nm", "protein", "qpcr"]
    assert run(["data", "energy"]) == 0
    assert winnowgp.read_columns(tmp_path / "energy.csv.gz").N == 768


def test_a_fit_without_held_out_rows_says_nothing_of_quality(
    shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "m.winnow"
    words = ["fit", str(shop), "-t", "y", "--drop", "up,visits,day,id,x", "--test-size", "0"]
    assert run([*words, "--json", "-o", str(out)]) == 0
    assert json.loads(capsys.readouterr().out)["held_out"] is None
    assert run(["plot", str(out), "--what", "calibration", "-o", str(tmp_path / "a.png")]) == 2


@pytest.mark.parametrize("name", ["model.onnx", "model.py"])
def test_models_are_exported(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="onnx is not installed")
    assert run(["export", str(models["y"]), "-o", str(tmp_path / name), "-q"]) == 0
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert run(["export", str(models["y"]), "-o", str(tmp_path / "model.exe")]) == 2


def test_names_of_columns_are_shown_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Brackets are not rich's markup, dollars not matplotlib's mathematics."""
    rows = [f"{x:.2f},{x * x:.2f},{np.sin(x):.4f}" for x in np.linspace(0, 5, 30)]
    table = tmp_path / "a.csv"
    table.write_text("\n".join(["speed [/s],$a_$ [kg],y", *rows]))
    model = tmp_path / "a.winnow"
    assert run(["fit", str(table), "-t", "y", "--max-points", "3", "-o", str(model)]) == 0
    said = capsys.readouterr().out
    assert "speed [/s]" in said
    assert "$a_$ [kg]" in said
    assert run(["plot", str(model), "-o", str(tmp_path / "a.png")]) == 0


# The first row has no target and is left out; with this seed row 8 is held out.
STRAY = "\n".join(f"{'tall' if i == 8 else i},{'' if i == 1 else i * i}" for i in range(1, 12))
HUGE = "x,y\n1,\n2,\n3,1\n4,2\n5,1e200\n6,4\n"


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("x,y\n1,2\ninf,3\n4,5\n5,6\n6,7\n", "-t y", "inf in row 2"),
        ("x;y\n1;2,5\n2;3,5\n3;4,1\n", "-t y", "decimal commas"),
        ("x;y\n1,5;2\n2,5;3\n3,5;4\n", "-t y", "column 'x' holds words, such as '1,5'"),
        (f"x,y\n{STRAY}", "-t y --missing impute --seed 0", "'tall' in row 8; mend that row"),
        (HUGE, "-t y --missing impute", "has 1e+200 in row 5"),
        ("mean,x,y\na,1,2\nb,2,3\nc,3,4\n", "-t y --id mean", "column of predictions"),
    ],
)
def test_what_a_table_cannot_mean_is_said(
    text: str, words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "a.csv"
    table.write_text(text)
    assert run(["fit", str(table), *words.split(), "-o", str(tmp_path / "a.winnow")]) == 2
    assert message in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_ends_a_command_quietly(
    shop: Path, models: dict[str, Path]
) -> None:
    """As `winnow predict … | head -1` does: no message, and the code of a broken pipe."""
    # So little is said that it waits in a buffer for the end, unless nothing is buffered.
    buffered = {name: v for name, v in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        [*WINNOW, "predict", str(models["visits"]), str(shop)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=buffered,
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        said = process.stderr.read()
    assert (process.returncode, said) == (128 + signal.SIGPIPE, b"")


def test_a_table_without_names_of_rows_is_predicted_with_a_note(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "new.csv").write_text("town,day,x\nOslo,2024-03-03,1.0\n", encoding="utf-8")
    assert run(["predict", str(models["y"]), str(tmp_path / "new.csv")]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("mean,sd,lower,upper\n")
    assert "there is no column 'id' to name rows by" in said.err


@pytest.fixture(scope="module")
def hills(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of two numeric inputs, a height, and a side."""
    rng = np.random.default_rng(1)
    x, z = rng.uniform(0, 6, (2, 60))
    height = np.sin(x) + 0.3 * z + 0.3 * rng.normal(size=60)
    side = np.where(height > 1, "over", "under")
    path = tmp_path_factory.mktemp("hills") / "hills.csv"
    rows = [f"{a},{b},{h},{s}" for a, b, h, s in zip(x, z, height, side, strict=True)]
    path.write_text("\n".join(["x,$z$,height,side", *rows]))
    return path


@pytest.mark.parametrize(("target", "drop"), [("height", "side"), ("side", "height")])
def test_a_surface_over_two_numeric_inputs(
    target: str, drop: str, hills: Path, tmp_path: Path
) -> None:
    model = tmp_path / "m.winnow"
    words = ["fit", str(hills), "-t", target, "--drop", drop, "--tolerance", "1", "-q"]
    assert run([*words, "-o", str(model)]) == 0
    plot = ["plot", str(model), "--what", "surface", "-q", "-o"]
    sizes = []
    for data in ([], ["--data", str(hills)]):
        out = tmp_path / f"{len(sizes)}.svg"
        assert run([*plot, str(out), *data]) == 0
        sizes.append(out.read_text(encoding="utf-8").count("<use"))
    # Sixty rows more, drawn one by one; the colour bar may have fewer ticks.
    assert sizes[1] - sizes[0] > 45


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--what surface", "two numeric inputs; this one has 'x' (number), 'town' (words)"),
        ("--what effects --data a.csv", "`--data` is for `--what surface`"),
    ],
)
def test_what_has_no_surface_says_so(
    words: str,
    message: str,
    models: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = str(tmp_path / "a.png")
    assert run(["plot", str(models["y"]), *words.split(), "-o", out]) == 2
    assert message in capsys.readouterr().err
