"""`winnow fit --hyper laplace`, and the commands that read such a model."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

import winnowgp
from helpers.short_fits import shortest_fits
from winnowgp.cli.app import run


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(1)
    x = rng.uniform(0, 6, 30)
    rows = zip(x, np.sin(x) + 0.3 * rng.normal(size=30), np.where(x > 3, "u", "v"), strict=True)
    path = tmp_path_factory.mktemp("hyper") / "table.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["x", "y", "c"], *rows])
    return path


@pytest.fixture(scope="module")
def model(table: Path) -> Path:
    path = table.parent / "model.winnow"
    arguments = ["-t", "y", "--drop", "c", "--hyper", "laplace", "--kernel", "rbf"]
    with shortest_fits():
        assert run(["fit", str(table), *arguments, "-o", str(path), "--quiet"]) == 0
    return path


def test_commands_say_and_use_the_mixture(table: Path, model: Path, capsys) -> None:
    fitted = winnowgp.load(model)
    assert fitted.estimator.posterior_.S == 4
    assert run(["info", str(model)]) == 0
    assert "average over 4 posteriors" in capsys.readouterr().out
    assert run(["info", str(model), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hyper_posteriors"] == 4
    assert run(["evaluate", str(model), str(table), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    data = np.loadtxt(table, delimiter=",", skiprows=1, usecols=(0, 1))
    nats = fitted.estimator.log_density(data[:, :1], data[:, 1]).mean()
    assert str(shown).count(f"{nats:.8f}"[:9])
    assert run(["predict", str(model), str(table), "--quantiles", "0.05,0.95"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    lower = fitted.estimator.predict_interval(data[:, :1], 0.9)[0]
    np.testing.assert_allclose([float(list(row.values())[-2]) for row in rows], lower, rtol=1e-4)
    assert run(["report", str(model), "-o", str(model.with_suffix(".html"))]) == 0
    assert "average over 4 posteriors" in model.with_suffix(".html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hyper", "nuts"], "must be 'auto', 'point' or 'laplace'"),
        (["--hyper", "laplace", "--likelihood", "student-t"], "`--likelihood` must be 'gaussian'"),
        (["--hyper", "laplace", "-t", "c"], "must be 'auto' or 'point' for classification"),
    ],
)
def test_refused_options_leave_no_file(options, message, table: Path, tmp_path, capsys) -> None:
    path = tmp_path / "model.winnow"
    arguments = ["-t", "y"] if "-t" not in options else []
    assert run(["fit", str(table), *arguments, *options, "-o", str(path)]) != 0
    assert message in " ".join(capsys.readouterr().err.split())
    assert not path.exists()


def test_update_refuses_the_mixture(table: Path, model: Path, tmp_path, capsys) -> None:
    new, output = tmp_path / "new.csv", tmp_path / "new.winnow"
    new.write_text("\n".join(table.read_text(encoding="utf-8").split("\n")[:9]), encoding="utf-8")
    assert run(["update", str(model), str(new), "-o", str(output)]) != 0
    assert "`--hyper` must be 'point' or 'auto' to learn from further batches" in " ".join(
        capsys.readouterr().err.split()
    )
    assert not output.exists()
