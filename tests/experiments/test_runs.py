import json

from winnowgp.experiments.runs import Runs


def test_runs_rows_are_read_in_order_with_versions(tmp_path) -> None:
    runs = Runs(tmp_path / "deep" / "rows.jsonl")
    assert list(runs) == []
    runs.add({"kind": "fast", "fold": 0})
    runs.add({"kind": "fast", "fold": 1})
    again = Runs(runs.path)
    assert [row["fold"] for row in again] == [0, 1]
    assert "torch" in next(iter(again))["versions"]


def test_runs_truncated_line_loses_only_itself(tmp_path) -> None:
    runs = Runs(tmp_path / "rows.jsonl")
    runs.add({"fold": 0})
    with runs.path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"fold": 1})[:-4])
    assert [row["fold"] for row in runs] == [0]
    runs.add({"fold": 2})
    assert [row["fold"] for row in runs] == [0, 2]


def test_runs_replace_starts_the_file_anew_with_the_first_row(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    Runs(path).add({"fold": 0})
    runs = Runs(path, replace=True)
    assert [row["fold"] for row in runs] == [0]
    runs.add({"fold": 1})
    assert runs.add({"fold": 2})["fold"] == 2
    assert [row["fold"] for row in runs] == [1, 2]
