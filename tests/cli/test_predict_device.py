"""`winnow predict --device`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import winnowgp
from helpers.short_fits import short_fits
from winnowgp.cli.app import run
from winnowgp.data import DataTable
from winnowgp.models import Posterior
from winnowgp.models.observations import Prediction
from winnowgp.tabular import TabularModel, fit_table

N = 40
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def table() -> DataTable:
    x = np.linspace(0, 6, N)
    label = np.where(np.cos(2 * x) > 0, "up", "down")
    return DataTable.of({"x": x, "y": np.sin(x), "label": label, "n": np.round(3 + 2 * np.sin(x))})


def fitted(target: str, **settings: Any) -> TabularModel:
    rows = table()
    others = [name for name in rows.names if name not in ("x", target)]
    return fit_table(rows.without(others), target, tolerance=0.3, test_size=0, **settings)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("device")
    rows = folder / "rows.csv"
    rows.write_text("x\n" + "\n".join(map(str, table().values["x"])) + "\n", encoding="utf-8")
    with short_fits():
        return fitted("y", hyper="point").save(folder / "y.winnow"), rows


def predicted(saved: tuple[Path, Path], *settings: str) -> int:
    return run(["predict", *map(str, saved), *settings])


def test_predict_device_has_points_and_rows(
    saved: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The meta device has shapes and no numbers, so that they are made up here."""
    devices = []

    def predict(self: Posterior, X: torch.Tensor, *, observed: bool = False) -> Prediction:
        # A file is tried out when it is loaded, on one row.
        if len(X) == N:
            devices.append((X.device.type, self.Z.device.type, self.weights.device.type))
        return Prediction(*(torch.full((len(X), 1), v).double() for v in (0.0, 4.0)))

    monkeypatch.setattr(Posterior, "predict", predict)
    assert predicted(saved, "--device", "meta") == 0
    assert predicted(saved) == 0
    # And a model that was asked once stays where it was.
    model = winnowgp.load(saved[0])
    for device in ("meta", "cpu"):
        next(model.predict_blocks([table()], device=device))
    assert devices == [("meta",) * 3, ("cpu",) * 3] * 2
    assert len(capsys.readouterr().out.splitlines()) == 2 * (N + 1)


def test_predict_device_auto_uses_what_is_available(
    saved: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    best = "cuda" if torch.cuda.is_available() else "cpu"
    printed = []
    for device in ("auto", best):
        assert predicted(saved, "--device", device) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]


def test_predict_missing_device_is_named(
    saved: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "out.csv"
    assert predicted(saved, "--device", "quantum", "-o", str(out)) == 2
    assert "`--device` must be a device of this machine" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_fit_and_predict_refuse_devices_alike(capsys: pytest.CaptureFixture[str]) -> None:
    lines = []
    for command in ("fit", "predict"):
        assert run([command, "--help"]) == 0
        output = " ".join(capsys.readouterr().out.replace("│", " ").split())
        lines.append(output.partition("--device")[2].partition("]")[0])
    assert lines[0] == lines[1]
    assert "cpu, cuda, or auto: a GPU if there is one." in lines[0]


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize(
    ("target", "settings"),
    [("y", {}), ("label", {}), ("n", {"task": "counts"})],
    ids=["regression", "classes", "counts"],
)
def test_predict_on_gpu_equals_cpu(device: str, target: str, settings: dict[str, Any]) -> None:
    model = fitted(target, **settings)
    here, there = (next(model.predict_blocks([table()], device=d)) for d in ("cpu", device))
    assert list(here) == list(there)
    for name, column in here.items():
        if column.dtype.kind == "f":
            np.testing.assert_allclose(there[name], column, rtol=1e-8, atol=1e-10)
        else:
            assert list(there[name]) == list(column)
