"""The comparison with other libraries: its rules, its calibration and its worker, on made rows."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
calibration: Any = import_module("calibration")
paper_ablations: Any = import_module("paper_ablations")
libraries: Any = import_module("libraries")
plan: Any = import_module("libraries_plan")
page: Any = import_module("libraries_page")
plots: Any = import_module("libraries_plots")
sys.path.remove(str(BENCHMARKS))


def row(method: str, seed: int, density: float, **columns: Any) -> dict[str, Any]:
    fit = {"table": "energy", "seed": seed, "method": method, "N": 691, "cpu_s": 1.0}
    scores = {"log_density": density, "rmse": 0.1, "coverage_90": 0.9}
    costs = {"predict_s": 0.1, "memory_mb": 300, "size": None, "processor": "A"}
    return {**fit, **scores, **costs, **columns}


def test_calibration_of_known_quantiles_matches_direct_counts() -> None:
    rng = np.random.default_rng(0)
    mean, y = rng.normal(size=400), rng.normal(size=400)
    quantiles = mean + norm.ppf(calibration.LEVELS)[:, None] * 1.3
    result = calibration.calibration(quantiles, y)
    transform = norm.cdf((y - mean) / 1.3)
    for share in (0.5, 0.9, 0.95, 0.99):
        inside = np.abs(transform - 0.5) <= share / 2
        assert result[f"coverage_{round(100 * share)}"] == pytest.approx(inside.mean())
    counts = np.histogram(transform, np.linspace(0, 1, 11))[0] / 400
    assert result["pit"] == pytest.approx(counts.tolist())


def test_verdict_needs_two_standard_errors() -> None:
    assert page.verdict([0.1, 0.12, 0.11]) == "higher"
    assert page.verdict([-0.1, -0.12, -0.11]) == "lower"
    # Mean 0.1, standard error 0.058; then 0.05.
    assert page.verdict([0.0, 0.1, 0.2]) == "level"
    assert page.verdict([0.0, 0.1, 0.1, 0.2]) == "higher"


def test_verdict_needs_three_splits() -> None:
    assert page.verdict([5.0]) == "one split"
    assert page.verdict([5.0, 5.1]) == "2 splits"


def test_differences_are_paired_by_split() -> None:
    rows = [row("winnowgp", 20, 1.0), row("winnowgp", 21, 2.0)]
    rows += [row("ngboost", 20, 0.5), row("ngboost", 22, 9.0)]
    assert page.differences(rows, "log_density") == {("energy", "ngboost"): [-0.5]}


def test_paired_adds_the_difference_of_common_splits_to_our_mean() -> None:
    rows = [row("winnowgp", 20, 1.0), row("winnowgp", 21, 2.0), row("ngboost", 20, 0.5)]
    value = page.paired(rows, "energy", "ngboost", "log_density")
    assert value == pytest.approx(1.0)
    assert page.paired(rows, "energy", "winnowgp", "log_density") == pytest.approx(1.5)
    rows.append(row("ngboost", 21, 0.9))
    assert page.paired(rows, "energy", "ngboost", "log_density") == pytest.approx(0.7)


def test_comparable_leaves_out_splits_that_we_lack() -> None:
    rows = [row("winnowgp", 20, 1.0), row("ngboost", 20, 0.5), row("ngboost", 21, 9.0)]
    rows.append(row("ngboost", 22, 0.1, table="concrete"))
    assert page.comparable(rows) == [rows[0], rows[1], rows[3]]


def test_our_method_is_the_one_on_a_cpu_unless_the_gpu_has_more_splits() -> None:
    both = ("energy", "concrete")
    rows = [row("winnowgp-gpu", s, 1.0, table=table) for s in (20, 21) for table in both]
    rows += [row("winnowgp", s, 0.9) for s in (20, 21)]
    rows += [row("winnowgp", 20, 0.9, table="concrete"), row("ngboost", 20, 0.5)]
    failed = {**row("winnowgp", 21, 0.0, table="concrete"), "error": "more than 900 CPU s"}
    rows += [failed, row("ngboost", 22, 0.5), row("ngboost", 21, 0.5, table="concrete")]
    assert page.our_method(rows, "energy") == "winnowgp"
    assert page.our_method(rows, "concrete") == "winnowgp-gpu"
    gaps = page.differences(rows, "log_density")
    assert gaps["energy", "ngboost"] == [pytest.approx(-0.4)]
    assert gaps["energy", "winnowgp-gpu"] == pytest.approx([0.1, 0.1])
    assert gaps["concrete", "ngboost"] == [pytest.approx(-0.5)]
    # Neither has split 22 of energy.
    assert ("energy", 22) not in {(r["table"], r["seed"]) for r in page.comparable(rows)}


def test_losses_name_better_methods_and_count_cheaper_ones() -> None:
    seeds = (20, 21, 22)
    rows = [row("winnowgp", s, 1.0, cpu_s=5.0) for s in seeds]
    rows += [row("winnowgp-gpu", s, 9.0, cpu_s=0.1) for s in seeds]
    rows += [row("catboost", s, 1.1, cpu_s=9.0, memory_mb=400) for s in seeds]
    rows += [row("ngboost", s, 0.9, cpu_s=2.0, rmse=0.05, predict_s=0.01) for s in seeds]
    line = page.losses(rows).splitlines()[-1]
    assert line == (
        "| energy | catboost (+0.100, higher) | ngboost (-0.050, lower) | 1 of 2 (ngboost: 0.4) "
        "| 1 of 2 (ngboost: 0.1) | 0 of 2 |"
    )


def test_losses_compare_no_costs_with_fits_on_a_gpu() -> None:
    ours = row("winnowgp-gpu", 20, 1.0, device="GPU", wall_s=1.0)
    del ours["cpu_s"]
    line = page.losses([ours, row("ngboost", 20, 0.9)]).splitlines()[-1]
    assert line == "| energy | none | none | – | – | – |"


def test_summary_has_a_line_per_method_and_names_failures() -> None:
    failed = {"table": "energy", "seed": 20, "method": "ngboost", "N": 691, "processor": "A"}
    rows = [row("catboost", 20, -0.2), row("winnowgp", 20, 0.1), row("winnowgp", 21, 0.3)]
    rows.append({**failed, "error": "more than 5 CPU s"})
    title, _, _, _, ours, catboost, ngboost = page.summary(rows).splitlines()
    assert title == "### energy: 691 training rows"
    assert ours.startswith("| `winnowgp` | 2 | 0.200 |")
    assert catboost.startswith("| `catboost` | 1 | -0.200 | -0.300 |")
    assert "more than 5 CPU s" in ngboost


def test_version_list_names_sources_and_tables_of_ours() -> None:
    rows = [row("winnowgp", 20, 0.1, version="1.0", source="abc"), row("ngboost", 20, 0.1)]
    rows.append(row("winnowgp-gpu", 20, 0.1, version="1.0", source="abc", table="kin40k"))
    rows = [{"version": "0.5", **each} for each in rows]
    assert page.version_list(rows) == (
        "winnowgp 1.0 (source abc) on energy and kin40k; ngboost 0.5"
    )


def test_summary_has_clear_differences_in_bold() -> None:
    rows = [row("winnowgp", s, 1.0) for s in (20, 21, 22)]
    rows += [row("catboost", s, density) for s, density in ((20, 0.5), (21, 0.51), (22, 0.49))]
    rows += [row("ngboost", s, density) for s, density in ((20, 0.5), (21, 1.5), (22, 1.0))]
    lines = page.summary(rows).splitlines()
    assert lines[-2].startswith("| `catboost` | 3 | 0.500 | **-0.500** |")
    assert lines[-1].startswith("| `ngboost` | 3 | 1.000 | +0.000 |")


def test_summary_has_a_section_per_table() -> None:
    rows = [row("winnowgp", 20, 0.1, table="concrete", N=927), row("winnowgp", 20, 0.3)]
    titles = [line for line in page.summary(rows).splitlines() if line.startswith("#")]
    assert titles == ["### energy: 691 training rows", "### concrete: 927 training rows"]


def test_coverage_tables_average_each_interval_by_method_and_table() -> None:
    shares = {"coverage_50": 0.4, "coverage_95": 0.96, "coverage_99": 1.0}
    first = shares | {"coverage_90": 0.8}
    groups = {
        ("energy", "winnowgp"): [first, first | {"coverage_90": 0.9}],
        ("concrete", "catboost"): [first],
    }
    lines = calibration.coverage_tables(groups).splitlines()
    titles = [line for line in lines if line.startswith("#")]
    assert titles == [f"### {share} % intervals" for share in (50, 90, 95, 99)]
    start = lines.index("### 90 % intervals")
    assert lines[start + 2] == "| method | energy | concrete |"
    expected = ["| `winnowgp` | 0.85 | |", "| `catboost` | | 0.80 |"]
    assert lines[start + 4 : start + 6] == expected
    ordered = calibration.coverage_tables(groups, ("ngboost", "catboost")).splitlines()
    assert ordered[start + 4 : start + 6] == expected[::-1]


def test_cost_names_gpu_and_other_processor() -> None:
    ours = {"cpu_s": 1.0, "device": "GPU", "wall_s": 61.2, "processor": "B"}
    assert page.cost([ours], "A") == "61 on a GPU"
    fits = [row("ngboost", seed, 0.1, cpu_s=seconds) for seed, seconds in ((20, 1.0), (21, 2.0))]
    assert page.cost(fits, "A") == "1.5"
    assert page.cost(fits, "B") == "1.5*"
    assert page.cost([{"error": "more than 5 CPU s"}], "A") == "more than 5 CPU s"


def test_expected_seconds_follow_rows_and_inducing_points() -> None:
    fits = [row("gpflow-sgpr-32", s, 0.1, cpu_s=t) for s, t in ((20, 3.0), (21, 5.0))]
    fits.append(row("sklearn-gpr", 20, 0.1, cpu_s=2.0))
    expected = plan.expected_seconds
    larger = plan.TABLES["kin8nm"] / plan.TABLES["energy"]
    assert expected(fits, "energy", "gpflow-sgpr-128") == pytest.approx(16 * 4.0)
    assert expected(fits, "kin8nm", "gpflow-sgpr-32") == pytest.approx(larger * 4.0)
    assert expected(fits, "kin8nm", "sklearn-gpr") == pytest.approx(larger**3 * 2.0)
    assert expected(fits, "kin8nm", "ngboost") == 0.0
    fits.append(row("gpytorch-svgp-32", 20, 0.1, cpu_s=9.0))
    assert expected(fits, "kin8nm", "gpytorch-svgp-32") == pytest.approx(9.0)
    # The most similar fit decides.
    fits.append(row("gpflow-sgpr-32", 20, 0.1, table="concrete", cpu_s=7.0))
    nearer = plan.TABLES["kin8nm"] / plan.TABLES["concrete"]
    assert expected(fits, "kin8nm", "gpflow-sgpr-32") == pytest.approx(nearer * 7.0)


def test_planned_splits_are_fewer_if_fits_take_long() -> None:
    def planned(seconds: float, **options: Any) -> int:
        return plan.planned_splits(
            [row("ngboost", 20, 0.1, cpu_s=seconds)], "energy", "ngboost", **options
        )

    assert [planned(seconds) for seconds in (300.0, 301.0, 900.0, 901.0)] == [5, 1, 1, 0]
    assert planned(901.0, limit=3600) == 1
    assert plan.planned_splits([], "protein", "sklearn-gpr") == 0


def test_progress_counts_splits_and_says_why_fits_are_missing() -> None:
    done = [row("ngboost", 20, 0.1), row("ngboost", 21, 0.1)]
    done.append(row("gpflow-sgpr-32", 20, 0.1, cpu_s=120.0))
    failed = {
        "table": "energy",
        "seed": 20,
        "method": "gpboost-vif",
        "error": "more than 900 CPU s",
    }
    table = page.progress([*done, failed])
    lines = {line.split(" | ")[0]: line for line in table.splitlines()}
    assert "energy" in lines["| method"]
    assert lines["| ngboost"].startswith("| ngboost | 2 of 5 | not yet run: about 1 CPU min |")
    assert lines["| gpboost-vif"].startswith(
        "| gpboost-vif | ended after 15 CPU min | not yet run |"
    )
    # Sixteen times 120 seconds.
    assert lines["| gpflow-sgpr-128"].startswith("| gpflow-sgpr-128 | too long: about 32 CPU min |")
    # Exact GPs of tables with more than 8,000 training rows are not planned.
    assert lines["| sklearn-gpr"].endswith("not yet run | – | – |")


def test_draw_writes_a_picture_for_each_column(tmp_path: Path) -> None:
    rows = [row(method, 20, 0.1) for method in plan.ENVIRONMENTS]
    rows.append(row("winnowgp", 20, 0.1, table="kin40k", device="GPU", wall_s=60.0))
    page.draw(rows, ["energy", "kin40k"], tmp_path, value=lambda table, method, column: 0.5)
    assert {path.name for path in tmp_path.iterdir()} == {"peers-density.png", "peers-coverage.png"}


def test_read_rows_fits_on_a_gpu_are_a_method_of_their_own(tmp_path: Path, monkeypatch) -> None:
    runs = plan.Runs(tmp_path / "rows.jsonl")
    for each in (
        row("winnowgp", 20, 1.0),
        row("winnowgp", 20, 3.0, device="GPU"),
        row("winnowgp-gpu", 21, 4.0, device="GPU"),
    ):
        runs.add(each)
    monkeypatch.setattr(plan, "FILE", runs.path)
    rows = [(r["method"], r["seed"], r["log_density"]) for r in plan.read_rows()]
    assert rows == [("winnowgp", 20, 1.0), ("winnowgp-gpu", 20, 3.0), ("winnowgp-gpu", 21, 4.0)]


def made(table: str, seed: int, method: str) -> dict[str, Any]:
    return {"table": table, "seed": seed, "method": method, "cpu_s": 400.0}


def test_run_planned_follows_the_cost_of_fits_that_it_made(monkeypatch) -> None:
    monkeypatch.setattr(libraries, "ProcessPoolExecutor", ThreadPoolExecutor)
    missing = plan.cases(["energy", "concrete"], ["ngboost"])
    planned = libraries.partial(plan.is_planned, seeds=None, limit=900)
    rows = list(libraries.run_planned(made, missing, [], planned=planned, jobs=1))
    # 400 seconds on energy make one split of each table enough.
    assert [(r["table"], r["seed"]) for r in rows] == [("energy", 20), ("concrete", 20)]
    asked = libraries.partial(plan.is_planned, seeds=[21], limit=900)
    again = list(libraries.run_planned(made, missing, rows, planned=asked, jobs=2))
    assert sorted((r["table"], r["seed"]) for r in again) == [("concrete", 21), ("energy", 21)]


def test_total_hours_plans_as_the_command_does(monkeypatch) -> None:
    monkeypatch.setattr(page, "TABLES", {name: plan.TABLES[name] for name in ("energy", "kin8nm")})
    monkeypatch.setattr(page, "ENVIRONMENTS", {"ngboost": "trees", "winnowgp-gpu": None})
    rows = [row("ngboost", seed, 0.1, cpu_s=30.0) for seed in (20, 21)]
    larger = 30 * plan.TABLES["kin8nm"] / plan.TABLES["energy"]
    assert 300 < larger < 900
    # Missing are three splits of energy, and one of kin8nm, which takes more than 300 seconds.
    left, whole = page.total_hours(rows)
    assert left == pytest.approx((3 * 30 + larger) / 3600)
    assert whole == pytest.approx((5 * 30 + larger) / 3600)
    # With a limit below its cost, kin8nm is not started at all.
    assert page.total_hours(rows, limit=200) == pytest.approx((90 / 3600, 150 / 3600))


def test_runnable_leaves_out_methods_on_a_gpu_where_there_is_none(monkeypatch, capsys) -> None:
    for present in (True, False):
        monkeypatch.setattr(libraries.torch.cuda, "is_available", lambda present=present: present)
        kept = libraries.runnable(["winnowgp", "winnowgp-gpu", "ngboost"])
        assert kept == ["winnowgp", *["winnowgp-gpu"] * present, "ngboost"]
    assert capsys.readouterr().err == "winnowgp-gpu: there is no GPU.\n"


def test_draw_panel_shows_far_densities_at_the_edge_and_ours_on_top() -> None:
    densities = {"winnowgp": 1.0, "ngboost": 0.8, "catboost": -9.0, "lightgbm": 0.9}
    rows = [row(method, 20, density) for method, density in densities.items()]
    rows.append(row("winnowgp-gpu", 20, 1.0, device="GPU"))
    ax = plots.Figure().subplots()

    def value(table: str, method: str, column: str) -> float:
        return densities[method.removesuffix("-gpu")]

    families = plots._draw_panel(ax, rows, "energy", "log_density", value)
    assert families == set(densities)
    # The median is 0.9.
    assert ax.get_ylim()[0] == pytest.approx(0.6)
    heights = {line.get_marker(): line.get_ydata()[0] for line in ax.lines}
    catboost, ours = (plots.FAMILIES[name][2] for name in ("catboost", "winnowgp"))
    assert heights[catboost] == pytest.approx(0.6)
    assert [text.get_text() for text in ax.texts] == ["−9.00"]
    orders = {line.get_marker(): line.get_zorder() for line in ax.lines if line.get_ms() < 10}
    assert orders[ours] > max(order for marker, order in orders.items() if marker != ours)


@pytest.mark.parametrize(
    ("method", "worked", "device", "limited"),
    [
        ("winnowgp", "winnowgp", "cpu", True),
        ("winnowgp-gpu", "winnowgp", "cuda", False),
        ("gpflow-sgpr-32", "gpflow-sgpr", "cpu", True),
        ("sklearn-gpr", "sklearn-gpr", "cpu", True),
    ],
)
def test_run_starts_the_worker_of_a_method(
    paper_data, monkeypatch, method: str, worked: str, device: str, limited: bool
) -> None:
    started: list[tuple[list[str], dict[str, Any]]] = []

    def start(command: list[str], **options: Any) -> CompletedProcess[str]:
        started.append((command, options))
        return CompletedProcess(command, 1, stderr="ModuleNotFoundError: No module named 'x'")

    monkeypatch.setattr(libraries.subprocess, "run", start)
    assert libraries.run("energy", 20, method, limit=900, python=sys.executable) is None
    ((command, options),) = started
    assert command[2] == worked
    assert command[command.index("--device") + 1] == device
    assert ("--size" in command) == (method == "gpflow-sgpr-32")
    assert (options["preexec_fn"] is not None) == limited


def test_later_rows_replace_earlier_ones_of_the_same_fit() -> None:
    rows = [row("winnowgp", 20, 1.0), row("ngboost", 20, 0.5), row("winnowgp", 20, 2.0)]
    assert [r["log_density"] for r in plan.latest(rows)] == [2.0, 0.5]


def test_is_final_repeats_failures_of_lower_limits_and_ours_of_other_sources() -> None:
    failed = {**row("ngboost", 20, 0.1), "error": "more than 900 CPU s", "limit": 900}
    assert plan.is_final(failed, limit=900, again=False)
    assert not plan.is_final(failed, limit=3600, again=False)
    ours = row("winnowgp", 20, 1.0, source="earlier")
    assert plan.is_final(ours, limit=3600, again=False)
    assert not plan.is_final(ours, limit=3600, again=True)
    assert plan.is_final(row("ngboost", 20, 0.1), limit=3600, again=True)


def test_cases_leave_out_exact_gps_of_large_tables() -> None:
    tables = {case[0] for case in plan.cases(list(plan.TABLES), ["sklearn-gpr"])}
    assert tables == {"energy", "concrete", "skillcraft", "kin8nm"}
    first = plan.cases(["energy", "kin8nm"], ["ngboost"])[:2]
    assert first == [("energy", 20, "ngboost"), ("kin8nm", 20, "ngboost")]


def test_stored_rows_are_of_known_methods_and_complete() -> None:
    for stored in plan.Runs(plan.FILE):
        assert stored["method"] in plan.ENVIRONMENTS
        assert stored["seed"] in plan.SEEDS[stored["table"]]
        assert "error" in stored or sum(stored["pit"]) == pytest.approx(1)


def test_ablation_changes_its_setting_alone() -> None:
    for ablation in paper_ablations.ABLATIONS:
        changed = ablation.settings()
        base = [s for s in ablation.experiment.settings(ablation.scope, []) if ablation.keep(s)]
        base = [settings for settings in base if settings["kind"] == ablation.kind]
        assert len(changed) == len(base) > 0
        names = set(ablation.changed(base[0]))
        for before, after in zip(base, changed, strict=True):
            different = {n for n in after if n not in before or before[n] != after[n]}
            assert different - {"figure", "change"} <= names
    keys = [(ablation.figure, ablation.change) for ablation in paper_ablations.ABLATIONS]
    assert len(set(keys)) == len(keys)


def test_ablation_verdict_is_that_of_the_experiment() -> None:
    ablation = next(a for a in paper_ablations.ABLATIONS if "500 steps" in a.change)
    (first, *_) = json.loads(json.dumps(ablation.settings()))
    rows = [
        {**first, "fold": f, "sizes": sizes} for f, sizes in enumerate([[5, 7], [5, 6], [9, 8]])
    ]
    (line,) = ablation.verdicts(rows, [])
    assert line.startswith("agrees: more inducing points in the last layer, the released settings")
    assert paper_ablations._parts(line)[1:] == ("agrees", "in 2 of 3 runs")
    assert ablation.verdicts([{**first, "change": "other"}], []) == []
