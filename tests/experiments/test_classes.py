from pathlib import Path

import pytest
import torch

from helpers.short_fits import short_fits
from winnowgp.experiments import classes
from winnowgp.experiments.classes import draw_classes, run_classes


def test_run_classes_selects_few_points_near_the_boundary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(classes, "SIDE", 7)
    monkeypatch.setattr(classes, "N", 120)
    with short_fits():
        result = run_classes(epochs=(20, 20, 20))
    assert list(result.maps) == ["fast", "paper"]
    fast = result.maps["fast"]
    assert len(fast.points) < 20
    assert len(result.maps["paper"].points) < 49
    # Distance to the nearest row of the other class: smaller for inducing points than for rows.
    other = [result.X[result.labels != label] for label in (0, 1)]
    nearest = torch.stack([torch.cdist(fast.points, rows).amin(1) for rows in other]).amax(0)
    rows = torch.stack([torch.cdist(result.X, rows).amin(1) for rows in other]).amax(0)
    assert nearest.mean() < rows.mean()
    assert draw_classes(result, tmp_path / "classes.png").exists()
