import json
from pathlib import Path

import pytest

from winnowgp.experiments.base import Row, Scope
from winnowgp.experiments.illustration import Illustration


def test_both_procedures_are_drawn_from_rows_alone(tmp_path: Path) -> None:
    experiment, scope, rows = Illustration(), Scope(quick=True), []
    for settings in experiment.settings(scope, []):
        if settings["kind"] == "paper":
            settings = {**settings, "steps": {"pre": 5, "process": 8, "post": 5}}
        rows.append(json.loads(json.dumps({**settings, **experiment.measured(settings, scope)})))
    assert rows[0]["midway"]["step"] == 2
    assert len(rows[1]["after"]["points"]) == rows[1]["points"] < 25
    assert experiment.draw(rows, tmp_path / "figure.png").stat().st_size > 10_000
    assert experiment.claims(rows)[2].startswith("agrees: a small set")


@pytest.mark.parametrize(
    ("rough", "kept", "word"), [(0.9, 20, "agrees"), (0.1, 30, "does not agree")]
)
def test_claims_are_judged_by_the_rows(rough: float, kept: int, word: str) -> None:
    both: Row = {"seed": 1, "candidates": 50, "points": kept, "bound": 88.0}
    midway = {"candidates": [1.0, 7.0], "inclusion": [0.5, rough]}
    paper: Row = {"kind": "paper", **both, "full_bound": 90.0, "midway": midway}
    lines = Illustration().claims([paper, {"kind": "fast", **both}])
    assert [line.split(":")[0] for line in lines] == [word] * 3
