import os
from pathlib import Path
from statistics import fmean

import pytest
import torch

from winnowgp.experiments import kin8nm_deep as predict_cost
from winnowgp.experiments.base import Row, Runs, Scope
from winnowgp.experiments.fixed_points import equal_size_claims
from winnowgp.experiments.kin8nm_deep import Fold, Kin8nmDeep, deep_predict_us
from winnowgp.experiments.runner import asked, make_runs

RESULTS = Runs(Path(__file__).parents[2] / "docs" / "results" / "kin8nm-deep.jsonl")
FEW = {"layerwise": 1, "pre": 1, "process": 1, "post": 1, "share": 0.5, "rounds": 1}


def test_the_rows_of_the_documentation_are_found_again_by_their_settings() -> None:
    found = asked(Kin8nmDeep(), RESULTS, Scope())
    assert not found.missing
    kinds = [row["kind"] for row in found.rows]
    assert {kind: kinds.count(kind) for kind in ("paper", "fast", "weighed")} == {
        "paper": 20,
        "fast": 20,
        "weighed": 20,
    }
    assert kinds.count("grid") == 100
    assert kinds.count("time") >= 50


def test_the_grid_is_sixteen_pairs_and_four_that_are_cheap_within_a_hundred_runs() -> None:
    grid = [s for s in Kin8nmDeep().settings(Scope(), []) if s["kind"] == "grid"]
    assert len(grid) == 100
    pairs = {tuple(s["sizes"]) for s in grid}
    assert len(pairs) == 20
    square = {(a, b) for a in (10, 40, 70, 100) for b in (10, 40, 70, 100)}
    assert pairs - square == {(70, 20), (70, 30), (100, 20), (100, 30)}


def test_the_figure_and_the_claims_come_from_the_results_alone(tmp_path: Path) -> None:
    experiment, rows = Kin8nmDeep(), asked(Kin8nmDeep(), RESULTS, Scope()).rows
    assert experiment.draw(rows, tmp_path / "figure.png").stat().st_size > 10_000
    lines = experiment.claims(rows)
    assert "agrees: more points in the last layer, the fast schedule (in 18 of 20 runs)" in lines


@pytest.mark.parametrize(("hand", "word"), [(0.9, "agrees"), (1.1, "does not agree")])
def test_a_better_and_quicker_grid_point_puts_a_choice_off_the_frontier(
    hand: float, word: str
) -> None:
    own = {"fold": 0, "sizes": [5, 5], "log_density": 1.0, "alpha": 1.0}
    rows: list[Row] = [
        {"kind": "fast", "connected": False, **own},
        {"kind": "paper", "connected": True, **own},
        {"kind": "grid", "connected": False, "fold": 0, "sizes": [3, 4], "log_density": hand},
    ]
    rows += [
        {"kind": "time", "sizes": sizes, "connected": skip_connections, "predict_us": sum(sizes)}
        for sizes in ([5, 5], [3, 4])
        for skip_connections in (False, True)
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
    how = {"connected": False, "samples": 100, "best_of": 25}
    assert timed == [{"kind": "time", "sizes": (7, 9), **how}]


def test_times_are_measured_after_the_runs_that_share_the_machine(monkeypatch, tmp_path) -> None:
    made: list[str] = []

    def measured(self, settings: Row, scope: Scope) -> Row:
        made.append(settings["kind"])
        if settings["kind"] == "time":
            return {"predict_us": 1.0}
        return {"log_density": 1.0} | ({"sizes": [4, 3]} if "candidates" in settings else {})

    monkeypatch.setattr(Kin8nmDeep, "measured", measured)
    runs, scope = Runs(tmp_path / "rows.jsonl"), Scope(quick=True)
    make_runs(Kin8nmDeep(), runs, scope)
    first = made.index("time")
    assert set(made[:first]) == {"paper", "fast", "weighed", "grid", "fixed"}
    assert set(made[first:]) == {"time"}

    # A time that is missing is measured again, and nothing is trained for it.
    lines = runs.path.read_text(encoding="utf-8").splitlines()
    lost = next(line for line in lines if '"kind":"time"' in line)
    runs.path.write_text("\n".join(line for line in lines if line != lost), encoding="utf-8")
    made.clear()
    make_runs(Kin8nmDeep(), runs, scope)
    assert made == ["time"]


def test_the_cost_of_a_prediction_is_the_least_of_all_but_the_first(monkeypatch) -> None:
    seconds = iter([0.0, 5.0, 10.0, 11.0, 20.0, 22.0])
    monkeypatch.setattr(predict_cost, "process_time", lambda: next(seconds))
    threads = torch.get_num_threads()
    us = deep_predict_us([3, 2], skip_connections=False, samples=2, best_of=3)
    # Five, one and two seconds for 500 rows.
    assert us == pytest.approx(1e6 / 500)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("theirs", "word", "error"),
    [
        ([0.9, 0.7, 0.9, 0.7], "agrees", 0.0577),
        # A mean gain that one fold alone makes.
        ([0.6, 1.0, 1.0, 1.0], "does not agree", 0.1),
        ([1.1, 1.3, 1.1, 1.3], "does not agree", 0.0577),
    ],
)
def test_chosen_points_must_gain_more_than_chance_on_the_same_folds(
    theirs: list[float], word: str, error: float
) -> None:
    chosen = {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0, 4: 99.0}
    found = {"random": dict(enumerate(theirs)), "kmeans": {}}
    (line,) = equal_size_claims(chosen, found, each="fold")
    assert line.startswith(f"{word}: beyond the paper: chosen points beat as many random rows")
    assert f"1.000 against {fmean(theirs):.3f} nats" in line
    assert f"higher on {sum(each < 1 for each in theirs)} of 4 folds" in line
    assert f"gain {1 - fmean(theirs):+.4f} with a standard error of {error:.4f}" in line


def test_one_fold_is_never_clear_of_chance() -> None:
    (line,) = equal_size_claims({0: 5.0}, {"random": {0: 1.0}}, each="fold")
    assert line.startswith("does not agree")
    assert "higher on 1 of 1 fold; gain +4.0000 with a standard error of inf" in line


def test_there_are_five_folds_and_no_more() -> None:
    assert {s["fold"] for s in Kin8nmDeep().settings(Scope(seeds=9), [])} == {0, 1, 2, 3, 4}


def test_folds_share_no_row(paper_data) -> None:
    found = Fold.of(0, "cpu")
    assert found.train.N + found.test.N == 8192
    assert abs(found.train.Y.mean().item()) < 1e-12


@pytest.mark.skipif("WINNOWGP_DATA" not in os.environ, reason="needs kin8nm: set WINNOWGP_DATA")
@pytest.mark.parametrize("kind", ["paper", "fast", "weighed", "grid", "fixed", "time"])
def test_every_kind_of_run_ends_with_finite_numbers(kind: str) -> None:
    experiment, scope = Kin8nmDeep(), Scope(quick=True)
    known: list[Row] = [
        {"kind": "fast", "fold": 0, "alpha": 1.0, "sizes": [4, 3], "connected": False}
    ]
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
