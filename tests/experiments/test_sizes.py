"""Models of fixed and selected size, and their comparison on made-up rows."""

from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from matplotlib.figure import Figure
from matplotlib.image import imread

from helpers.figures import scattered
from winnowgp.data import Dataset
from winnowgp.experiments.sizes import (
    Level,
    SizeStudy,
    curve_claim,
    draw_level,
    draw_levels,
    falling_claim,
    levels_by_group,
    standardised,
)
from winnowgp.experiments.synthetic import sampled
from winnowgp.point_processes import SquaredCardinality
from winnowgp.training import FixedAlpha, PaperSchedule, Tolerance, fit


def fixed(seed: int, sizes: list[int], elbo: list[float]) -> dict[str, Any]:
    return {"kind": "fixed", "seed": seed, "sizes": sizes, "elbo": elbo}


def selected(kind: str, seed: int, kept: list[int], elbo: list[float], expected: float = 0) -> dict:
    return {"kind": kind, "seed": seed, "kept": kept, "elbo": elbo, "expected": expected}


def level(*rows: dict, value: float = 0.0, group: str = "noise", N: int = 100) -> Level:
    return Level(group, value, N, rows)


def test_comparisons_use_the_curve_of_the_same_seed() -> None:
    compared = level(
        fixed(0, [10, 40], [-100.0, -50.0]),
        fixed(1, [10], [-10.0]),
        fixed(1, [40], [0.0]),
        selected("paper", 1, [20], [-4.0]),
        selected("paper", 0, [10, 20, 45], [-99.0, -70.0, 0.0]),
        selected("paper", 2, [20], [0.0]),
    )
    # 20 is midway between 10 and 40 in log M. Seed 0: −99 is 1 above −100, −70 is 5 above −75, and
    # 45 points lie outside the curve; seed 2 has no curve.
    first, second = compared.comparisons("paper", "elbo")
    assert first.gains == pytest.approx([1.0, 5.0])
    assert second.gains == pytest.approx([1.0])
    assert (first.outside, second.outside) == (1, 0)
    assert compared.comparisons("fast", "elbo") == []


# −N/2 (log 2π + 1) for a hundred rows is −141.9: a nat above it, and no more, is noise.
@pytest.mark.parametrize(("elbo", "out"), [(-141.9, True), (-140.95, True), (-140.8, False)])
def test_level_runs_that_are_all_noise_are_left_out(elbo: float, out: bool) -> None:
    def seeds(value: float, expected: float) -> Level:
        return level(
            fixed(0, [10, 20], [-50.0, -50.0]),
            fixed(1, [10, 20], [elbo, elbo]),
            selected("paper", 0, [15, 15], [-50.0, elbo], expected=expected),
            selected("paper", 1, [15, 15], [elbo, -142.0], expected=1),
            value=value,
        )

    levels = [seeds(0, 9), seeds(1, 8)]
    assert [row["seed"] for row in levels[0].of_kind("paper")] == ([0] if out else [0, 1])
    assert len(levels[0].curves("elbo")[1]) == (1 if out else 2)
    (falls,) = falling_claim("fewer", levels, "paper")
    (above,) = curve_claim("above", levels, "paper", "elbo", sign=1)
    assert falls.startswith("agrees: fewer, the paper's procedure (9.0, 8.0" if out else "agrees")
    assert ("left out as all noise: 2 paper runs)" in falls) == out
    assert ("left out as all noise: 2 paper runs and 2 fixed runs)" in above) == out


def test_curves_one_size_per_row_equals_all_sizes_in_one() -> None:
    together = level(fixed(0, [10, 20], [-3.0, -2.0]))
    apart = level(fixed(0, [20], [-2.0]), fixed(0, [10], [-3.0]))
    assert together.curves("elbo") == apart.curves("elbo") == ([10, 20], [[-3.0, -2.0]])


def test_curves_incomplete_seed_is_left_out() -> None:
    incomplete = level(fixed(0, [10, 20], [-3.0, -2.0]), fixed(1, [10], [-9.0]))
    assert incomplete.curves("elbo") == ([10, 20], [[-3.0, -2.0]])


