"""`winnow info`, `winnow frontier`, `winnow data` and `winnow export`."""

import json
import os
from pathlib import Path

import pytest

import winnowgp
from winnowgp.cli.app import run
from winnowgp.data import example_table
from winnowgp.data.catalogue import EXAMPLES


def test_info_and_frontier_json_agree(
    models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["info", str(models["y"]), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert (info["task"], info["rows"], info["train_rows"]) == ("regression", 60, 48)
    assert info["held_out"]["R²"] > 0.5
    assert {c["name"]: c["kind"] for c in info["inputs"]} == {
        "x": "number",
        "town": "category",
        "day": "date",
    }
    assert run(["frontier", str(models["y"]), "--json"]) == 0
    frontier = json.loads(capsys.readouterr().out)
    assert frontier["selected"] == info["inducing_points"]
    elbos = {row["inducing_points"]: row["elbo_nats"] for row in frontier["frontier"]}
    assert elbos[info["inducing_points"]] >= info["elbo_nats"] > elbos[0]
    assert list(elbos.values()) == sorted(elbos.values())
    assert frontier["available"] == info["available_sizes"]
    assert info["available_sizes"][-1] == info["inducing_points"]
    full = frontier["full_gp"]
    assert full["inducing_points"] == 48
    gap = (full["log_evidence_nats"] - info["elbo_nats"]) / 48
    assert info["elbo_gap_nats_per_observation"] == pytest.approx(gap)


def test_info_reports_kernel_evidence_and_growth(
    models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["info", str(models["y"]), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert max(info["kernel_evidence_nats_per_observation"].values()) == 0
    assert info["kernel"] in info["kernel_evidence_nats_per_observation"]
    # 48 rows have an exact evidence.
    lower, upper = info["log_evidence_nats"]
    assert info["log_evidence_method"] == "exact"
    assert info["kl_nats"] == pytest.approx([lower - info["elbo_nats"]] * 2)
    assert run(["info", str(models["y"])]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"kernel {info['kernel']}; evidence per observation relative to the best" in text
    assert f"ELBO is {(upper - info['elbo_nats']) / 48:.4f} nats per observation below" in text
    assert "by held-out log density" in text
    assert "more candidates gain less than the tolerance" in text


def test_info_of_a_classifier_has_no_evidence(
    models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["info", str(models["up"]), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert (info["log_evidence_nats"], info["kl_nats"]) == (None, None)
    assert run(["info", str(models["up"])]) == 0
    assert "log evidence" not in capsys.readouterr().out


def test_frontier_lists_available_sizes_and_the_full_gp(
    models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["frontier", str(models["y"])]) == 0
    text = capsys.readouterr().out
    sizes = winnowgp.load(models["y"]).estimator.available_sizes_
    assert text.count("available") == len(sizes) - 1 > 0
    assert text.count("<- selected") == 1
    full = next(line for line in text.splitlines() if "full GP" in line and "│" in line)
    assert full.split("│")[1].strip() == "48"
    assert "the full GP would gain" in text


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
    assert names[-5:] == ["concrete", "energy", "kin8nm", "protein", "qpcr"]
    assert run(["data", "energy"]) == 0
    assert winnowgp.read_table(tmp_path / "energy.csv.gz").N == 768


@pytest.mark.parametrize("name", EXAMPLES)
def test_data_writes_made_tables(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["data", name]) == 0
    table, made = winnowgp.read_table(tmp_path / f"{name}.csv"), example_table(name)
    assert f"{made.N} rows of {len(made.names)} columns: {name}.csv" in capsys.readouterr().out
    assert table.names == made.names
    for column in made.names:
        assert table.strings(column).tolist() == made.strings(column).tolist()


def test_data_unknown_name_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "boston"]) == 2
    assert "one of houses, churn" in (text := capsys.readouterr().err)
    assert "energy" in text


@pytest.mark.parametrize("name", ["model.onnx", "model.py"])
def test_export_writes_onnx_and_numpy(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    assert run(["export", str(models["y"]), "-o", str(tmp_path / name), "-q"]) == 0
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert run(["export", str(models["y"]), "-o", str(tmp_path / "model.exe")]) == 2
