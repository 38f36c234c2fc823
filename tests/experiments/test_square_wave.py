import torch

from winnowgp.experiments.runs import Runs
from winnowgp.experiments.square_wave import (
    KINDS,
    Steps,
    run_square_wave,
    square_wave,
    square_wave_picture,
)


def test_every_kind_adds_a_row_and_the_chosen_model_can_be_drawn(tmp_path) -> None:
    runs = Runs(tmp_path / "rows.jsonl")
    steps = Steps(layerwise=3, pre=4, process=2, post=4)
    found = run_square_wave(runs, seed=0, steps=steps)
    rows = {row["kind"]: row for row in runs}
    assert tuple(rows) == KINDS
    assert rows["random"]["sizes"] == rows["kmeans"]["sizes"] == rows["fast"]["sizes"]
    picture = square_wave_picture(found["fast"], square_wave(seed=0), tmp_path / "wave.png")
    assert picture.stat().st_size > 10_000


def test_the_wave_jumps_between_two_levels() -> None:
    data = square_wave(seed=0)
    assert (data.Y.abs() - 1).abs().max() < 0.3
    jumps = (data.Y[1:, 0].sign() != data.Y[:-1, 0].sign()).sum()
    assert jumps == 6
    assert torch.equal(square_wave(seed=0).Y, data.Y)