def test_level_sizes_expected_for_paper_and_selected_for_search() -> None:
    both = level(
        selected("paper", 0, [9, 11], [0, 0], expected=10.4),
        selected("fast", 0, [7], [0], expected=8),
    )
    assert both.sizes("paper") == {0: 10.4}
    assert both.sizes("fast") == {0: 7}


def paper_levels(*sizes: tuple[float, float]) -> list[Level]:
    return [
        level(
            *(selected("paper", seed, [1], [0], expected=n) for seed, n in enumerate(each)), value=i
        )
        for i, each in enumerate(sizes)
    ]


def test_falling_claim_requires_a_fall_at_every_step() -> None:
    (line,) = falling_claim("fewer", paper_levels((9, 8), (7, 7), (3, 5)), "paper")
    assert line.startswith("agrees: fewer, the paper's procedure (8.5, 7.0, 4.0 inducing points")
    assert "in 2 of 2 seeds" in line
    (line,) = falling_claim("fewer", paper_levels((9, 8), (3, 5), (3, 5)), "paper")
    assert line.startswith("does not agree:")
    assert "in 0 of 2 seeds" in line
    (unseen,) = falling_claim("fewer", paper_levels((8.02, 8.02), (8.01, 8.01)), "paper")
    assert unseen.startswith(
        "does not agree: fewer, the paper's procedure (8.0, 8.0 inducing points"
    )
    (up,) = falling_claim("fewer", paper_levels((1, 1), (2, 2), (3, 3)), "paper")
    assert "rank correlation by seed 1.00, 1.00;" in up
    (still,) = falling_claim("fewer", paper_levels((2, 2), (2, 2)), "paper")
    assert still.startswith("does not agree")
    assert "rank correlation by seed 0.00, 0.00;" in still
    (apart,) = falling_claim("fewer", paper_levels((1, 9), (2, 8), (3, 7)), "paper")
    assert "rank correlation by seed 1.00, -1.00;" in apart


@pytest.mark.parametrize(("elbo", "agrees"), [(-49.2, True), (-51.5, False), (-30.0, True)])
def test_curve_claim_tolerates_a_hundredth_of_a_nat(elbo: float, agrees: bool) -> None:
    levels = [level(fixed(0, [10, 20], [-50.0, -50.0]), selected("fast", 0, [15], [elbo]))]
    (line,) = curve_claim("above", levels, "fast", "elbo", sign=1)
    assert line.startswith("agrees" if agrees else "does not agree")
    (line,) = curve_claim("below", levels, "fast", "elbo", sign=-1)
    assert line.startswith("does not agree" if elbo > -49 else "agrees")


def test_curve_claim_counts_runs_on_the_wrong_side() -> None:
    runs = [selected("fast", seed, [15], [-50.0 + d]) for seed, d in enumerate((0.5, -0.1, -0.2))]
    curves = [fixed(seed, [10, 20], [-50.0, -50.0]) for seed in range(3)]
    (line,) = curve_claim("above", [level(*curves, *runs)], "fast", "elbo", sign=1)
    assert line.startswith("agrees")
    assert "2 of 3 runs on the wrong side of the curve by any amount" in line


def test_claims_incomparable_sets_are_not_judged() -> None:
    curve = fixed(0, [10, 20], [-50.0, -50.0])
    outside = level(curve, selected("auto", 0, [90], [0.0]))
    assert curve_claim("above", [outside], "auto", "elbo", sign=1) == []
    inside = level(curve, selected("auto", 0, [15], [0.0]))
    (line,) = curve_claim("above", [outside, inside], "auto", "elbo", sign=1)
    assert line.startswith("agrees")
    assert "1 of 2 sets outside the curve, not judged" in line
    assert "0 of 1 run on the wrong side" in line
    assert falling_claim("fewer", [inside, level(curve)], "auto") == []


