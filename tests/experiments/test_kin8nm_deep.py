import os
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from helpers.figures import scattered
from winnowgp.experiments import kin8nm_deep
from winnowgp.experiments.base import Row, Scope
from winnowgp.experiments.deep import TradeoffGroup, draw_tradeoff, tradeoff_groups
from winnowgp.experiments.kin8nm_deep import Fold, Kin8nmDeep, deep_predict_us
from winnowgp.experiments.runner import make_runs
from winnowgp.experiments.runs import Runs

FEW = {"layerwise": 1, "pre": 1, "process": 1, "post": 1, "share": 0.5, "rounds": 1}


def rows_of_folds(*log_densities: float) -> list[Row]:
    """Return rows of every kind, with one fold for each log density."""
    shared = [{"fold": fold, "log_density": nats} for fold, nats in enumerate(log_densities)]
    rows: list[Row] = []
    for own in shared:
        rows += [
            {"kind": "paper", "alpha": 2.0, "sizes": [9, 4], "connected": True, **own},
            {"kind": "fast", "alpha": 1.0, "sizes": [5, 6], "connected": False, **own},
            {"kind": "weighed", "alpha": 1.0, "sizes": [7, 3], "connected": False, **own},
            {"kind": "grid", "sizes": [8, 8], "connected": False, **own},
            {"kind": "fixed", "start": "random", "sizes": [5, 6], "connected": False, **own},
        ]
    timed = {(tuple(row["sizes"]), row["connected"]) for row in rows}
    return rows + [
        {
            "kind": "time",
            "sizes": list(sizes),
            "connected": skip_connections,
            "predict_us": sum(sizes),
        }
        for sizes, skip_connections in timed
    ]


def test_groups_several_folds_gives_mean_accuracy_and_time() -> None:
    rows = rows_of_folds(1.0, 1.5)
    by_kind = {group.kind: group for group in tradeoff_groups(rows)}
    assert list(by_kind) == ["weighed", "fast", "paper", "grid"]
    fast = by_kind["fast"]
    assert (fast.label, fast.sizes) == ("α = 1", [[5, 6], [5, 6]])
    assert (fast.cost, fast.accuracy) == (11, 1.25)
    assert by_kind["grid"].label == "[8, 8]"
    untimed = [row for row in rows if row["kind"] != "time"]
    assert tradeoff_groups(untimed) == []


def test_settings_grid_has_twenty_pairs_on_five_folds() -> None:
    grid = [s for s in Kin8nmDeep().settings(Scope(), []) if s["kind"] == "grid"]
    assert len(grid) == 100
    pairs = {tuple(s["sizes"]) for s in grid}
    assert len(pairs) == 20
    square = {(a, b) for a in (10, 40, 70, 100) for b in (10, 40, 70, 100)}
    assert pairs - square == {(70, 20), (70, 30), (100, 20), (100, 30)}


def test_draw_rows_of_every_kind_gives_figure_and_claims(tmp_path: Path) -> None:
    experiment, rows = Kin8nmDeep(), rows_of_folds(1.0, 1.5)
    assert experiment.draw(rows, tmp_path / "figure.png").stat().st_size > 10_000
    lines = experiment.claims(rows)
    more = "more inducing points in the last layer"
    paper, fast = (line for line in lines if more in line)
    assert paper.startswith(f"does not agree: {more}, the paper's procedure (in 0 of 2 runs; ")
    assert fast.startswith(f"agrees: {more}, the fast schedule (in 2 of 2 runs; ")
    assert len(lines) == 3 + 2 + 1


def test_draw_tradeoff_shows_grid_and_each_procedure() -> None:
    grid = [
        TradeoffGroup("grid", "", [[1, 1]], cost=cost, accuracy=nats)
        for cost, nats in ((1.0, 0.1), (2.0, 0.2))
    ]
    selected = TradeoffGroup("fast", "α = 1", [[7, 9], [7, 9]], cost=1.5, accuracy=0.3)
    ax = Figure().subplots()
    draw_tradeoff([*grid, selected], ax=ax)
    np.testing.assert_allclose(scattered(ax)[0], [[1.0, 0.1], [2.0, 0.2]])
    assert np.asarray(ax.lines[0].get_xydata()).tolist() == [[1.5, 0.3]]
    assert [t.get_text() for t in ax.texts] == ["7, 9"]


