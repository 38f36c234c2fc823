import torch

from winnowgp.experiments.classes import classes_picture, run_classes


def test_both_schedules_keep_fewer_points_and_the_fast_one_near_the_boundary(tmp_path) -> None:
    found = run_classes(epochs=(20, 20, 20))
    assert list(found.maps) == ["fast", "paper"]
    fast = found.maps["fast"]
    assert len(fast.points) < 20
    assert len(found.maps["paper"].points) < 100
    # Distance to the nearest row of the other class: small for points, larger for rows at large.
    other = [found.X[found.labels != label] for label in (0, 1)]
    nearest = torch.stack([torch.cdist(fast.points, rows).amin(1) for rows in other]).amax(0)
    rows = torch.stack([torch.cdist(found.X, rows).amin(1) for rows in other]).amax(0)
    assert nearest.mean() < rows.mean()
    assert classes_picture(found, tmp_path / "classes.png").exists()
