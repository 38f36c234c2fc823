"""`winnow fit` and other scripts under torchrun."""

import json
import sys
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest

from helpers import shared_work
from helpers.forks import Forks
from helpers.shared_rows import sums
from helpers.shared_work import SHARED_WORK, torchrun
from helpers.short_fits import short_fits
from winnowgp import load
from winnowgp.data import read_table
from winnowgp.data.distributed import SINGLE_PROCESS
from winnowgp.tabular import fit_table

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="gloo on one machine")


def table(folder: Path) -> Path:
    rng = np.random.default_rng(8)
    X = rng.uniform(0, 4, size=(60, 2))
    y = np.sin(2 * X[:, 0]) + X[:, 1] + 0.2 * rng.normal(size=60)
    rows = [f"{a},{b},{c}" for (a, b), c in zip(X, y, strict=True)]
    (folder / "table.csv").write_text("\n".join(["a,b,y", *rows]))
    return folder / "table.csv"


def launched(folder: Path, *arguments: str) -> Any:
    command = ("-m", "winnowgp", "fit", "table.csv", "--tolerance", "0.3", *arguments)
    return torchrun(*command, processes=2, folder=folder)


def untimed_summary(model: Any) -> dict[str, Any]:
    """Return the summary of a model without the times in it."""
    found = {k: v for k, v in model.summary.items() if k not in ("timings", "settings")}
    found["choice"] = {k: v for k, v in found["choice"].items() if not k.endswith("_us")}
    return json.loads(json.dumps(found))


@pytest.fixture(scope="module", params=["forked", pytest.param("torchrun", marks=pytest.mark.slow)])
def done(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, forks: Forks
) -> tuple[Path, CompletedProcess[str]]:
    """Return a folder in which two processes have worked, and their exit code and output."""
    folder = tmp_path_factory.mktemp("launched")
    arguments = ["fit", str(table(folder).name), "--tolerance", "0.3", "--target", "y"]
    arguments += ["--kernel", "rbf", "-o", "model.winnow", "--checkpoint", "kept"]
    command = ("shared_rows:sums", "--", *arguments)
    if request.param == "torchrun":
        return folder, torchrun(SHARED_WORK, *command, processes=2, folder=folder)
    found = forks.call(shared_work.launched, str(folder), *command)
    stderr = f"{found['stderr']}\n{found['failed']}"
    return folder, CompletedProcess(command, found["returncode"], found["stdout"], stderr)


def answers(done: tuple[Path, CompletedProcess[str]], name: str) -> list[Any]:
    """Return the results that both processes wrote."""
    folder, torchrun = done
    paths = [folder / f"{name}-{rank}.json" for rank in range(2)]
    assert all(path.exists() for path in paths), torchrun.stderr
    return [json.loads(path.read_text()) for path in paths]


def test_torchrun_fit_equals_one_process_and_prints_once(
    done: tuple[Path, CompletedProcess[str]],
) -> None:
    folder, torchrun = done
    assert answers(done, "command") == [0, 0], torchrun.stderr
    assert torchrun.stdout.count("model: model.winnow") == 1
    assert torchrun.stderr.count("initialisation") == 1
    command: dict[str, Any] = {"tolerance": 0.3, "kernel": "rbf", "seed": 0}
    columns = read_table(folder / "table.csv")
    with short_fits(rounds=2):
        alone = fit_table(columns, "y", process_group=SINGLE_PROCESS, **command)
        # Without torchrun rows are summed in another order.
        plain = fit_table(columns, "y", **command)
    model = load(folder / "model.winnow")
    assert untimed_summary(model) == untimed_summary(alone)
    np.testing.assert_array_equal(
        model.estimator.inducing_points_, alone.estimator.inducing_points_
    )
    assert alone.estimator.elbo_ == pytest.approx(plain.estimator.elbo_, rel=1e-6)
    names = sorted(each.name for each in (folder / "kept").iterdir())
    assert names == ["fit.checkpoint"]


def test_torchrun_processes_form_a_group(
    done: tuple[Path, CompletedProcess[str]], forks: Forks
) -> None:
    found = answers(done, "sums")
    assert [each["gathered"] for each in found] == [[[0, ""], [1, "x"]]] * 2
    assert found == forks.call(shared_work.together, sums, 2)
    assert done[1].returncode == 0, done[1].stderr


@pytest.mark.slow
def test_torchrun_invalid_input_sets_the_exit_code(tmp_path: Path) -> None:
    table(tmp_path)
    done = launched(tmp_path, "--target", "q", "-o", "model.winnow")
    assert done.returncode != 0
    assert "'q' is not among" in done.stderr
    assert "internal error" not in done.stderr
    assert not (tmp_path / "model.winnow").exists()


@pytest.mark.slow
def test_torchrun_counts_are_not_sharded_and_written_once(tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    rows = [f"{x},{rng.poisson(np.exp(x))}" for x in rng.uniform(0, 2, size=40)]
    (tmp_path / "table.csv").write_text("\n".join(["x,y", *rows]))
    arguments = ("--target", "y", "--task", "counts", "-o", "model.winnow", "--checkpoint", "kept")
    done = launched(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("winnow: each of 2 processes repeats the work") == 1
    alone = fit_table(read_table(tmp_path / "table.csv"), "y", task="counts", tolerance=0.3)
    assert untimed_summary(load(tmp_path / "model.winnow")) == untimed_summary(alone)
