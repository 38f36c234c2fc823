from typing import Any

import pytest
import torch

from winnowgp.data.catalogue import load_table
from winnowgp.experiments.base import Scope
from winnowgp.experiments.real import TABLES, Real, corrupted
from winnowgp.experiments.runner import make_runs
from winnowgp.experiments.runs import Runs


def test_settings_equal_the_papers() -> None:
    settings = Real().settings(Scope(), [])
    paper = {row["data"]: row for row in settings if row["kind"] == "paper"}
    assert {name: row["alpha"] for name, row in paper.items()} == {
        "concrete": 0.01,
        "energy": 0.05,
        "kin8nm": 0.1,
        "protein": 0.2,
    }
    assert all(r["steps"] == {"pre": 2500, "process": 1500, "post": 1000} for r in paper.values())
    assert {row["candidates"] for row in settings if "candidates" in row} == {100}
    assert {row["updates"] for row in settings if row["kind"] == "fixed"} == {5000}
    noises = {name: sorted({r["noise"] for r in settings if r["data"] == name}) for name in TABLES}
    assert noises["concrete"] == noises["kin8nm"] == [0, 0.2, 0.3, 0.4]
    assert noises["energy"] == [0, 0.05, 0.1, 0.15]
    assert noises["protein"] == [0, 0.3, 0.5, 0.7]
    sizes = {r["sizes"][0] for r in settings if r["kind"] == "fixed" and r["data"] == "concrete"}
    assert sizes == set(range(10, 101, 10))


def test_settings_quick_scope_is_smaller_and_disjoint() -> None:
    quick, full = (Real().settings(Scope(quick=quick, seeds=1), []) for quick in (True, False))
    assert len(quick) < len(full) / 2
    assert max(row["N"] for row in quick) < min(row["N"] for row in full)
    assert not any(row in full for row in quick)


def test_settings_follow_names_sizes_and_draws() -> None:
    settings = Real(names=("concrete",)).settings(Scope(seeds=2), [])
    assert {row["data"] for row in settings} == {"concrete"}
    assert {row["seed"] for row in settings} == {0, 1}
    thin = Real(names=("concrete",), sizes=(30, 60), draws=1).settings(Scope(seeds=2), [])
    assert {row["sizes"][0] for row in thin if row["kind"] == "fixed"} == {30, 60}
    assert {row["draws"] for row in thin if row["kind"] == "paper"} == {1}


def test_corrupted_noise_is_in_standard_deviations(paper_data) -> None:
    table = load_table("concrete").dataset()
    clean, noisy = (corrupted("concrete", v, rows=1030, seed=5) for v in (0.0, 0.4))
    assert torch.equal(clean.Y.sort(0).values, table.Y.sort(0).values)
    assert torch.equal(clean.X, noisy.X)
    # The standard deviation of 1030 draws is known to 2 %.
    share = (noisy.Y - clean.Y).std() / table.Y.std()
    assert share.item() == pytest.approx(0.4, rel=0.1)


@pytest.mark.parametrize("name", TABLES)
def test_tables_number_of_rows_equals_the_data(paper_data, name: str) -> None:
    assert load_table(name).values.shape[0] == TABLES[name].N


@pytest.mark.usefixtures("quickly")
def test_run_every_kind_gives_one_elbo_per_set(paper_data) -> None:
    problem = {"data": "energy", "noise": 0.1, "N": 60, "seed": 0}
    steps = {"pre": 2, "process": 2, "post": 1}
    kinds: tuple[dict[str, Any], ...] = (
        {"kind": "fixed", "sizes": [5], "updates": 2, "learning_rate": 0.01},
        {"kind": "paper", "candidates": 8, "alpha": 0.05, "steps": steps, "draws": 2}
        | {"learning_rate": 0.01},
        {"kind": "fast", "candidates": 8, "alpha": 0.05},
        {"kind": "auto", "candidates": 8, "tolerance": 0.1},
    )
    for kind in kinds:
        row = Real().run({**problem, **kind}, Scope())
        assert len(row["elbo"]) == len(row["kept"] if "kept" in row else kind["sizes"])
        assert all(M <= 8 for M in row.get("kept", []))


@pytest.mark.slow
def test_make_runs_quick_scope_gives_figure_and_claims(paper_data, tmp_path) -> None:
    runs, experiment, scope = Runs(tmp_path / "rows.jsonl"), Real(), Scope(quick=True)
    make_runs(experiment, runs, scope)
    rows = list(runs)
    assert len(rows) == len(experiment.settings(scope, rows))
    assert experiment.draw(rows, tmp_path / "figure.png").stat().st_size > 10_000
    claims = experiment.claims(rows)
    assert len(claims) == 3 * 4 + 3
    better = "agrees: ELBO at least that of the same fixed size, the fast schedule ("
    assert any(line.startswith(better) for line in claims)
    assert runs.path.stat().st_size < 30_000
