"""Procedures compared with fixed numbers of points, from rows written by hand."""

from typing import Any

import pytest
from matplotlib.image import imread

from winnowgp.experiments.sizes import Level, curve_claim, draw_levels, falling_claim, grouped


def fixed(seed: int, sizes: list[int], elbo: list[float]) -> dict[str, Any]:
    return {"kind": "fixed", "seed": seed, "sizes": sizes, "elbo": elbo}


def chose(kind: str, seed: int, kept: list[int], elbo: list[float], expected: float = 0) -> dict:
    return {"kind": kind, "seed": seed, "kept": kept, "elbo": elbo, "expected": expected}


def level(*rows: dict, value: float = 0.0, group: str = "noise", N: int = 100) -> Level:
    return Level(group, value, N, rows)


def test_a_set_is_compared_with_its_own_seeds_curve_at_its_own_size() -> None:
    found = level(
        fixed(0, [10, 40], [-100.0, -50.0]),
        fixed(1, [10], [-10.0]),
        fixed(1, [40], [0.0]),
        chose("paper", 1, [20], [-4.0]),
        chose("paper", 0, [10, 20, 45], [-99.0, -70.0, 0.0]),
        chose("paper", 2, [20], [0.0]),
    )
    # 20 is midway between 10 and 40 in log M. Seed 0: −99 is 1 above −100, −70 is 5 above −75, and
    # 45 points lie outside the curve; seed 2 has no curve.
    first, second = found.compared("paper", "elbo")
    assert first.gains == pytest.approx([1.0, 5.0])
    assert second.gains == pytest.approx([1.0])
    assert (first.outside, second.outside) == (1, 0)
    assert found.compared("fast", "elbo") == []


