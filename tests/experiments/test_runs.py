import json

from winnowgp.experiments.base import Runs


def test_rows_come_back_in_order_and_carry_versions(tmp_path) -> None:
    runs = Runs(tmp_path / "deep" / "rows.jsonl")
    assert list(runs) == []
    runs.add({"kind": "fast", "fold": 0})
    runs.add({"kind": "fast", "fold": 1})
    again = Runs(runs.path)
    assert [row["fold"] for row in again] == [0, 1]
    assert "torch" in next(iter(again))["versions"]


def test_a_line_cut_short_by_a_kill_loses_only_itself(tmp_path) -> None:
    runs = Runs(tmp_path / "rows.jsonl")
    runs.add({"fold": 0})
    with runs.path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"fold": 1})[:-4])
    assert [row["fold"] for row in runs] == [0]
    runs.add({"fold": 2})
    assert [row["fold"] for row in runs] == [0, 2]
