import json
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from helpers.figures import scattered
from winnowgp.experiments.base import Row, Scope
from winnowgp.experiments.square_wave import SquareWave, draw_density, square_wave

FEW = {"layerwise": 3, "pre": 4, "process": 2, "post": 4}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Return a row of every kind after a few steps, as it is read from a file."""
    experiment, scope, made = SquareWave(), Scope(quick=True, seeds=1), []
    for _ in range(2):
        for settings in experiment.settings(scope, made)[len(made) :]:
            short = {**settings, "steps": FEW}
            made.append({**short, **experiment.run(short, scope)})
    return json.loads(json.dumps(made))


def test_run_baselines_have_sizes_of_the_fast_schedule(rows) -> None:
    by = {row["kind"]: row for row in rows}
    assert list(by) == ["paper", "fast", "random", "kmeans"]
    assert by["random"]["sizes"] == by["kmeans"]["sizes"] == by["fast"]["sizes"]
    assert all(torch.isfinite(torch.tensor(row["log_density"])) for row in rows)


def test_draw_rows_read_from_json_gives_figure(rows, tmp_path: Path) -> None:
    picture = SquareWave().draw(rows, tmp_path / "wave.png")
    assert picture.stat().st_size > 10_000
    assert len(json.dumps(rows, separators=(",", ":"))) < 80_000


def test_run_figure_columns_hold_layers_and_density(rows) -> None:
    fast = rows[1]
    assert [len(layer["points"]) for layer in fast["layers"]] == fast["sizes"]
    density = fast["density"]
    assert len(density["shades"]) == len(density["y"])
    assert max(map(max, density["shades"])) == 99
    assert all(low < high for low, high in zip(density["low"], density["high"], strict=True))


@pytest.mark.parametrize(
    ("sizes", "word"),
    [([[9, 5, 3], [8, 6, 2]], "agrees"), ([[9, 5, 5], [8, 4, 6]], "does not agree")],
)
def test_claims_fewer_points_in_deeper_layers_judged_by_rows(sizes, word: str) -> None:
    rows = [
        {"kind": kind, "seed": seed, "sizes": size, "log_density": 1.0}
        for kind in ("paper", "fast")
        for seed, size in enumerate(sizes)
    ]
    rows.append({"kind": "kmeans", "seed": 1, "log_density": 1.25})
    first, second, equal, density = SquareWave().claims(rows)
    assert first.startswith(word + ":")
    assert second.startswith(word + ":")
    statement = "beyond the paper: selected inducing points beat as many k-means"
    assert equal.startswith(f"does not agree: {statement}")
    assert "paper 1.00" in density


def test_settings_baselines_follow_the_fast_run_of_their_seed() -> None:
    experiment = SquareWave()
    first = experiment.settings(Scope(seeds=2), [])
    assert [(s["kind"], s["seed"]) for s in first] == [
        ("paper", 0),
        ("paper", 1),
        ("fast", 0),
        ("fast", 1),
    ]
    known = [{**first[3], "sizes": [3, 2, 1]}]
    later = [s for s in experiment.settings(Scope(seeds=2), known) if "alpha" not in s]
    assert [(s["kind"], s["seed"], s["sizes"]) for s in later] == [
        ("random", 1, [3, 2, 1]),
        ("kmeans", 1, [3, 2, 1]),
    ]


def test_square_wave_jumps_between_two_levels() -> None:
    data = square_wave(seed=0)
    assert (data.Y.abs() - 1).abs().max() < 0.3
    jumps = (data.Y[1:, 0].sign() != data.Y[:-1, 0].sign()).sum()
    assert jumps == 6
    assert torch.equal(square_wave(seed=0).Y, data.Y)


def test_settings_cheap_runs_have_more_seeds() -> None:
    kinds = [s["kind"] for s in SquareWave().settings(Scope(), [])]
    assert kinds.count("fast") > kinds.count("paper") > 1


def test_draw_density_shows_quantiles_and_data() -> None:
    density = {"x": [0.0, 0.5, 1.0], "y": [-1.0, 1.0], "shades": [[0, 9, 9], [9, 0, 0]]}
    density |= {"low": [-1.0, -0.5, 0.0], "high": [1.0, 1.5, 2.0]}
    ax = Figure().subplots()
    draw_density({"density": density, "x": [0.1, 0.2], "y": [3.0, 4.0], "log_density": 1.0}, ax=ax)
    assert [np.asarray(line.get_ydata()).tolist() for line in ax.lines] == [
        density["low"],
        density["high"],
    ]
    np.testing.assert_allclose(scattered(ax)[0], [[0.1, 3.0], [0.2, 4.0]])
