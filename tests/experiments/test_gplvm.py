import json
from pathlib import Path

import pytest
import torch

from winnowgp.experiments import gplvm
from winnowgp.experiments.base import Row, Scope
from winnowgp.experiments.gplvm import (
    SIDE,
    Gplvm,
    grid,
    neighbour_accuracy,
    paper_settings,
    run_gplvm,
)
from winnowgp.gradients import ScoreFunction
from winnowgp.point_processes import SquaredCardinality
from winnowgp.training import FastSchedule, PaperSchedule, fast_gplvm


def test_draw_shows_four_steps_of_the_training(paper_data, tmp_path: Path) -> None:
    experiment, scope = Gplvm(), Scope(quick=True)
    settings = {**experiment.settings(scope, [])[0], "epochs": 5}
    row = json.loads(json.dumps({**settings, **experiment.run(settings, scope)}))
    assert [moment["title"].split(":")[0] for moment in row["moments"]] == [
        "step 1",
        "step 1",
        "step 2",
        "step 5",
    ]
    assert len(row["stage"]) == len(row["moments"][0]["latents"]) == 437
    assert experiment.draw([row], tmp_path / "gplvm.png").stat().st_size > 10_000


@pytest.mark.slow
def test_run_gplvm_selects_few_points_and_separates_stages(paper_data) -> None:
    training = run_gplvm(paper_settings())
    assert torch.equal(training.fitted.candidates[0], grid())
    latents, inclusion = (
        training.fitted.model.latents.mean.detach(),
        training.fitted.selection.inclusion,
    )
    assert training.fitted.selection.M < SIDE**2 // 2
    distance = torch.cdist(grid(), latents).amin(1)
    assert distance[inclusion > 0.5].mean() < 0.5 * distance[inclusion < 0.5].mean()
    before = neighbour_accuracy(training.start, training.stages)
    assert neighbour_accuracy(latents, training.stages) > before + 0.2


def row(kind: str, distances: list[float], switched: list[int]) -> Row:
    return {
        "kind": kind,
        "seed": 0,
        "points": 20,
        "bound": -20000.0,
        "accuracy": 0.9,
        "start_accuracy": 0.6,
        "distances": [[None, 1.0], distances],
        "switched": [[9, 9], switched],
    }


def test_claims_judged_by_rows() -> None:
    good, bad = row("paper", [0.3, 0.9], [4, 0]), row("fast", [0.9, 0.3], [0, 7])
    *verdicts, quality = Gplvm().claims([good, bad])
    assert [line.split(":")[0] for line in verdicts] == ["agrees", "does not agree", "agrees"]
    (still,) = (line for line in Gplvm().claims([row("paper", [0.3, 0.9], [0, 4]), bad])[2:3])
    assert still.startswith("does not agree: further candidates become active")
    assert "PCA 0.600" in quality


def test_neighbour_accuracy_counts_equal_stages() -> None:
    X = torch.tensor([[0.0], [0.1], [5.0], [5.2], [0.25]])
    assert neighbour_accuracy(X, ("a", "a", "b", "b", "b")) == pytest.approx(0.8)


class Stopped(Exception):
    """Raised in place of training."""


@pytest.mark.parametrize("kind", ["paper", "fast"])
def test_run_gplvm_uses_every_setting_of_a_row(paper_data, monkeypatch, kind) -> None:
    seen = {}

    def fit(model, table, *, schedule, **others):
        seen.update(model=model, schedule=schedule)
        raise Stopped

    monkeypatch.setattr(gplvm, "fit", fit)
    settings = next(s for s in Gplvm().settings(Scope(), []) if s["kind"] == kind)
    start = {"start_variance": 1.5, "start_lengthscale": 0.7, "start_noise": 0.3}
    own = {
        "paper": {
            "epochs": 11,
            "learning_rate": 0.05,
            "process_learning_rate": 0.4,
            "subsets": 7,
            "start_inclusion": 0.25,
        },
        "fast": {"fresh": 33, "rounds": 5, "iterations": 17},
    }[kind]
    other = {**settings, "candidates": 16, "reach": 2.0, "alpha": 0.9, **start, **own}
    assert other.keys() == settings.keys()
    with pytest.raises(Stopped):
        run_gplvm(other)
    model, schedule = seen["model"], seen["schedule"]
    assert torch.equal(model.candidates, grid(4, 2.0))
    assert model.kernel.outputscale.item() == pytest.approx(1.5)
    assert model.kernel.base_kernel.lengthscale.detach() == pytest.approx(0.7)
    assert model.likelihood.noise.item() == pytest.approx(0.3)
    if kind == "fast":
        used = schedule.goal.alpha, schedule.n_candidates, schedule.rounds, schedule.iterations
        assert used == (0.9, 33, 5, 17)
    else:
        rates = schedule.learning_rate, schedule.inclusion_learning_rate
        assert (schedule.prior.alpha, schedule.joint, *rates) == (0.9, 11, 0.05, 0.4)
        assert (schedule.gradient.samples, schedule.initial_inclusion) == (7, 0.25)


def test_settings_equal_the_defaults_of_the_schedules() -> None:
    paper, fast = PaperSchedule(SquaredCardinality(1, 1.0)), FastSchedule()
    gradient = paper.gradient
    assert isinstance(gradient, ScoreFunction)
    assert {
        "learning_rate": paper.learning_rate,
        "process_learning_rate": paper.inclusion_learning_rate,
        "subsets": gradient.samples,
        "start_inclusion": paper.initial_inclusion,
    }.items() <= gplvm.PAPER.items()
    defaults = {"fresh": fast_gplvm.CANDIDATES, "iterations": fast_gplvm.ITERATIONS}
    defaults["rounds"] = fast.rounds
    assert defaults.items() <= gplvm.FAST.items()
