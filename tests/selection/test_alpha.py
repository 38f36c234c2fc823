"""α for a number of points, on a frontier made by hand."""

import math

import pytest
import torch

from winnowgp.errors import InputError
from winnowgp.selection import Frontier, alpha_at
from winnowgp.selection.frontier import MIN_ALPHA, alpha_interval, concave_hull, largest_alpha

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


@pytest.mark.parametrize("M", [0, 1, 3, 4, 5, 6, 7])
def test_the_alpha_of_a_vertex_prefers_it(M: int) -> None:
    assert preferred(alpha_at(FRONTIER, M)) == M


def test_the_alpha_of_a_size_off_the_hull_ties_the_ends_of_its_edge() -> None:
    alpha = alpha_at(FRONTIER, 2)
    assert (preferred(alpha * 1.001), preferred(alpha * 0.999)) == (1, 3)


def test_queries_of_the_frontier() -> None:
    assert FRONTIER.smallest(0.4) == 4
    assert FRONTIER.at_most(2) == 2
    assert FRONTIER.at(3).bound == -20.0


def test_a_reference_out_of_reach_takes_the_highest_bound() -> None:
    assert FRONTIER.smallest(0.01, reference=100.0) == 7


def test_negative_limits_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="`max_points`"):
        FRONTIER.at_most(-1)


@pytest.mark.parametrize("edge", [1e-7, 0.3, 2.0, 1e6])
def test_the_strongest_alpha_that_keeps_a_rule(edge: float) -> None:
    found = largest_alpha(lambda alpha: alpha <= edge)
    assert found <= edge
    assert found == pytest.approx(edge, rel=1e-9)


def test_a_rule_that_nothing_keeps_asks_for_the_weakest_alpha() -> None:
    assert largest_alpha(lambda alpha: False) == MIN_ALPHA
