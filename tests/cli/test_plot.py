"""`winnow plot`: every kind of plot for every task."""

from pathlib import Path

import numpy as np
import pytest

import winnowgp
from winnowgp.cli.app import run


@pytest.mark.parametrize(
    "what", ["effects", "importance", "frontier", "inclusion", "trace", "calibration"]
)
@pytest.mark.parametrize("target", ["y", "up", "visits"])
def test_plot_draws_every_kind_for_every_task(
    what: str, target: str, models: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "a.svg"
    assert run(["plot", str(models[target]), "--what", what, "-o", str(out), "-q"]) == 0
    assert b"<svg" in out.read_bytes()[:1000]


@pytest.fixture(scope="module")
def hills(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of two numeric inputs, a height, and a side."""
    rng = np.random.default_rng(1)
    x, z = rng.uniform(0, 6, (2, 60))
    height = np.sin(x) + 0.3 * z + 0.3 * rng.normal(size=60)
    side = np.where(height > 1, "over", "under")
    path = tmp_path_factory.mktemp("hills") / "hills.csv"
    rows = [f"{a},{b},{h},{s}" for a, b, h, s in zip(x, z, height, side, strict=True)]
    path.write_text("\n".join(["x,$z$,height,side", *rows]))
    return path


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize(("target", "drop"), [("height", "side"), ("side", "height")])
def test_plot_surface_over_two_numeric_inputs(
    target: str, drop: str, hills: Path, tmp_path: Path
) -> None:
    model = tmp_path / "m.winnow"
    arguments = ["fit", str(hills), "-t", target, "--drop", drop, "--tolerance", "1", "-q"]
    assert run([*arguments, "--kernel", "rbf", "-o", str(model)]) == 0
    plot = ["plot", str(model), "--what", "surface", "-q", "-o"]
    sizes = []
    for data in ([], ["--data", str(hills)]):
        out = tmp_path / f"{len(sizes)}.svg"
        assert run([*plot, str(out), *data]) == 0
        sizes.append(out.read_text(encoding="utf-8").count("<use"))
    # Sixty rows more, drawn one by one; the colour bar may have fewer ticks.
    assert sizes[1] - sizes[0] > 45


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--what surface", "two numeric inputs; this model has 'x' (number), 'town' (categorical)"),
        ("--what effects --data a.csv", "`--data` is for `--what surface`"),
    ],
)
def test_plot_surface_without_two_numbers_is_refused(
    arguments: str,
    message: str,
    models: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = str(tmp_path / "a.png")
    assert run(["plot", str(models["y"]), *arguments.split(), "-o", out]) == 2
    assert message in capsys.readouterr().err


def test_training_history_ends_with_the_selected_model(models: dict[str, Path]) -> None:
    model = winnowgp.load(models["y"])
    last = model.summary["training"]["moments"][-1]
    assert len(model.estimator.available_sizes_) > 1  # smaller models were trained after it
    assert len(last["x"]) == model.estimator.n_inducing_
