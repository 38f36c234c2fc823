"""A new table from `winnow fit` to predictions, as a new user would do it."""

import csv
import sys
from pathlib import Path

import numpy as np
import pytest

from winnowgp.cli.app import main, run


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text.splitlines()))


@pytest.mark.usefixtures("quickly")
def test_fit_predict_info_frontier_of_a_new_table(
    shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a folder of their own."""
    options = "--id id --drop up,visits --missing impute --tolerance 0.3"
    words = ["fit", str(shop), "--target", "y", *options.split(), "-o", "m.winnow"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["winnow", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert "regression: the target is numeric" in said
    assert "48 for training, 12 held out" in said
    assert "model: m.winnow" in said
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
    assert "<- selected" in capsys.readouterr().out
    assert {p.name for p in tmp_path.iterdir()} == {"m.winnow", "out.csv", "f.png"}
