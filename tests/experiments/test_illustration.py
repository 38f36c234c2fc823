import json
from pathlib import Path

import pytest
import torch

from winnowgp.experiments.base import Row, Scope
from winnowgp.experiments.illustration import (
    Illustration,
    InclusionSnapshot,
    Panels,
    draw_panels,
)
from winnowgp.plots import Curve


def test_draw_rows_read_from_json_gives_figure(tmp_path: Path) -> None:
    experiment, scope, rows = Illustration(), Scope(quick=True), []
    for settings in experiment.settings(scope, []):
        if settings["kind"] == "paper":
            settings = {**settings, "steps": {"pre": 5, "process": 8, "post": 5}}
        rows.append(json.loads(json.dumps({**settings, **experiment.run(settings, scope)})))
    assert rows[0]["midway"]["step"] == 2
    assert len(rows[1]["after"]["points"]) == rows[1]["points"] < 25
    assert experiment.draw(rows, tmp_path / "figure.png").stat().st_size > 10_000
    assert experiment.claims(rows)[2].startswith("agrees: a small set")


@pytest.mark.parametrize(
    ("rough", "selected", "word"), [(0.9, 20, "agrees"), (0.1, 30, "does not agree")]
)
def test_claims_judged_by_rows(rough: float, selected: int, word: str) -> None:
    both: Row = {"seed": 1, "candidates": 50, "points": selected, "bound": 88.0}
    midway = {"candidates": [1.0, 7.0], "inclusion": [0.5, rough]}
    paper: Row = {"kind": "paper", **both, "full_bound": 90.0, "midway": midway}
    lines = Illustration().claims([paper, {"kind": "fast", **both}])
    assert [line.split(":")[0] for line in lines] == [word] * 3


def test_draw_panels_shows_curves_inclusion_and_subsets() -> None:
    grid = torch.linspace(0, 1, 5)
    curve = Curve(grid, grid, 0.1 + 0 * grid, grid[:3], grid[:3])
    draws = torch.tensor([[True, False], [False, False], [True, True]])
    midway = InclusionSnapshot(7, grid[:2], torch.tensor([0.2, 0.9]), draws)
    left, top, bottom, right = draw_panels(Panels(grid, grid, curve, midway, curve)).axes
    assert left.get_title(loc="left") == "(a) all candidates"
    assert "after 7 steps" in top.get_title(loc="left")
    assert [t.get_text() for t in bottom.get_yticklabels()] == ["1 point", "0 points", "2 points"]
    legend = right.get_legend()
    assert legend is not None
    assert any("3 inducing points" in t.get_text() for t in legend.get_texts())
