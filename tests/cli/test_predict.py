"""`winnow predict`: what it says of new rows, and how it reads them."""

import csv
import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import winnowgp
from winnowgp.cli.main import run

WINNOW = [sys.executable, "-W", "ignore", "-m", "winnowgp"]


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text.splitlines()))


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


def test_a_table_without_names_of_rows_is_predicted_with_a_note(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "new.csv").write_text("town,day,x\nOslo,2024-03-03,1.0\n", encoding="utf-8")
    assert run(["predict", str(models["y"]), str(tmp_path / "new.csv")]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("mean,sd,lower,upper\n")
    assert "there is no column 'id' to name rows by" in said.err


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
