"""The comparison with other libraries: its rules, its calibration and its worker, on made rows."""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
calibration: Any = import_module("calibration")
paper_ablations: Any = import_module("paper_ablations")
libraries: Any = import_module("libraries")
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
    assert libraries.verdict([0.1, 0.12, 0.11]) == "higher"
    assert libraries.verdict([-0.1, -0.12, -0.11]) == "lower"
    # Mean 0.1, standard error 0.1.
    assert libraries.verdict([0.0, 0.2]) == "level"
    assert libraries.verdict([5.0]) == "one split"


def test_differences_are_paired_by_split() -> None:
    rows = [row("winnowgp", 20, 1.0), row("winnowgp", 21, 2.0)]
    rows += [row("ngboost", 20, 0.5), row("ngboost", 22, 9.0)]
    assert libraries.differences(rows, "log_density") == {("energy", "ngboost"): [-0.5]}


def test_paired_adds_the_difference_of_common_splits_to_our_mean() -> None:
    rows = [row("winnowgp", 20, 1.0), row("winnowgp", 21, 2.0), row("ngboost", 20, 0.5)]
    value = libraries.paired(rows, "energy", "ngboost", "log_density")
    assert value == pytest.approx(1.0)
    assert libraries.paired(rows, "energy", "winnowgp", "log_density") == pytest.approx(1.5)
    rows.append(row("ngboost", 21, 0.9))
    assert libraries.paired(rows, "energy", "ngboost", "log_density") == pytest.approx(0.7)


def test_comparable_leaves_out_splits_that_we_lack() -> None:
    rows = [row("winnowgp", 20, 1.0), row("ngboost", 20, 0.5), row("ngboost", 21, 9.0)]
    rows.append(row("ngboost", 22, 0.1, table="concrete"))
    assert libraries.comparable(rows) == [rows[0], rows[1], rows[3]]


def test_losses_name_higher_densities_and_faster_fits() -> None:
    rows = [row("winnowgp", s, 1.0, cpu_s=5.0) for s in (20, 21)]
    rows += [row("catboost", s, 1.1, cpu_s=9.0) for s in (20, 21)]
    rows += [row("ngboost", s, 0.9, cpu_s=2.0) for s in (20, 21)]
    (line,) = libraries.losses(rows)
    assert "higher density than ours: catboost (+0.100, higher)." in line
    assert line.endswith("Less CPU time to fit: ngboost.")


def test_summary_has_a_line_per_method_and_names_failures() -> None:
    failed = {"table": "energy", "seed": 20, "method": "ngboost", "N": 691, "processor": "A"}
    rows = [row("catboost", 20, -0.2), row("winnowgp", 20, 0.1), row("winnowgp", 21, 0.3)]
    rows.append({**failed, "error": "more than 5 CPU s"})
    title, _, _, _, ours, catboost, ngboost = libraries.summary(rows).splitlines()
    assert title == "### energy: 691 training rows"
    assert ours.startswith("| `winnowgp` | 2 | 0.200 |")
    assert catboost.startswith("| `catboost` | 1 | -0.200 | -0.300 |")
    assert "more than 5 CPU s" in ngboost


def test_summary_has_clear_differences_in_bold() -> None:
    rows = [row("winnowgp", s, 1.0) for s in (20, 21)]
    rows += [row("catboost", 20, 0.5), row("catboost", 21, 0.51)]
    rows += [row("ngboost", 20, 0.5), row("ngboost", 21, 1.5)]
    lines = libraries.summary(rows).splitlines()
    assert lines[-2].startswith("| `catboost` | 2 | 0.505 | **-0.495** |")
    assert lines[-1].startswith("| `ngboost` | 2 | 1.000 | +0.000 |")


def test_summary_has_a_section_per_table() -> None:
    rows = [row("winnowgp", 20, 0.1, table="concrete", N=927), row("winnowgp", 20, 0.3)]
    titles = [line for line in libraries.summary(rows).splitlines() if line.startswith("#")]
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
    assert titles == [f"### {share} % intervals" for share in (50, 90, 99)]
    start = lines.index("### 90 % intervals")
    assert lines[start + 2] == "| method | energy | concrete |"
    assert lines[start + 4 : start + 6] == ["| `winnowgp` | 0.85 | |", "| `catboost` | | 0.80 |"]


def test_cost_names_gpu_and_other_processor() -> None:
    ours = {"cpu_s": 1.0, "device": "GPU", "wall_s": 61.2, "processor": "B"}
    assert libraries.cost([ours], "A") == "61 on a GPU"
    fits = [row("ngboost", seed, 0.1, cpu_s=seconds) for seed, seconds in ((20, 1.0), (21, 2.0))]
    assert libraries.cost(fits, "A") == "1.5"
    assert libraries.cost(fits, "B") == "1.5*"
    assert libraries.cost([{"error": "more than 5 CPU s"}], "A") == "more than 5 CPU s"


