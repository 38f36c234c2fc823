import os
from pathlib import Path

import pytest

from winnowgp.experiments.experiment import Scope
from winnowgp.experiments.kin8nm_deep import Fold, Kin8nmDeep
from winnowgp.experiments.reproduce import asked
from winnowgp.experiments.runs import Row, Runs

RESULTS = Runs(Path(__file__).parents[2] / "docs" / "results" / "kin8nm-deep.jsonl")
FEW = {"layerwise": 1, "pre": 1, "process": 1, "post": 1, "share": 0.5, "rounds": 1}


def test_the_rows_of_the_documentation_are_found_again_by_their_settings() -> None:
    found = asked(Kin8nmDeep(), RESULTS, Scope())
    assert {s["kind"] for s in found.missing} <= {"fixed", "time"}
    kinds = [row["kind"] for row in found.rows]
    assert {kind: kinds.count(kind) for kind in ("paper", "fast", "weighed", "grid")} == {
        "paper": 20,
        "fast": 20,
        "weighed": 20,
        "grid": 80,
    }
    assert kinds.count("time") >= 50


def test_the_figure_and_the_claims_come_from_the_results_alone(tmp_path: Path) -> None:
    experiment, rows = Kin8nmDeep(), asked(Kin8nmDeep(), RESULTS, Scope()).rows
    assert experiment.draw(rows, tmp_path / "figure.png").stat().st_size > 10_000
    lines = experiment.claims(rows)
    assert "agrees: more points in the last layer, the fast schedule (in 19 of 20 runs)" in lines


@pytest.mark.parametrize(("hand", "word"), [(0.9, "agrees"), (1.1, "does not agree")])
def test_a_better_and_quicker_grid_point_puts_a_choice_off_the_frontier(
    hand: float, word: str
) -> None:
    rows: list[Row] = [
        {"kind": kind, "alpha": 1.0, "fold": 0, "sizes": [5, 5], "log_density": 1.0}
        for kind in ("fast", "paper")
    ]
    rows += [{"kind": "grid", "fold": 0, "sizes": [3, 4], "log_density": hand}]
    rows += [
        {"kind": "time", "sizes": sizes, "connected": connected, "predict_us": sum(sizes)}
        for sizes in ([5, 5], [3, 4])
        for connected in (False, True)
    ]
    lines = Kin8nmDeep().claims(rows)
    assert [line.split(":")[0] for line in lines[:2]] == [word] * 2


def test_controls_and_timings_wait_for_the_runs_whose_sizes_they_take() -> None:
    experiment, scope = Kin8nmDeep(), Scope(seeds=1)
    first = experiment.settings(scope, [])
    assert {s["kind"] for s in first} == {"paper", "fast", "weighed", "grid"}
    chosen = next(s for s in first if s["kind"] == "fast" and s["alpha"] == 1.0)
    later = experiment.settings(scope, [{**chosen, "sizes": [7, 9]}])
    fixed = [s for s in later if s["kind"] == "fixed"]
    assert [(s["start"], s["sizes"]) for s in fixed] == [("random", [7, 9]), ("kmeans", [7, 9])]
    timed = [s for s in later if s["kind"] == "time"]
    assert timed == [{"kind": "time", "sizes": [7, 9], "connected": False, "samples": 100}]


def test_there_are_five_folds_and_no_more() -> None:
    assert {s["fold"] for s in Kin8nmDeep().settings(Scope(seeds=9), [])} == {0, 1, 2, 3, 4}


def test_folds_share_no_row(paper_data) -> None:
    found = Fold.of(0, "cpu")
    assert found.train.N + found.test.N == 8192
    assert abs(found.train.Y.mean().item()) < 1e-12


@pytest.mark.skipif("WINNOWGP_DATA" not in os.environ, reason="needs kin8nm: set WINNOWGP_DATA")
@pytest.mark.parametrize("kind", ["paper", "fast", "weighed", "grid", "time"])
def test_every_kind_of_run_ends_with_finite_numbers(kind: str) -> None:
    experiment, scope = Kin8nmDeep(), Scope(quick=True)
    known: list[Row] = [{"kind": "fast", "fold": 0, "alpha": 5.0, "sizes": [4, 3]}]
    settings = next(s for s in experiment.settings(scope, known) if s["kind"] == kind)
    small = {**settings, "N": 60, "steps": FEW}
    if "candidates" in small:
        small["candidates"] = 12
    row = experiment.measured(small, scope)
    if kind == "time":
        assert row["predict_us"] > 0
        return
    assert row["log_density"] < 10
    assert row["rmse"] < 1
    assert ("sizes" in row) == (kind in ("paper", "fast", "weighed"))
