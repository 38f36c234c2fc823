"""α for a number of inducing points, on a frontier written by hand."""

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


def optimal_size(alpha: float) -> int:
    return int(FRONTIER.best_for_alpha(alpha).mask.sum())


def test_concave_hull_contains_exactly_the_sizes_optimal_for_some_alpha() -> None:
    seen = {
        optimal_size(alpha) for alpha in torch.logspace(-6, 3, 2000, dtype=torch.float64).tolist()
    }
    assert set(concave_hull(FRONTIER)) == seen
    assert 2 not in seen


@pytest.mark.parametrize("M", [0, 1, 3, 4, 5])
def test_alpha_interval_ends_change_the_optimal_size(M: int) -> None:
    lowest, highest = alpha_interval(FRONTIER, M)
    if math.isfinite(highest):
        assert optimal_size(highest * 0.999) == M
        assert optimal_size(highest * 1.001) < M
    assert optimal_size(lowest * 1.001) == M
    assert optimal_size(lowest * 0.999) > M


@pytest.mark.parametrize("M", [0, 1, 3, 4, 5, 6, 7])
def test_alpha_at_vertex_makes_it_optimal(M: int) -> None:
    assert optimal_size(alpha_at(FRONTIER, M)) == M


def test_alpha_at_size_off_hull_ties_ends_of_its_edge() -> None:
    alpha = alpha_at(FRONTIER, 2)
    assert (optimal_size(alpha * 1.001), optimal_size(alpha * 0.999)) == (1, 3)


def test_frontier_queries_return_expected_sizes() -> None:
    assert FRONTIER.smallest(0.4) == 4
    assert FRONTIER.at_most(2) == 2
    assert FRONTIER.at(3).bound == -20.0


def test_smallest_unreachable_reference_returns_best_bound() -> None:
    assert FRONTIER.smallest(0.01, reference=100.0) == 7


def test_at_most_negative_raises() -> None:
    with pytest.raises(InputError, match="`max_points`"):
        FRONTIER.at_most(-1)


@pytest.mark.parametrize("edge", [1e-7, 0.3, 2.0, 1e6])
def test_largest_alpha_finds_the_threshold(edge: float) -> None:
    alpha = largest_alpha(lambda value: value <= edge)
    assert alpha <= edge
    assert alpha == pytest.approx(edge, rel=1e-9)


def test_largest_alpha_unsatisfiable_returns_minimum() -> None:
    assert largest_alpha(lambda alpha: False) == MIN_ALPHA
