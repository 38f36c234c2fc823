"""`winnow fit` under torchrun."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launched import torchrun
from winnowgp import load
from winnowgp.data import Ranks, read_columns
from winnowgp.estimators import fit_table

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="gloo on one machine")


def table(folder: Path) -> Path:
    rng = np.random.default_rng(8)
    X = rng.uniform(0, 4, size=(90, 2))
    y = np.sin(2 * X[:, 0]) + X[:, 1] + 0.2 * rng.normal(size=90)
    rows = [f"{a},{b},{c}" for (a, b), c in zip(X, y, strict=True)]
    (folder / "table.csv").write_text("\n".join(["a,b,y", *rows]))
    return folder / "table.csv"


def launched(folder: Path, *words: str) -> Any:
    asked = ("-m", "winnowgp", "fit", "table.csv", "--tolerance", "0.3", *words)
    return torchrun(*asked, processes=2, folder=folder)


def said(model: Any) -> dict[str, Any]:
    """All but what a clock measures."""
    found = {k: v for k, v in model.findings.items() if k not in ("timings", "settings")}
    found["choice"] = {k: v for k, v in found["choice"].items() if not k.endswith("_us")}
    return json.loads(json.dumps(found))


def test_two_processes_write_the_model_of_one_and_speak_once(tmp_path: Path) -> None:
    path = table(tmp_path)
    done = launched(tmp_path, "--target", "y", "-o", "model.winnow", "--checkpoint", "kept")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("model: model.winnow") == 1
    assert done.stderr.count("warm up") == 1
    asked: dict[str, Any] = {"tolerance": 0.3, "seed": 0}
    alone = fit_table(read_columns(path), "y", ranks=Ranks.alone(), **asked)
    model = load(tmp_path / "model.winnow")
    assert said(model) == said(alone)
    np.testing.assert_array_equal(
        model.estimator.inducing_points_, alone.estimator.inducing_points_
    )
    # Without torchrun rows are summed in another order.
    plain = fit_table(read_columns(path), "y", **asked)
    assert alone.estimator.elbo_ == pytest.approx(plain.estimator.elbo_, rel=1e-6)
    names = sorted(each.name for each in (tmp_path / "kept").iterdir())
    assert names == ["estimator.checkpoint", "fit.checkpoint"]


@pytest.mark.slow
def test_a_mistake_is_said_and_the_exit_code_tells(tmp_path: Path) -> None:
    table(tmp_path)
    done = launched(tmp_path, "--target", "q", "-o", "model.winnow")
    assert done.returncode != 0
    assert "'q' is not among" in done.stderr
    assert "mistake of ours" not in done.stderr
    assert not (tmp_path / "model.winnow").exists()


@pytest.mark.slow
def test_counts_are_not_shared_and_written_once(tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    rows = [f"{x},{rng.poisson(np.exp(x))}" for x in rng.uniform(0, 2, size=40)]
    (tmp_path / "table.csv").write_text("\n".join(["x,y", *rows]))
    words = ("--target", "y", "--task", "counts", "-o", "model.winnow", "--checkpoint", "kept")
    done = launched(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("winnow: each of 2 processes does all the work") == 1
    alone = fit_table(read_columns(tmp_path / "table.csv"), "y", task="counts", tolerance=0.3)
    assert said(load(tmp_path / "model.winnow")) == said(alone)