def test_expected_seconds_follow_rows_and_inducing_points() -> None:
    fits = [row("gpflow-sgpr-32", s, 0.1, cpu_s=t) for s, t in ((20, 3.0), (21, 5.0))]
    fits.append(row("sklearn-gpr", 20, 0.1, cpu_s=2.0))
    expected = libraries.expected_seconds
    larger = libraries.TABLES["kin8nm"] / libraries.TABLES["energy"]
    assert expected(fits, "energy", "gpflow-sgpr-128") == pytest.approx(16 * 4.0)
    assert expected(fits, "kin8nm", "gpflow-sgpr-32") == pytest.approx(larger * 4.0)
    assert expected(fits, "kin8nm", "sklearn-gpr") == pytest.approx(larger**3 * 2.0)
    assert expected(fits, "kin8nm", "ngboost") == 0.0
    fits.append(row("gpytorch-svgp-32", 20, 0.1, cpu_s=9.0))
    assert expected(fits, "kin8nm", "gpytorch-svgp-32") == pytest.approx(9.0)
    # The most similar fit decides.
    fits.append(row("gpflow-sgpr-32", 20, 0.1, table="concrete", cpu_s=7.0))
    nearer = libraries.TABLES["kin8nm"] / libraries.TABLES["concrete"]
    assert expected(fits, "kin8nm", "gpflow-sgpr-32") == pytest.approx(nearer * 7.0)


def test_planned_splits_are_fewer_if_fits_take_long() -> None:
    def planned(seconds: float, **options: Any) -> int:
        return libraries.planned_splits(
            [row("ngboost", 20, 0.1, cpu_s=seconds)], "energy", "ngboost", **options
        )

    assert [planned(seconds) for seconds in (300.0, 301.0, 900.0, 901.0)] == [5, 1, 1, 0]
    assert planned(901.0, limit=3600) == 1
    assert libraries.planned_splits([], "protein", "sklearn-gpr") == 0


def test_progress_counts_splits_and_says_why_fits_are_missing() -> None:
    done = [row("ngboost", 20, 0.1), row("ngboost", 21, 0.1)]
    done.append(row("gpflow-sgpr-32", 20, 0.1, cpu_s=120.0))
    failed = {
        "table": "energy",
        "seed": 20,
        "method": "gpboost-vif",
        "error": "more than 900 CPU s",
    }
    table = libraries.progress([*done, failed])
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
    rows = [row(method, 20, 0.1) for method in libraries.ENVIRONMENTS]
    rows.append(row("winnowgp", 20, 0.1, table="kin40k", device="GPU", wall_s=60.0))
    libraries.draw(rows, ["energy", "kin40k"], tmp_path, value=lambda table, method, column: 0.5)
    assert {path.name for path in tmp_path.iterdir()} == {"peers-density.png", "peers-coverage.png"}


def test_later_rows_replace_earlier_ones_of_the_same_fit() -> None:
    rows = [row("winnowgp", 20, 1.0), row("ngboost", 20, 0.5), row("winnowgp", 20, 2.0)]
    assert [r["log_density"] for r in libraries.latest(rows)] == [2.0, 0.5]


def test_is_final_repeats_failures_of_lower_limits_and_ours_of_other_sources() -> None:
    failed = {**row("ngboost", 20, 0.1), "error": "more than 900 CPU s", "limit": 900}
    assert libraries.is_final(failed, limit=900, again=False)
    assert not libraries.is_final(failed, limit=3600, again=False)
    ours = row("winnowgp", 20, 1.0, source="earlier")
    assert libraries.is_final(ours, limit=3600, again=False)
    assert not libraries.is_final(ours, limit=3600, again=True)
    assert libraries.is_final(row("ngboost", 20, 0.1), limit=3600, again=True)


def test_cases_leave_out_exact_gps_of_large_tables() -> None:
    tables = {case[0] for case in libraries.cases(list(libraries.TABLES), ["sklearn-gpr"])}
    assert tables == {"energy", "concrete", "skillcraft", "kin8nm"}
    first = libraries.cases(["energy", "kin8nm"], ["ngboost"])[:2]
    assert first == [("energy", 20, "ngboost"), ("kin8nm", 20, "ngboost")]


def test_stored_rows_are_of_known_methods_and_complete() -> None:
    for stored in libraries.Runs(libraries.FILE):
        assert stored["method"] in libraries.ENVIRONMENTS
        assert stored["seed"] in libraries.SEEDS[stored["table"]]
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
