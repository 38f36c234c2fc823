"""The whole way of a newcomer."""

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from winnowgp.cli.main import run

WINNOW = [sys.executable, "-W", "ignore", "-m", "winnowgp"]


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text.splitlines()))


def test_a_newcomer_s_whole_way(
    shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a folder of their own; the fit in a process of its own."""
    options = "--id id --drop up,visits --missing impute --tolerance 0.3"
    words = ["fit", str(shop), "--target", "y", *options.split(), "-o", "m.winnow"]
    result = subprocess.run(
        [*WINNOW, *words], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert "regression: the target holds numbers" in result.stdout
    assert "48 to learn from, 12 held out" in result.stdout
    assert "model: m.winnow" in result.stdout
    monkeypatch.chdir(tmp_path)
    assert run(["predict", "m.winnow", str(shop), "-o", "out.csv"]) == 0
    found = read((tmp_path / "out.csv").read_text(encoding="utf-8"))
    assert list(found[0]) == ["id", "mean", "sd", "lower", "upper"]
    assert [row["id"] for row in found] == [f"r{i}" for i in range(60)]
    truth = [float(row["y"]) for row in read(shop.read_text(encoding="utf-8"))]
    error = np.array([float(row["mean"]) for row in found]) - truth
    assert np.sqrt(np.mean(error**2)) < 0.3
    assert run(["info", "m.winnow"]) == 0
    assert "command: winnow fit" in capsys.readouterr().out
    assert run(["frontier", "m.winnow", "-o", "f.png"]) == 0
    assert "<- kept" in capsys.readouterr().out
    assert {p.name for p in tmp_path.iterdir()} == {"m.winnow", "out.csv", "f.png"}
