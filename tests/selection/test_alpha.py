"""α from what a user states, on a frontier made by hand."""

import math

import pytest
import torch

from winnowgp.errors import InputError
from winnowgp.selection import Frontier, alpha_for_size, alpha_for_time, alpha_for_tolerance
from winnowgp.selection.alpha import alpha_interval, concave_hull

FRONTIER = Frontier(
    bounds=torch.tensor([-100, -60, -58, -20, -12, -9, -8.5, -8.4], dtype=torch.float64),
    masks=torch.ones(8, 7, dtype=torch.bool).tril(-1),
    N=10,
)


def preferred(alpha: float) -> int:
    return int(FRONTIER.best_for_alpha(alpha).mask.sum())


def test_hull_vertices_are_exactly_the_sizes_some_alpha_prefers() -> None:
    seen = {preferred(alpha) for alpha in torch.logspace(-6, 3, 2000, dtype=torch.float64).tolist()}
    assert set(concave_hull(FRONTIER)) == seen
    assert 2 not in seen


@pytest.mark.parametrize("M", [0, 1, 3, 4, 5])
def test_interval_ends_are_where_the_preferred_size_changes(M: int) -> None:
    lowest, highest = alpha_interval(FRONTIER, M)
    if math.isfinite(highest):
        assert preferred(highest * 0.999) == M
        assert preferred(highest * 1.001) < M
    assert preferred(lowest * 1.001) == M
    assert preferred(lowest * 0.999) > M


@pytest.mark.parametrize("tolerance", [0.0, 0.01, 0.05, 0.4, 1.2, 5.0, 6.0, 20.0])
def test_tolerance_is_kept_by_the_alpha_it_gives(tolerance: float) -> None:
    choice = alpha_for_tolerance(FRONTIER, tolerance)
    best = FRONTIER.best_for_alpha(choice.alpha)
    assert int(best.mask.sum()) == choice.M
    assert choice.given_up <= tolerance * FRONTIER.N + 1e-9
    assert choice.given_up == pytest.approx(-8.4 - best.bound)


def test_a_reference_out_of_reach_takes_the_highest_bound() -> None:
    choice = alpha_for_tolerance(FRONTIER, 0.01, reference=100.0)
    assert choice.M == 7
    assert choice.given_up == pytest.approx(108.4)


@pytest.mark.parametrize(("limit", "M"), [(0, 0), (1, 1), (2, 1), (3, 3), (7, 7), (50, 7)])
def test_max_points_is_kept_by_the_alpha_it_gives(limit: int, M: int) -> None:
    choice = alpha_for_size(FRONTIER, limit)
    assert choice.M == M
    assert preferred(choice.alpha) == M


def test_prediction_time_is_kept() -> None:
    choice = alpha_for_time(FRONTIER, 10.0, predict_us=lambda M: 1.0 + M**2 / 2)
    assert choice.M == 4
    with pytest.raises(InputError, match="`max_predict_us`"):
        alpha_for_time(FRONTIER, 0.5, predict_us=lambda M: 1.0 + M)


def test_queries_of_the_frontier() -> None:
    assert FRONTIER.smallest(0.4) == 4
    assert FRONTIER.at_most(2) == 2
    assert FRONTIER.at(3).bound == -20.0


def test_negative_limits_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="`tolerance`"):
        alpha_for_tolerance(FRONTIER, -1.0)
    for refused in (alpha_for_size, Frontier.at_most):
        with pytest.raises(InputError, match="`max_points`"):
            refused(FRONTIER, -1)