def test_falling_claim_ignores_seeds_without_every_level() -> None:
    levels = [
        level(selected("fast", 0, [9], [0]), selected("fast", 1, [1], [0])),
        level(selected("fast", 0, [5], [0]), value=1),
    ]
    (line,) = falling_claim("fewer", levels, "fast")
    assert line.startswith("agrees: fewer, the fast schedule (9.0, 5.0 inducing points")
    assert "1 of 1 seed)" in line


def test_levels_by_group_sorted_by_intensity() -> None:
    levels = [level(value=2, group="b"), level(value=1, group="b"), level(value=1, group="a")]
    assert [(g, [each.value for each in members]) for g, members in levels_by_group(levels)] == [
        ("b", [1, 2]),
        ("a", [1]),
    ]


def test_draw_levels_has_a_panel_per_level(tmp_path) -> None:
    rows = [
        fixed(0, [10, 20], [-50.0, -40.0]),
        selected("paper", 0, [12, 14], [-48.0, -45.0], expected=13),
        selected("auto", 0, [18], [-41.0]),
    ]
    levels = [level(*rows, value=v, group=g) for g, v in (("a", 0.0), ("a", 1.0), ("b", 0.0))]
    options = {"column": "elbo", "label": "nats", "title": lambda level: level.group}
    path = draw_levels(levels, tmp_path / "a.png", **options)
    small = draw_levels(levels[:1], tmp_path / "b.png", **options)
    assert imread(path).shape[1] > 1.5 * imread(small).shape[1]


def test_draw_level_shows_curve_mean_size_and_sets() -> None:
    rows = [
        fixed(0, [10, 20], [-5.0, -2.0]),
        fixed(1, [10, 20], [-3.0, 0.0]),
        selected("paper", 0, [11, 13, 14], [-3.0, -2.5, -2.0], expected=12.5),
    ]
    ax = Figure().subplots()
    draw_level(level(*rows), "elbo", ax=ax)
    curve, line = ax.lines
    assert np.asarray(curve.get_ydata()).tolist() == [-4, -1]
    assert np.asarray(line.get_xdata()).tolist() == [12.5, 12.5]
    (dots,) = scattered(ax)
    assert dots.tolist() == [[11, -3.0], [13, -2.5], [14, -2.0]]


def test_draw_level_aligned_seeds_have_curves_that_end_together() -> None:
    shown = level(
        fixed(0, [10, 40], [-100.0, -50.0]),
        fixed(1, [10, 40], [-40.0, -10.0]),
        selected("fast", 0, [20], [-70.0], 20.0),
        selected("fast", 1, [30], [-20.0], 30.0),
        selected("fast", 2, [25], [-1.0], 25.0),
    )
    assert shown.offsets("elbo") == {0: -20.0, 1: 20.0}
    ax = Figure().subplots()
    draw_level(shown, "elbo", ax=ax, align=True)
    # Curves end at −30, the mean of −50 and −10; seed 2 has no curve and is not shown.
    assert np.asarray(ax.lines[0].get_ydata()).tolist() == [-70.0, -30.0]
    (dots,) = scattered(ax)
    assert dots.tolist() == [[20.0, -50.0], [30.0, -40.0]]


def test_draw_level_aligned_without_any_curve_shows_all_sets() -> None:
    ax = Figure().subplots()
    shown = level(
        selected("fast", 0, [20], [-70.0], 20.0), selected("fast", 1, [30], [-20.0], 30.0)
    )
    draw_level(shown, "elbo", ax=ax, align=True)
    (dots,) = scattered(ax)
    assert dots.tolist() == [[20.0, -70.0], [30.0, -20.0]]


def small(rows: int = 60, condition: str = "smoothness", intensity: float = 8.0) -> Dataset:
    return standardised(sampled(condition, intensity, rows=rows, seed=3), "cpu")


def test_size_study_fixed_starts_at_nested_random_rows() -> None:
    data = small()
    few, many = (SizeStudy(data, 0).fixed(M, steps=0).candidates for M in (3, 7))
    assert torch.equal(few, many[:3])
    assert all(bool((point == data.X).all(1).any()) for point in many)
    other = SizeStudy(data, 1).fixed(7, steps=0).candidates
    assert not torch.equal(other, many)


