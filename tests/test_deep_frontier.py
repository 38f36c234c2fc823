"""The comparison of selected allocations with sizes set by hand: its rules, on made rows."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
deep: Any = import_module("deep")
frontier: Any = import_module("deep_frontier")
tables: Any = import_module("deep_frontier_tables")
sys.path.remove(str(BENCHMARKS))


def row(kind: str, seed: int, sizes: tuple[int, int], us: float, nats: float, **more: Any):
    quartiles = [us - 1, us, us + 1]
    times = {"us": us, "quartiles": quartiles, "elbo": nats - 1.5}
    return {"table": "kin8nm", "kind": kind, "seed": seed, "sizes": sizes, **times} | {
        "log_density": nats,
        **more,
    }


def cells(table: str) -> dict[str, list[str]]:
    """Return the cells of each line by its second cell and its first."""
    lines = [[c.strip() for c in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {f"{line[1]}: {line[0]}": line for line in lines}


def test_better_pairs_are_as_quick_and_better_by_the_margin() -> None:
    pairs = {"a": {"us": 10.0, "log_density": 1.0031}, "b": {"us": 10.1, "log_density": 2.0}}
    assert tables.better_pairs({"us": 10.0, "log_density": 1.0}, pairs) == ["a"]
    assert tables.better_pairs({"us": 10.0, "log_density": 1.0002}, pairs) == []
    assert tables.better_pairs({"us": 9.9, "log_density": 1.0}, pairs) == []


def test_frontier_table_judges_means_and_single_splits() -> None:
    rows = [row("by hand", seed, (10, 10), 5.0, nats) for seed, nats in ((3, 1.0), (4, 1.2))]
    # Only the first split, on which it is slower, or better by less than the margin.
    rows.append(row("by hand", 3, (20, 20), 40.0, 9.0))
    rows.append(row("by hand", 3, (8, 20), 5.0, 1.102))
    for seed, nats in ((3, 1.1), (4, 1.15)):
        rows.append(row("selected", seed, (9, 9), 6.0, nats, chosen=True))
        rows.append(row("selected", seed, (4, 4), 5.5, nats - 0.1, chosen=False))
        # Larger than the chosen one, and not a setting.
        rows.append(row("selected", seed, (50, 50), 50.0, 3.0, chosen=False))
    found = cells(tables.frontier_table(rows))
    result = found["selected, second smallest: **9, 9; 9, 9**"]
    assert result[2:4] == ["6 (5 to 7)", "1.125"]
    # The mean of the pair, 1.1, is lower; on the second split its 1.2 is higher than 1.15.
    assert result[-1] == "none; on 1 of 2 splits"
    beaten = found["selected, smallest: **4, 4; 4, 4**"][-1]
    assert beaten == "10, 10 · 8, 20; on 2 of 2 splits"
    assert "50, 50" not in tables.frontier_table(rows)


def test_settings_count_from_the_smallest_model_of_each_fit() -> None:
    rows = [row("selected", 3, (9, 9), 6.0, 1.1, chosen=True)]
    rows += [row("selected", seed, (5, 5), 5.0, 1.0, chosen=seed == 4) for seed in (3, 4)]
    rows += [row("selected", seed, (2, 2), 3.0, 0.9, chosen=False) for seed in (3, 4)]
    sizes = {
        name: [(r["seed"], r["sizes"]) for r in group]
        for name, group in tables.settings(rows).items()
    }
    assert sizes == {
        "selected, smallest": [(3, (2, 2)), (4, (2, 2))],
        "selected, second smallest": [(3, (5, 5)), (4, (5, 5))],
        "selected, third smallest": [(3, (9, 9))],
    }


def test_gain_table_pairs_models_of_the_same_sizes_and_split() -> None:
    rows = []
    for seed, gain in ((3, 0.02), (4, 0.04)):
        rows.append(row("selected", seed, (9, 9), 6.0, 1.1, chosen=True))
        rows.append(row("as many, random", seed, (9, 9), 6.0, 1.1 - gain, updates=3000))
    rows.append(row("as many, random", 5, (9, 9), 6.0, 0.0, updates=3000))
    (_, _, line) = tables.gain_table(rows).splitlines()
    assert line.startswith("| kin8nm | 3000 | as many, random | 2 | 9 + 9 | +0.0300 ± 0.0100 |")
    assert line.endswith("| 2 of 2 |")


def test_gain_table_compares_models_within_a_limit_with_each_other() -> None:
    rows = [row("selected", 3, (9, 9), 6.0, 5.0, chosen=True, updates=3000)]
    rows.append(row("within 162", 3, (9, 9), 6.0, 1.2, updates=4500))
    rows.append(row("as many within 162, kmeans", 3, (9, 9), 6.0, 1.1, updates=4500))
    (_, _, line) = tables.gain_table(rows).splitlines()
    assert "| as many within 162, kmeans | 1 | 9 + 9 | +0.1000 (one split) |" in line


def test_page_table_has_paired_differences_of_common_splits() -> None:
    def fit(name: str, seed: int, nats: float, points: list[int]) -> dict[str, Any]:
        identity = {"table": "energy", "fit": name, "seed": seed, "rows": None, "quick": False}
        return {**identity, "device": "cpu", "log_density": nats, "n_inducing": points}

    rows = [fit("two", 3, -0.5, [1, 40]), fit("two", 4, -0.3, [21, 60]), fit("two", 5, 9.0, [2, 5])]
    rows += [fit("shallow", 3, -0.6, [50]), fit("shallow", 4, -0.6, [50])]
    rows.append({**rows[0], "device": "cuda", "log_density": -0.2})
    (_, _, line, on_gpu) = deep.page_table(rows).splitlines()
    assert "| CPU | 3, 4, 5 | 8, 35 | 1 of 3 |" in line
    assert "| -0.600 | +0.200 ± 0.100 (2 splits) |" in line
    assert "| GPU | 3 | 1, 40 | 1 of 1 | -0.200" in on_gpu


def test_stored_rows_are_those_of_the_summary() -> None:
    rows = frontier.models()
    assert {r["kind"] for r in rows if r["table"] == "kin8nm"} >= {"selected", "by hand"}
    keys = [(r["table"], r["kind"], r["seed"], r["sizes"], r.get("updates")) for r in rows]
    assert len(set(keys)) == len(keys)
    assert all(r["sizes"] in frontier.GRID for r in rows if r["kind"] == "by hand")
