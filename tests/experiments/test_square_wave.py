import json
from pathlib import Path

import pytest
import torch

from winnowgp.experiments.base import Row, Scope
from winnowgp.experiments.square_wave import SquareWave, square_wave

FEW = {"layerwise": 3, "pre": 4, "process": 2, "post": 4}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Every kind of one seed, after a few steps each, as a file would give them back."""
    experiment, scope, made = SquareWave(), Scope(quick=True, seeds=1), []
    for _ in range(2):
        for settings in experiment.settings(scope, made)[len(made) :]:
            short = {**settings, "steps": FEW}
            made.append({**short, **experiment.measured(short, scope)})
    return json.loads(json.dumps(made))


def test_the_controls_have_the_sizes_that_the_fast_schedule_kept(rows) -> None:
    by = {row["kind"]: row for row in rows}
    assert list(by) == ["paper", "fast", "random", "kmeans"]
    assert by["random"]["sizes"] == by["kmeans"]["sizes"] == by["fast"]["sizes"]
    assert all(torch.isfinite(torch.tensor(row["log_density"])) for row in rows)


def test_the_figure_comes_from_rows_alone_which_are_small(rows, tmp_path: Path) -> None:
    picture = SquareWave().draw(rows, tmp_path / "wave.png")
    assert picture.stat().st_size > 10_000
    assert len(json.dumps(rows, separators=(",", ":"))) < 80_000


def test_layers_and_density_of_a_row_are_those_of_the_wave(rows) -> None:
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
def test_fewer_points_in_deeper_layers_is_judged_by_the_rows(sizes, word: str) -> None:
    rows = [
        {"kind": kind, "seed": seed, "sizes": size, "log_density": 1.0}
        for kind in ("paper", "fast")
        for seed, size in enumerate(sizes)
    ]
    rows.append({"kind": "kmeans", "seed": 1, "log_density": 1.25})
    first, second, equal, density = SquareWave().claims(rows)
    assert first.startswith(word + ":")
    assert second.startswith(word + ":")
    assert equal.startswith("does not agree: beyond the paper: chosen points beat as many k-means")
    assert "paper 1.00" in density


def test_controls_of_every_seed_wait_for_its_fast_run() -> None:
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


def test_the_wave_jumps_between_two_levels() -> None:
    data = square_wave(seed=0)
    assert (data.Y.abs() - 1).abs().max() < 0.3
    jumps = (data.Y[1:, 0].sign() != data.Y[:-1, 0].sign()).sum()
    assert jumps == 6
    assert torch.equal(square_wave(seed=0).Y, data.Y)


def test_what_is_cheap_is_run_more_often() -> None:
    kinds = [s["kind"] for s in SquareWave().settings(Scope(), [])]
    assert kinds.count("fast") > kinds.count("paper") > 1
