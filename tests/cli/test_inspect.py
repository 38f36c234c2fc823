"""`winnow info`, `winnow frontier`, `winnow data` and `winnow export`."""

import json
import os
from pathlib import Path

import pytest

import winnowgp
from winnowgp.cli.app import run


def test_info_and_frontier_json_agree(
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
    assert frontier["selected"] == info["inducing_points"]
    bounds = [row["elbo_nats"] for row in frontier["frontier"]]
    assert [row["inducing_points"] for row in frontier["frontier"]] == list(range(len(bounds)))
    assert bounds[-1] > bounds[0]


def test_data_lists_and_copies_tables(
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
    assert winnowgp.read_table(tmp_path / "energy.csv.gz").N == 768


@pytest.mark.parametrize("name", ["model.onnx", "model.py"])
def test_export_writes_onnx_and_numpy(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="onnx is not installed")
    assert run(["export", str(models["y"]), "-o", str(tmp_path / name), "-q"]) == 0
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert run(["export", str(models["y"]), "-o", str(tmp_path / "model.exe")]) == 2
