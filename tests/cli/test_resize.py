"""`winnow resize`: smaller models without the rows."""

import json
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import winnowgp
from winnowgp.cli.app import run
from winnowgp.training import budget, growth

FILES = Path(__file__).parent.parent / "numbers" / "files"


@pytest.mark.parametrize("target", ["y", "up", "visits"])
def test_resize_writes_the_model_of_that_size(
    target: str, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = winnowgp.load(models[target])
    points = large.estimator.available_sizes_[0]
    small_file = tmp_path / "small.winnow"
    words = ["resize", str(models[target]), "--points", str(points), "-o", str(small_file)]
    assert run([*words, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    small = winnowgp.load(small_file)
    assert small_file.stat().st_size < models[target].stat().st_size
    expected = large.estimator.resized(points)
    assert small.estimator.elbo_ == expected.elbo_ == printed["elbo_nats"]
    assert printed["inducing_points"] == points
    assert (printed["resized_from"], printed["held_out"]) == (large.estimator.n_inducing_, None)
    assert run(["info", str(small_file), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again == printed
    assert again["settings"]["command"].endswith(
        f"&& winnow resize {target}.winnow --points {points}"
    )
    assert run(["info", str(small_file)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "The quality of the resized model was not measured" in text
    assert "48 for training, 12 held out" in text
    # Effects are those of the smaller model, over the same range.
    for before, after in zip(large.summary["effects"], small.summary["effects"], strict=True):
        assert (after["column"], after["kind"]) == (before["column"], before["kind"])
        if after["kind"] == "category":
            assert after["at"] == before["at"]
        else:
            np.testing.assert_allclose(after["at"][:: len(after["at"]) - 1], _ends(before))
        assert after["counts"] == before["counts"]
    first, second = (m.summary["effects"][0]["curves"][0]["mean"] for m in (large, small))
    assert not np.allclose(first[0], second[0]) or not np.allclose(first[-1], second[-1])


def _ends(effect: Any) -> list[float]:
    return [effect["at"][0], effect["at"][-1]]


def test_resize_without_points_lists_the_sizes(
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["resize", str(models["y"]), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["available"]
    estimator = winnowgp.load(models["y"]).estimator
    assert tuple(row["inducing_points"] for row in rows) == estimator.available_sizes_
    # Rising, up to the tolerance: hyper-parameters of each size maximise ELBO and priors together.
    elbos, N = [row["elbo_nats"] for row in rows], estimator.frontier_.N
    assert all(larger > smaller - 0.01 * N for smaller, larger in pairwise(elbos))
    assert run(["resize", str(models["y"])]) == 0
    assert f"{estimator.elbo_:.2f}" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_resize_to_an_unavailable_size_names_the_sizes(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "small.winnow"
    assert run(["resize", str(models["y"]), "--points", "3", "-o", str(output)]) == 2
    sizes = winnowgp.load(models["y"]).estimator.available_sizes_
    assert f"kept, {', '.join(map(str, sizes))}; got 3" in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize("what", ["effects", "frontier"])
def test_plot_of_a_resized_model(what: str, models: dict[str, Path], tmp_path: Path) -> None:
    small = tmp_path / "small.winnow"
    points = str(winnowgp.load(models["y"]).estimator.available_sizes_[0])
    assert run(["resize", str(models["y"]), "--points", points, "-o", str(small), "-q"]) == 0
    assert run(["plot", str(small), "--what", what, "-o", str(tmp_path / "a.png"), "-q"]) == 0
    for absent in ("inclusion", "trace", "calibration"):
        assert run(["plot", str(small), "--what", absent, "-o", str(tmp_path / "b.png")]) == 2
    assert not (tmp_path / "b.png").exists()


@pytest.mark.parametrize("task", ["regression", "classification", "counts"])
def test_commands_accept_files_of_earlier_versions(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(FILES / f"TabularModel-{task}.winnow")
    model = winnowgp.load(file)
    assert model.estimator.available_sizes_ == (model.estimator.n_inducing_,)
    assert run(["info", file]) == 0
    text = capsys.readouterr().out
    assert "ELBO gap" in text
    assert not any(label in text for label in ("log evidence", "predictive gap", "growth"))
    assert run(["frontier", file, "-o", str(tmp_path / "f.png")]) == 0
    assert "<- selected" in capsys.readouterr().out
    assert run(["report", file, "-o", str(tmp_path / "r.html")]) == 0
    assert run(["resize", file, "--json"]) == 0
    capsys.readouterr()
    again = model.save(tmp_path / "again.winnow")
    assert winnowgp.load(again).summary == model.summary


def test_fit_shows_the_limit_that_ended_growth(
    shop: Path,
    tmp_path: Path,
    quickly: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(budget.Budget, "limit_of", lambda *_, **__: "work")
    monkeypatch.setattr(growth, "grow", partial(growth.grow, first=2))
    words = ["fit", str(shop), "-t", "y", "--drop", "up,visits,id", "--missing", "impute"]
    assert run([*words, "--kernel", "rbf", "-o", str(tmp_path / "m.winnow")]) == 0
    said = capsys.readouterr()
    assert "note: more inducing points" in said.out
    assert "`--max-fit-seconds`" in said.out
    assert "(limit: work)" in " ".join(said.out.split())
    assert run([*words, "-q", "-o", str(tmp_path / "m.winnow")]) == 0
    assert "(limit: work)" in capsys.readouterr().err


def test_fit_refuses_an_unknown_criterion(
    shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["fit", str(shop), "-t", "y", "--drop", "id", "--missing", "impute"]
    words += ["--criterion", "aic"]
    assert run([*words, "-o", str(tmp_path / "m.winnow"), "-q"]) == 2
    assert "`--criterion` must be 'elbo' or 'predictive'" in capsys.readouterr().err