@pytest.mark.parametrize(("density", "word"), [(0.9, "agrees"), (1.1, "does not agree")])
def test_claims_better_and_faster_grid_pair_disagrees(density: float, word: str) -> None:
    own = {"fold": 0, "sizes": [5, 5], "log_density": 1.0, "alpha": 1.0}
    rows: list[Row] = [
        {"kind": "fast", "connected": False, **own},
        {"kind": "paper", "connected": True, **own},
        {"kind": "grid", "connected": False, "fold": 0, "sizes": [3, 4], "log_density": density},
    ]
    rows += [
        {"kind": "time", "sizes": sizes, "connected": skip_connections, "predict_us": sum(sizes)}
        for sizes in ([5, 5], [3, 4])
        for skip_connections in (False, True)
    ]
    lines = Kin8nmDeep().claims(rows)
    assert [line.split(":")[0] for line in lines[:2]] == [word] * 2


def test_settings_baselines_and_timings_follow_selected_sizes() -> None:
    experiment, scope = Kin8nmDeep(), Scope(seeds=1)
    first = experiment.settings(scope, [])
    assert {s["kind"] for s in first} == {"paper", "fast", "weighed", "grid"}
    selected = next(s for s in first if s["kind"] == "fast" and s["alpha"] == 1.0)
    later = experiment.settings(scope, [{**selected, "sizes": [7, 9]}])
    fixed = [s for s in later if s["kind"] == "fixed"]
    assert [(s["start"], s["sizes"]) for s in fixed] == [("random", [7, 9]), ("kmeans", [7, 9])]
    timed = [s for s in later if s["kind"] == "time"]
    repeats = {"connected": False, "samples": 100, "best_of": 25}
    assert timed == [{"kind": "time", "sizes": (7, 9), **repeats}]


def test_make_runs_timings_come_last_and_alone(monkeypatch, tmp_path) -> None:
    made: list[str] = []

    def run(self, settings: Row, scope: Scope) -> Row:
        made.append(settings["kind"])
        if settings["kind"] == "time":
            return {"predict_us": 1.0}
        return {"log_density": 1.0} | ({"sizes": [4, 3]} if "candidates" in settings else {})

    monkeypatch.setattr(Kin8nmDeep, "run", run)
    runs, scope = Runs(tmp_path / "rows.jsonl"), Scope(quick=True)
    make_runs(Kin8nmDeep(), runs, scope)
    first = made.index("time")
    assert set(made[:first]) == {"paper", "fast", "weighed", "grid", "fixed"}
    assert set(made[first:]) == {"time"}

    # A missing timing is measured again without any training.
    lines = runs.path.read_text(encoding="utf-8").splitlines()
    timing = next(line for line in lines if '"kind":"time"' in line)
    runs.path.write_text("\n".join(line for line in lines if line != timing), encoding="utf-8")
    made.clear()
    make_runs(Kin8nmDeep(), runs, scope)
    assert made == ["time"]


def test_deep_predict_us_returns_shortest_timing(monkeypatch) -> None:
    seconds = iter([0.0, 5.0, 10.0, 11.0, 20.0, 22.0])
    monkeypatch.setattr(kin8nm_deep, "process_time", lambda: next(seconds))
    threads = torch.get_num_threads()
    us = deep_predict_us([3, 2], skip_connections=False, samples=2, best_of=3)
    # Five, one and two seconds for 500 rows.
    assert us == pytest.approx(1e6 / 500)
    assert torch.get_num_threads() == threads


def test_settings_more_seeds_than_folds_uses_all_folds() -> None:
    assert {s["fold"] for s in Kin8nmDeep().settings(Scope(seeds=9), [])} == {0, 1, 2, 3, 4}


def test_fold_of_splits_and_standardises_all_rows(paper_data) -> None:
    fold = Fold.of(0, "cpu")
    assert fold.train.N + fold.test.N == 8192
    assert abs(fold.train.Y.mean().item()) < 1e-12


@pytest.mark.skipif("WINNOWGP_DATA" not in os.environ, reason="needs kin8nm: set WINNOWGP_DATA")
@pytest.mark.parametrize("kind", ["paper", "fast", "weighed", "grid", "fixed", "time"])
def test_run_every_kind_gives_plausible_scores(kind: str) -> None:
    experiment, scope = Kin8nmDeep(), Scope(quick=True)
    known: list[Row] = [
        {"kind": "fast", "fold": 0, "alpha": 1.0, "sizes": [4, 3], "connected": False}
    ]
    settings = next(s for s in experiment.settings(scope, known) if s["kind"] == kind)
    small = {**settings, "N": 60, "steps": FEW}
    if "candidates" in small:
        small["candidates"] = 12
    row = experiment.run(small, scope)
    if kind == "time":
        assert row["predict_us"] > 0
        return
    assert row["log_density"] < 10
    assert row["rmse"] < 1
    assert ("sizes" in row) == (kind in ("paper", "fast", "weighed"))
