"""`winnow predict`: predictions, notes, blocks of rows, and failures."""

import csv
import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

import winnowgp
from winnowgp.cli.app import run
from winnowgp.data import read_blocks
from winnowgp.estimators import base as base_module
from winnowgp.tabular.quality import predictive

# One of the towns of the new tables is not in the training rows.
pytestmark = pytest.mark.filterwarnings("ignore::winnowgp.errors.ExtrapolationWarning")


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text.splitlines()))


def test_predict_equals_the_library(
    shop: Path, models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["predict", str(models["y"]), str(shop), "--level", "0.5"]) == 0
    found = read(capsys.readouterr().out)
    model = winnowgp.load(models["y"])
    X = model.encoder.encode(winnowgp.read_table(shop))
    mean = model.estimator.predict(X)
    np.testing.assert_allclose([float(r["mean"]) for r in found], mean, rtol=1e-12)
    upper = model.estimator.predict_interval(X, 0.5)[1]
    np.testing.assert_allclose([float(r["upper"]) for r in found], upper, rtol=1e-9)
    # Half of the probability lies between the quartiles.
    np.testing.assert_allclose(predictive(model.estimator, X).cdf(upper), 0.75, atol=1e-6)


def test_predict_reads_standard_input(
    shop: Path, models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-m", "winnowgp", "predict", str(models["y"]), "-"]
    done = subprocess.run(command, input=shop.read_bytes(), capture_output=True, check=True)
    assert run(["predict", str(models["y"]), str(shop)]) == 0
    assert done.stdout.decode() == capsys.readouterr().out


def test_predict_classes_has_probabilities(
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


def test_predict_counts_has_whole_intervals(
    shop: Path, models: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out.parquet"
    assert run(["predict", str(models["visits"]), str(shop), "-o", str(out), "-q"]) == 0
    table = winnowgp.read_table(out)
    assert table.names == ("id", "mean", "sd", "lower", "upper")
    lower = table.numbers("lower")
    assert lower is not None
    assert (lower == np.round(lower)).all()
    assert (lower >= 0).all()


def test_predict_reorders_columns_and_notes_unseen_values(
    shop: Path, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another order of columns, compressed, an unseen town, a hole where there was none."""
    lines = ["town,day,x,id", "Oslo,2024-03-03,1.0,a", "Paris,,2.0,b"]
    path = tmp_path / "new.csv.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    out = tmp_path / "out.csv.gz"
    assert run(["predict", str(models["y"]), str(path), "-o", str(out)]) == 0
    output = capsys.readouterr().err
    assert "column 'town' has 1 value that was not in the training rows ('Paris')" in output
    assert "as if the column were empty, and their intervals may be too narrow" in output
    found = read(gzip.decompress(out.read_bytes()).decode())
    model = winnowgp.load(models["y"])
    typical = {c.name: c.typical for c in model.encoder.columns}
    row = [2.0, 0.0, 0.0, 0.0, 0.0, typical["day"]]
    assert model.encoder.features[:2] == ("x", "x missing")
    assert float(found[1]["mean"]) == pytest.approx(model.estimator.predict([row])[0])


def test_predict_without_id_column_notes_it(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "new.csv").write_text("town,day,x\nOslo,2024-03-03,1.0\n", encoding="utf-8")
    assert run(["predict", str(models["y"]), str(tmp_path / "new.csv")]) == 0
    output = capsys.readouterr()
    assert output.out.startswith("mean,sd,lower,upper\n")
    assert "the id column 'id' is missing" in output.err
    # An error is all that is output, if there is one.
    (tmp_path / "new.csv").write_text("town,day,x\nOslo,2024-03-03,inf\n", encoding="utf-8")
    assert run(["predict", str(models["y"]), str(tmp_path / "new.csv")]) == 2
    assert capsys.readouterr().err.startswith("winnow: column 'x' has inf in row 1;")


def test_predict_broken_pipe_is_silent(shop: Path, models: dict[str, Path]) -> None:
    """As `winnow predict … | head -1` does: no message, and the code of a broken pipe.

    In a process of its own, with all that libraries say about themselves when they are imported.
    """
    # So little is output that it waits in a buffer for the end, unless nothing is buffered.
    buffered = {name: v for name, v in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        [sys.executable, "-m", "winnowgp", "predict", str(models["visits"]), str(shop)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=buffered,
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        output = process.stderr.read()
    assert (process.returncode, output) == (128 + signal.SIGPIPE, b"")


AT_ONCE, ROWS, GROUP = 1024, 1250, 32


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """`AT_ONCE` rows are read and predicted at once, fewer than a file holds."""
    monkeypatch.setattr(base_module, "ROWS", AT_ONCE)
    monkeypatch.setattr(winnowgp.data, "read_blocks", partial(read_blocks, size=AT_ONCE))


def parts(path: Path, rows: int, **changes: Any) -> Path:
    """New rows as Parquet, in row groups of `GROUP`."""
    rng = np.random.default_rng(1)
    columns = {
        "id": [None if i < 9 else f"r{i}" for i in range(rows)],
        "x": rng.uniform(0, 6, rows),
        "town": rng.choice(["Oslo", "Rome", "Bergen"], rows),
        "day": [f"2024-{1 + i % 12:02d}-03" for i in range(rows)],
    }
    parquet.write_table(pyarrow.table(columns | changes), path, row_group_size=GROUP)
    return path


def as_csv(source: Path, path: Path) -> Path:
    table = winnowgp.read_table(source)
    words = [["" if w is None else w for w in table.strings(name)] for name in table.names]
    with gzip.open(path, "wt", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([table.names, *zip(*words, strict=True)])
    return path


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parts(tmp_path_factory.mktemp("new") / "new.parquet", ROWS)


def check_blocks(model: winnowgp.TabularModel, table: winnowgp.DataTable, size: int) -> None:
    """That they have the predictions of the whole, to the last bit."""
    whole = model.predict(table)
    pulled = 0

    def blocks() -> Iterator[winnowgp.DataTable]:
        nonlocal pulled
        for start in range(0, table.N, size):
            block = table.part(slice(start, start + size))
            pulled += block.N
            yield block

    found: dict[str, list[Any]] = {name: [] for name in whole}
    for part in model.predict_blocks(blocks()):
        assert pulled - len(found["id"]) < base_module.ROWS + size
        for name, column in part.items():
            found[name].extend(column.tolist())
    assert found == {name: column.tolist() for name, column in whole.items()}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("target", "size"),
    [("y", 1), ("y", 311), ("y", AT_ONCE), ("y", ROWS), ("up", 311), ("visits", 623)],
)
def test_predict_blocks_equals_predict(
    target: str, size: int, models: dict[str, Path], new: Path
) -> None:
    check_blocks(winnowgp.load(models[target]), winnowgp.read_table(new), size)


def test_predict_blocks_equals_predict_at_default_batch_size(
    models: dict[str, Path], tmp_path: Path
) -> None:
    new = parts(tmp_path / "new.parquet", base_module.ROWS + 116)
    check_blocks(winnowgp.load(models["y"]), winnowgp.read_table(new), 4999)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", ["csv", "csv.gz", "parquet"])
def test_predict_file_of_many_blocks_equals_predict(
    kind: str, models: dict[str, Path], new: Path, tmp_path: Path, capfd: Any
) -> None:
    model = winnowgp.load(models["y"])
    whole = model.predict(winnowgp.read_table(new))
    given = new if kind == "csv.gz" else as_csv(new, tmp_path / "new.csv.gz")
    out = tmp_path / f"out.{kind}"
    assert run(["predict", str(models["y"]), str(given), "-o", str(out)]) == 0
    output = capfd.readouterr()
    assert output.out == f"{ROWS} predictions: {out}\n"
    assert output.err.startswith(
        "winnow: column 'town' has 1 value that was not in the training rows"
    )
    found = winnowgp.read_table(out)
    assert found.names == tuple(whole)
    assert found.strings("id").tolist() == whole["id"].tolist()
    for name in ("mean", "sd", "lower", "upper"):
        numbers = found.numbers(name)
        assert numbers is not None
        assert numbers.tolist() == whole[name].tolist()
    assert out.read_bytes()[:4] != b"\x1f\x8b\x08\x08", "the name of a temporary file is in it"


@pytest.mark.usefixtures("small_blocks")
def test_predict_prints_what_it_saves(
    models: dict[str, Path], new: Path, tmp_path: Path, capfd: Any
) -> None:
    out = tmp_path / "out.csv"
    assert run(["predict", str(models["y"]), str(new), "-o", str(out), "-q"]) == 0
    output = capfd.readouterr()
    assert output.out == ""
    assert output.err.startswith("winnow: column 'town' has 1 value")
    assert output.err.count("\n") == 1
    assert run(["predict", str(models["y"]), str(new), "-q"]) == 0
    printed = capfd.readouterr().out
    assert printed == out.read_text(encoding="utf-8")
    assert run(["predict", str(models["y"]), str(new), "-o", str(out), "-q", "--json"]) == 0
    objects = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [o["mean"] for o in objects] == [float(row["mean"]) for row in read(printed)]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"x": np.inf}, "column 'x' has inf in row 1200 (row group 37, counted from 0)"),
        ({"day": "soon"}, "got 'soon' in row 1200 (row group 37, counted from 0)"),
    ],
)
def test_predict_bad_row_is_named_and_nothing_written(
    bad: dict[str, Any],
    message: str,
    models: dict[str, Path],
    new: Path,
    tmp_path: Path,
    capfd: Any,
) -> None:
    table = winnowgp.read_table(new)
    (name, value) = next(iter(bad.items()))
    column = table.values[name].copy()
    column[1_199] = value
    path = parts(tmp_path / "bad.parquet", ROWS, **{name: column})
    for words in ([], ["-o", str(tmp_path / "out.csv.gz")], ["-o", str(tmp_path / "out.parquet")]):
        assert run(["predict", str(models["y"]), str(path), *words]) == 2
        output = capfd.readouterr()
        assert output.out == ""
        assert message in output.err
        assert output.err.count("\n") == 1
        assert [p.name for p in tmp_path.iterdir()] == ["bad.parquet"]
    zipped = as_csv(path, tmp_path / "bad.csv.gz")
    assert run(["predict", str(models["y"]), str(zipped)]) == 2
    assert message.split(" (")[0] in capfd.readouterr().err


@pytest.mark.usefixtures("quickly", "small_blocks")
def test_predict_missing_value_is_named(tmp_path: Path, capfd: Any) -> None:
    """For a model that has no rule for what is missing."""
    rows, model = tmp_path / "rows.csv", str(tmp_path / "m.winnow")
    rows.write_text("x,y\n" + "".join(f"{i / 8},{i % 5}\n" for i in range(40)))
    assert run(["fit", str(rows), "-t", "y", "-o", model, "-q", "--tolerance", "1"]) == 0
    capfd.readouterr()
    x = np.linspace(0, 1, ROWS)
    x[[1_199, 1_210]] = np.nan
    path = parts(tmp_path / "bad.parquet", ROWS, x=x)
    assert run(["predict", model, str(path), "-o", str(tmp_path / "out.csv")]) == 2
    output = capfd.readouterr().err
    assert output.count("\n") == 1
    assert "'x' has missing values, the first in row 1200 (row group 37, counted from 0)" in output
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.usefixtures("small_blocks")
def test_predict_failure_keeps_the_existing_file(
    models: dict[str, Path],
    new: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: Any,
) -> None:
    real = winnowgp.TabularModel._predicted
    for kind in ("csv", "csv.gz", "parquet"):
        for problem, code in ((KeyboardInterrupt(), 130), (OSError(28, "No space left"), 2)):
            calls = 0

            def second(*args: Any, problem: BaseException = problem, **words: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == 2:
                    raise problem
                return real(*args, **words)

            monkeypatch.setattr(winnowgp.TabularModel, "_predicted", second)
            out = tmp_path / f"out.{kind}"
            out.write_text("precious")
            assert run(["predict", str(models["y"]), str(new), "-o", str(out)]) == code
            assert calls == 2
            assert out.read_text() == "precious"
            assert list(tmp_path.iterdir()) == [out]
            assert capfd.readouterr().out == ""
            out.unlink()


@pytest.mark.usefixtures("small_blocks")
def test_predict_counts_unseen_values_up_to_a_limit(
    models: dict[str, Path], tmp_path: Path, capfd: Any
) -> None:
    # From the last to the first: of those of the second block too few are kept to show them.
    cases = ((999, "999 values", "town 00000"), (1_200, "1000 or more values", "town 00176"))
    for distinct, count, first in cases:
        towns = [f"town {distinct - 1 - i % distinct:05d}" for i in range(ROWS)]
        path = parts(tmp_path / "new.parquet", ROWS, town=towns)
        out = str(tmp_path / "out.csv")
        assert run(["predict", str(models["y"]), str(path), "-o", out]) == 0
        output = capfd.readouterr().err
        assert (
            f"winnow: column 'town' has {count} that were not in the training rows ('{first}',"
            in output
        )