# −N/2 (log 2π + 1) for a hundred rows is −141.9: a nat above it, and no more, is noise.
@pytest.mark.parametrize(("elbo", "out"), [(-141.9, True), (-140.95, True), (-140.8, False)])
def test_runs_that_took_everything_for_noise_are_left_out_and_counted(
    elbo: float, out: bool
) -> None:
    def seeds(value: float, expected: float) -> Level:
        return level(
            fixed(0, [10, 20], [-50.0, -50.0]),
            fixed(1, [10, 20], [elbo, elbo]),
            chose("paper", 0, [15, 15], [-50.0, elbo], expected=expected),
            chose("paper", 1, [15, 15], [elbo, -142.0], expected=1),
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


def test_one_size_a_row_makes_the_same_curve_as_all_in_one() -> None:
    together = level(fixed(0, [10, 20], [-3.0, -2.0]))
    apart = level(fixed(0, [20], [-2.0]), fixed(0, [10], [-3.0]))
    assert together.curves("elbo") == apart.curves("elbo") == ([10, 20], [[-3.0, -2.0]])


def test_a_seed_whose_curve_is_incomplete_is_left_out_of_the_band() -> None:
    found = level(fixed(0, [10, 20], [-3.0, -2.0]), fixed(1, [10], [-9.0]))
    assert found.curves("elbo") == ([10, 20], [[-3.0, -2.0]])


def test_the_papers_number_is_expected_and_a_searchs_number_is_kept() -> None:
    found = level(
        chose("paper", 0, [9, 11], [0, 0], expected=10.4), chose("fast", 0, [7], [0], expected=8)
    )
    assert found.numbers("paper") == {0: 10.4}
    assert found.numbers("fast") == {0: 7}


def paper_levels(*numbers: tuple[float, float]) -> list[Level]:
    return [
        level(*(chose("paper", seed, [1], [0], expected=n) for seed, n in enumerate(each)), value=i)
        for i, each in enumerate(numbers)
    ]


def test_falling_means_at_every_step() -> None:
    (line,) = falling_claim("fewer", paper_levels((9, 8), (7, 7), (3, 5)), "paper")
    assert line.startswith("agrees: fewer, the paper's procedure (8.5, 7.0, 4.0 points")
    assert "in 2 of 2 seeds" in line
    (line,) = falling_claim("fewer", paper_levels((9, 8), (3, 5), (3, 5)), "paper")
    assert line.startswith("does not agree:")
    assert "in 0 of 2 seeds" in line
    (unseen,) = falling_claim("fewer", paper_levels((8.02, 8.02), (8.01, 8.01)), "paper")
    assert unseen.startswith("does not agree: fewer, the paper's procedure (8.0, 8.0 points")
    (up,) = falling_claim("fewer", paper_levels((1, 1), (2, 2), (3, 3)), "paper")
    assert "rank correlation by seed 1.00, 1.00;" in up
    (still,) = falling_claim("fewer", paper_levels((2, 2), (2, 2)), "paper")
    assert still.startswith("does not agree")
    assert "rank correlation by seed 0.00, 0.00;" in still
    (apart,) = falling_claim("fewer", paper_levels((1, 9), (2, 8), (3, 7)), "paper")
    assert "rank correlation by seed 1.00, -1.00;" in apart


@pytest.mark.parametrize(("elbo", "agrees"), [(-49.2, True), (-51.5, False), (-30.0, True)])
def test_on_or_above_allows_a_hundredth_of_a_nat_a_row(elbo: float, agrees: bool) -> None:
    levels = [level(fixed(0, [10, 20], [-50.0, -50.0]), chose("fast", 0, [15], [elbo]))]
    (line,) = curve_claim("above", levels, "fast", "elbo", sign=1)
    assert line.startswith("agrees" if agrees else "does not agree")
    (line,) = curve_claim("below", levels, "fast", "elbo", sign=-1)
    assert line.startswith("does not agree" if elbo > -49 else "agrees")


def test_runs_on_the_wrong_side_are_counted_one_by_one() -> None:
    runs = [chose("fast", seed, [15], [-50.0 + d]) for seed, d in enumerate((0.5, -0.1, -0.2))]
    curves = [fixed(seed, [10, 20], [-50.0, -50.0]) for seed in range(3)]
    (line,) = curve_claim("above", [level(*curves, *runs)], "fast", "elbo", sign=1)
    assert line.startswith("agrees")
    assert "2 of 3 runs on the wrong side of the curve by any amount" in line


def test_what_cannot_be_compared_is_not_judged() -> None:
    curve = fixed(0, [10, 20], [-50.0, -50.0])
    outside = level(curve, chose("auto", 0, [90], [0.0]))
    assert curve_claim("above", [outside], "auto", "elbo", sign=1) == []
    inside = level(curve, chose("auto", 0, [15], [0.0]))
    (line,) = curve_claim("above", [outside, inside], "auto", "elbo", sign=1)
    assert line.startswith("agrees")
    assert "1 of 2 sets outside the curve, not judged" in line
    assert "0 of 1 run on the wrong side" in line
    assert falling_claim("fewer", [inside, level(curve)], "auto") == []


def test_a_seed_without_a_run_at_every_level_does_not_count() -> None:
    levels = [
        level(chose("fast", 0, [9], [0]), chose("fast", 1, [1], [0])),
        level(chose("fast", 0, [5], [0]), value=1),
    ]
    (line,) = falling_claim("fewer", levels, "fast")
    assert line.startswith("agrees: fewer, the fast schedule (9.0, 5.0 points")
    assert "1 of 1 seed)" in line


def test_groups_come_as_given_and_levels_from_least_to_most() -> None:
    levels = [level(value=2, group="b"), level(value=1, group="b"), level(value=1, group="a")]
    assert [(g, [one.value for one in mine]) for g, mine in grouped(levels)] == [
        ("b", [1, 2]),
        ("a", [1]),
    ]


def test_the_figure_has_a_panel_for_each_level(tmp_path) -> None:
    rows = [
        fixed(0, [10, 20], [-50.0, -40.0]),
        chose("paper", 0, [12, 14], [-48.0, -45.0], expected=13),
        chose("auto", 0, [18], [-41.0]),
    ]
    levels = [level(*rows, value=v, group=g) for g, v in (("a", 0.0), ("a", 1.0), ("b", 0.0))]
    words = {"column": "elbo", "said": "nats", "titles": lambda level: level.group}
    path = draw_levels(levels, tmp_path / "a.png", **words)
    small = draw_levels(levels[:1], tmp_path / "b.png", **words)
    assert imread(path).shape[1] > 1.5 * imread(small).shape[1]