def test_size_study_fixed_starts_at_one_and_improves() -> None:
    study = SizeStudy(small(), 0)
    start = study.fixed(5, steps=0)
    assert isinstance(start.kernel, ScaleKernel)
    assert isinstance(start.kernel.base_kernel, RBFKernel)
    assert start.kernel.outputscale.item() == pytest.approx(1)
    assert start.kernel.base_kernel.lengthscale.item() == pytest.approx(1)
    assert start.noise.item() == pytest.approx(1)
    bounds = [study.fixed(5, steps=n).fixed_bound(study.data) for n in (0, 20, 60)]
    assert bounds[0] < bounds[1] < bounds[2]


def test_size_study_by_paper_equals_three_phases() -> None:
    data, alpha = small(), 0.05
    study = SizeStudy(data, 0)
    steps = {"pre": 15, "process": 25, "post": 10}
    selection = study.by_paper(12, alpha=alpha, steps=steps, draws=4)
    plan = PaperSchedule(SquaredCardinality(12, alpha), pre=15, joint=25, post=0)
    generator = torch.Generator().manual_seed(0)
    reference = fit(study.fixed(12, steps=0), data, schedule=plan, generator=generator)
    # Training in chunks adds a jitter of 1e-8, the phases add 1e-12.
    assert selection.expected == pytest.approx(reference.selection.inclusion.sum().item(), rel=2e-2)
    assert len(selection.models) == 4
    assert len({model.K for model in selection.models}) > 1
    assert all(model.K <= 12 for model in selection.models)


def test_size_study_by_paper_trains_every_draw() -> None:
    study = SizeStudy(small(), 0)
    before, after = (
        study.by_paper(
            12, alpha=0.05, steps={"pre": 15, "process": 10, "post": post}, draws=3
        ).models
        for post in (0, 30)
    )
    assert [model.K for model in before] == [model.K for model in after]
    for one, other in zip(before, after, strict=True):
        assert other.fixed_bound(study.data) > one.fixed_bound(study.data) + 0.1


@pytest.mark.usefixtures("quickly")
def test_size_study_by_search_follows_candidates_and_goal() -> None:
    study = SizeStudy(small(), 0)
    strong, weak = (study.by_search(10, goal=FixedAlpha(alpha)).models for alpha in (2.0, 0.01))
    assert strong[0].K < weak[0].K <= 10
    own = study.by_search(0, goal=Tolerance(1e-4)).models
    assert own[0].K > 10


@pytest.mark.usefixtures("quickly")
def test_size_study_run_reports_selected_sizes() -> None:
    study = SizeStudy(small(), 0)
    models, row = study.run({"kind": "fixed", "sizes": [3, 6], "updates": 2, "learning_rate": 0.01})
    assert [model.K for model in models] == [3, 6]
    assert row == {}
    models, row = study.run({"kind": "auto", "tolerance": 0.5})
    assert row["kept"] == [models[0].K]
    assert row["expected"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind",
    [
        {"kind": "fixed", "sizes": [5], "updates": 20, "learning_rate": 0.01},
        {
            "kind": "paper",
            "candidates": 12,
            "alpha": 0.05,
            "steps": {"pre": 5, "process": 5, "post": 5},
            "draws": 2,
            "learning_rate": 0.01,
        },
        {"kind": "fast", "candidates": 12, "alpha": 0.05},
        {"kind": "auto", "tolerance": 0.1},
    ],
    ids=lambda kind: kind["kind"],
)
def test_size_study_run_on_gpu_matches_cpu(kind: dict) -> None:
    sample = sampled("smoothness", 8.0, rows=60, seed=3)
    there, here = (standardised(sample, device) for device in ("cuda", "cpu"))
    models, _ = SizeStudy(there, 0).run(kind)
    assert all(model.candidates.is_cuda for model in models)
    if kind["kind"] == "fixed":
        reference = SizeStudy(here, 0).run(kind)[0][0].fixed_bound(here)
        # Chunks add a jitter of 1e-8, whole matrices add 1e-12.
        assert models[0].fixed_bound(there) == pytest.approx(reference, rel=1e-3)
