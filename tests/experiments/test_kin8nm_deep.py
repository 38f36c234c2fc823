from pathlib import Path

import pytest

from winnowgp.data import load_table
from winnowgp.errors import DataNotFoundError
from winnowgp.experiments import kin8nm_deep
from winnowgp.experiments.kin8nm_deep import Fold, Kin8nmDeep, Steps
from winnowgp.experiments.kin8nm_deep_picture import kin8nm_picture, measure_times
from winnowgp.experiments.runs import Runs

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def fold() -> Fold:
    try:
        load_table("kin8nm")
    except DataNotFoundError as error:
        pytest.skip(str(error))
    return Fold.of(0, "cpu")


@pytest.mark.slow
def test_all_kinds_run_once_and_are_not_run_again(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(kin8nm_deep, "CANDIDATES", 12)
    monkeypatch.setattr(kin8nm_deep, "GRID", (3, 5))
    runs = Runs(tmp_path / "rows.jsonl")
    steps = Steps(layerwise=1, pre=1, process=1, post=1, rounds=1)
    part = Kin8nmDeep(runs, fold(), steps=steps, alphas=(1.0, 5.0))
    for _ in range(2):
        part.paper()
        part.fast()
        part.fixed()
        part.grid()
    kinds = [row["kind"] for row in runs]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "paper": 2,
        "fast": 2,
        "fixed": 2,
        "grid": 4,
    }


def test_controls_without_a_choice_to_copy_say_what_to_do(tmp_path) -> None:
    part = Kin8nmDeep(Runs(tmp_path / "rows.jsonl"), fold(), steps=Steps())
    with pytest.raises(ValueError, match="run the kind `fast` first"):
        part.fixed()


def test_folds_share_no_row() -> None:
    found = fold()
    assert found.train.N + found.test.N == 8192
    assert abs(found.train.Y.mean().item()) < 1e-12


def test_the_figure_comes_from_the_results_alone(tmp_path) -> None:
    results, times = Runs(RESULTS / "kin8nm-deep.jsonl"), Runs(RESULTS / "kin8nm-deep-times.jsonl")
    before = times.path.read_bytes()
    measure_times(results, times)  # all are there already
    assert times.path.read_bytes() == before
    assert kin8nm_picture(results, times, tmp_path / "figure.png").stat().st_size > 10_000
