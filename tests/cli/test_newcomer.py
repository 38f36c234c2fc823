"""The whole way of a newcomer, in processes of their own."""

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np

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
