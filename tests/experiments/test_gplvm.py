import pytest
import torch

from winnowgp.experiments.gplvm import (
    SIDE,
    gplvm_picture,
    grid,
    neighbour_accuracy,
    run_gplvm,
)


def test_the_picture_shows_four_moments_of_the_training(paper_data, tmp_path) -> None:
    found = run_gplvm(epochs=5)
    assert len(found.frames) == 5
    assert found.fitted.candidates.shape == (SIDE**2, 2)
    assert torch.equal(found.fitted.candidates, grid())
    assert gplvm_picture(found, tmp_path / "gplvm.png").exists()


@pytest.mark.slow
def test_few_points_near_the_cloud_are_kept_and_stages_come_apart(paper_data) -> None:
    found = run_gplvm()
    latents, inclusion = found.fitted.model.latents.mean.detach(), found.fitted.selection.inclusion
    assert found.fitted.selection.M < SIDE**2 // 2
    distance = torch.cdist(grid(), latents).amin(1)
    assert distance[inclusion > 0.5].mean() < 0.5 * distance[inclusion < 0.5].mean()
    before = neighbour_accuracy(found.start, found.stages)
    assert neighbour_accuracy(latents, found.stages) > before + 0.2


def test_neighbours_of_the_same_stage_are_counted() -> None:
    X = torch.tensor([[0.0], [0.1], [5.0], [5.2], [0.25]])
    assert neighbour_accuracy(X, ("a", "a", "b", "b", "b")) == pytest.approx(0.8)
