import json
from pathlib import Path

import pytest
import torch

from winnowgp.experiments.experiment import Scope
from winnowgp.experiments.gplvm import SIDE, Gplvm, grid, neighbour_accuracy, run_gplvm
from winnowgp.experiments.runs import Row


def test_the_figure_shows_four_moments_of_the_training(paper_data, tmp_path: Path) -> None:
    experiment, scope = Gplvm(), Scope(quick=True)
    settings = {**experiment.settings(scope, [])[0], "epochs": 5}
    row = json.loads(json.dumps({**settings, **experiment.measured(settings, scope)}))
    assert [moment["title"].split(":")[0] for moment in row["moments"]] == [
        "step 1",
        "step 1",
        "step 2",
        "step 5",
    ]
    assert len(row["stage"]) == len(row["moments"][0]["latents"]) == 437
    assert experiment.draw([row], tmp_path / "gplvm.png").stat().st_size > 10_000


@pytest.mark.slow
def test_few_points_near_the_cloud_are_kept_and_stages_come_apart(paper_data) -> None:
    found = run_gplvm()
    assert torch.equal(found.fitted.candidates, grid())
    latents, inclusion = found.fitted.model.latents.mean.detach(), found.fitted.selection.inclusion
    assert found.fitted.selection.M < SIDE**2 // 2
    distance = torch.cdist(grid(), latents).amin(1)
    assert distance[inclusion > 0.5].mean() < 0.5 * distance[inclusion < 0.5].mean()
    before = neighbour_accuracy(found.start, found.stages)
    assert neighbour_accuracy(latents, found.stages) > before + 0.2


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


def test_claims_are_judged_by_the_rows() -> None:
    good, bad = row("paper", [0.3, 0.9], [4, 0]), row("fast", [0.9, 0.3], [0, 7])
    *judged, quality = Gplvm().claims([good, bad])
    assert [line.split(":")[0] for line in judged] == ["agrees", "does not agree", "agrees"]
    (still,) = (line for line in Gplvm().claims([row("paper", [0.3, 0.9], [0, 4]), bad])[2:3])
    assert still.startswith("does not agree: as the cloud moves")
    assert "PCA 0.600" in quality


def test_neighbours_of_the_same_stage_are_counted() -> None:
    X = torch.tensor([[0.0], [0.1], [5.0], [5.2], [0.25]])
    assert neighbour_accuracy(X, ("a", "a", "b", "b", "b")) == pytest.approx(0.8)
