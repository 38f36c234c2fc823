"""`winnow fit --layers`: deep models of tables, and the commands that read their files."""

import json
import re
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from winnowgp import DeepGPClassifier, DeepGPRegressor, TabularModel, load
from winnowgp.cli.app import run
from winnowgp.cli.summary import PhaseBars
from winnowgp.data import read_table
from winnowgp.estimators import deep, deep_shallow
from winnowgp.training import Progress


@pytest.fixture(scope="module")
def short() -> Iterator[None]:
    """Deep fits of few steps, which are taken to be better than the shallow GP."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(deep._STEPS, "fast", (5, 30, 15))
        patch.setattr(deep_shallow, "seeded_elbo", lambda *_, **__: -1e4)
        patch.setattr(deep_shallow, "density_gain", lambda *_, **__: (0.2, 0.1))
        yield


def fit(shop: Path, target: str, drop: str, output: Path, *options: str) -> int:
    arguments = ["fit", str(shop), "-t", target, "--drop", f"id,{drop}", "--quiet"]
    return run([*arguments, "--missing", "impute", "-o", str(output), *options])


@pytest.fixture(scope="module")
def regression(shop: Path, short: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deep") / "y.winnow"
    assert fit(shop, "y", "up,visits", path, "--layers", "2", "--tolerance", "0.1") == 0
    return path


def loaded(path: Path) -> TabularModel:
    model = load(path)
    assert isinstance(model, TabularModel)
    return model


def regressor(model: TabularModel) -> DeepGPRegressor:
    assert isinstance(model.estimator, DeepGPRegressor)
    return model.estimator


def test_fit_layers_saves_a_deep_regressor_with_its_summary(
    regression: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    estimator = regressor(loaded(regression))
    assert run(["info", str(regression), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layer_inducing_points"] == list(estimator.n_inducing_)
    assert found["inducing_points"] == sum(estimator.n_inducing_)
    assert found["settings"]["layers"] == "2"
    assert found["held_out"]["rows"] == 12
    assert run(["info", str(regression)]) == 0
    first, second = estimator.n_inducing_
    shown = capsys.readouterr().out
    assert f"in 2 layers: {first} + {second}" in shown
    compared = found["shallow_comparison"]
    assert compared["selected"] == "deep"
    gains = f"ELBO {compared['elbo_gain']:+.3f}, held-out density +0.200 ± 0.100"
    assert gains in " ".join(shown.split())


def test_predict_of_a_deep_model_equals_the_estimator(
    regression: Path, shop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["predict", str(regression), str(shop), "--quantiles", "0.5", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    model = loaded(regression)
    X = model.encoder.encode(read_table(shop))
    mean, sd = regressor(model).predict(X, return_std=True)
    np.testing.assert_allclose([row["mean"] for row in rows], mean, rtol=1e-9)
    np.testing.assert_allclose([row["sd"] for row in rows], sd, rtol=1e-9)
    ends = regressor(model).predict_quantiles(X, [0.025, 0.5])
    np.testing.assert_allclose([row["lower"] for row in rows], ends[0], rtol=1e-6)
    np.testing.assert_allclose([row["q0.5"] for row in rows], ends[1], rtol=1e-6)


def test_evaluate_report_and_frontier_read_a_deep_model(
    regression: Path, shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["evaluate", str(regression), str(shop), "--json"]) == 0
    capsys.readouterr()
    assert run(["report", str(regression), "-o", str(tmp_path / "r.html"), "--quiet"]) == 0
    assert '"allocations"' in (tmp_path / "r.html").read_text(encoding="utf-8")
    plot = tmp_path / "f.png"
    assert run(["frontier", str(regression), "-o", str(plot), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert plot.stat().st_size > 0
    estimator = regressor(loaded(regression))
    assert found["selected"] == list(estimator.n_inducing_)
    assert [tuple(row["inducing_points"]) for row in found["frontier"]] == [
        each.sizes for each in estimator.allocations_
    ]
    selected = [row for row in found["frontier"] if row["inducing_points"] == found["selected"]]
    quality = loaded(regression).summary["quality"]
    assert quality is not None
    held_out = quality["metrics"][2]["value"]
    assert selected[0]["held_out_nats_per_observation"] == pytest.approx(held_out)
    assert run(["frontier", str(regression)]) == 0
    assert "selected" in capsys.readouterr().out


def test_resize_without_points_lists_layers(
    regression: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["resize", str(regression)]) == 0
    sizes = regressor(loaded(regression)).n_inducing_
    assert f"{sum(sizes)} = {' + '.join(map(str, sizes))}" in capsys.readouterr().out


def test_progress_of_a_deep_model_names_points_per_layer() -> None:
    text = StringIO()
    layers = torch.zeros(3, 1), torch.zeros(2, 1)
    with PhaseBars(Console(file=text, width=100), quiet=False) as bars:
        bars.update(Progress("post-train", 1, 1, 4.0, None, layers))
    assert "selected" in text.getvalue()
    assert "3 + 2 inducing points" in text.getvalue()


def test_resize_saves_a_smaller_deep_model(regression: Path, tmp_path: Path) -> None:
    before, output = loaded(regression), tmp_path / "small.winnow"
    points = before.summary["choice"]["sizes"][0]
    assert points < before.summary["choice"]["points"]
    arguments = ["resize", str(regression), "--points", str(points), "-o", str(output), "-q"]
    assert run(arguments) == 0
    after = loaded(output)
    assert sum(regressor(after).n_inducing_) == points == after.summary["choice"]["points"]
    assert after.summary["choice"]["resized_from"] == before.summary["choice"]["points"]


def test_fit_layers_classification(shop: Path, short: None, tmp_path: Path) -> None:
    path = tmp_path / "up.winnow"
    options = ("--layers", "2", "--max-predict-us", "100000", "--device", "auto")
    assert fit(shop, "up", "y,visits,day", path, *options) == 0
    assert isinstance(loaded(path).estimator, DeepGPClassifier)
    assert run(["evaluate", str(path), str(shop), "--json"]) == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--layers", "two"), "`--layers` must be a number"),
        (("--layers", "0"), "`--layers` must be a number"),
        (("--layers", "2", "--max-points", "10"), "`--max-points` is not for deep models"),
        (("--layers", "auto", "--max-fit-seconds", "9"), "`--max-fit-seconds` is not for deep"),
        (("--layers", "2", "--criterion", "predictive"), "`--criterion`"),
        (("--layers", "2", "--hyper", "laplace"), "`--hyper`"),
        (("--layers", "2", "--precision", "mixed"), "`--precision`"),
        (("--layers", "2", "--mean", "linear"), "`--mean`"),
        (("--layers", "2", "--posterior", "gibbs"), "`--posterior`"),
        (("--layers", "2", "--likelihood", "heteroscedastic"), "heteroscedastic"),
    ],
)
def test_fit_layers_with_another_option_is_refused(
    shop: Path,
    tmp_path: Path,
    options: tuple[str, ...],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert fit(shop, "y", "up,visits", tmp_path / "no.winnow", *options) != 0
    assert words in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "no.winnow").exists()


@pytest.mark.parametrize("command", ["update", "export"])
def test_commands_that_need_one_layer_refuse_a_deep_model(
    regression: Path,
    shop: Path,
    tmp_path: Path,
    command: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    new = tmp_path / "new.csv"
    new.write_text(shop.read_text(encoding="utf-8").rsplit("\n", 2)[0] + "\n", encoding="utf-8")
    rest = [str(new)] if command == "update" else []
    output = tmp_path / ("u.winnow" if command == "update" else "e.py")
    assert run([command, str(regression), *rest, "-o", str(output)]) != 0
    assert "deep GP" in capsys.readouterr().err
    assert not output.exists()


def test_progress_shows_steps_and_time_in_80_columns() -> None:
    text, inclusion = StringIO(), (torch.full((50,), 0.35),)
    with PhaseBars(Console(file=text, width=80), quiet=False) as bars:
        bars.update(Progress("inclusion", 1200, 1200, -1234.5, inclusion, (torch.zeros(50, 1),)))
    assert re.search(r"1200/1200 +0:00:00 +-1234.5 nats, 17.5 inducing points", text.getvalue())
