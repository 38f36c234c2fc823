"""The frontier against the best of all subsets."""

from typing import Any

import pytest
import torch

from helpers.selection_problems import SEARCHED, problem
from winnowgp.gradients import all_masks
from winnowgp.point_processes import SquaredCardinality
from winnowgp.selection import Frontier, SizeFrontier, search_frontier
from winnowgp.selection.frontier import multistart_search

cases = pytest.mark.parametrize("case", SEARCHED, ids=str)


@cases
@pytest.mark.parametrize("alpha", [0.05, 0.5, 5.0])
def test_multistart_search_finds_best_of_all_subsets(alpha: float, case: dict[str, Any]) -> None:
    s = problem(32, **case).statistics
    masks = all_masks(s.K)
    values = s.value(masks)
    table = SquaredCardinality(s.K, alpha).log_weights(values)
    best = (values + table[masks.sum(dim=1)]).max().item()
    result, _ = multistart_search(s, search_frontier(s), log_weights=table)
    assert result.score == pytest.approx(best, abs=2e-3, rel=1e-6)


def test_multistart_search_improves_poor_frontier() -> None:
    s = problem(32).statistics
    masks = torch.ones(9, 8, dtype=torch.bool).tril(-1)
    poor = Frontier(bounds=s.value(masks), masks=masks, N=s.N)
    table = SquaredCardinality(8, 5.0).log_weights(poor.bounds)
    result, frontier = multistart_search(s, poor, log_weights=table)
    M = int(result.mask.sum())
    assert frontier.bounds[M].item() == pytest.approx(result.bound, rel=1e-7)
    assert torch.equal(frontier.masks[M], result.mask)
    assert (frontier.bounds >= poor.bounds).all()
    assert frontier.bounds[M] > poor.bounds[M] + 1


@cases
def test_search_frontier_is_close_to_best_of_each_size(case: dict[str, Any]) -> None:
    s = problem(33, **case).statistics
    masks = all_masks(s.K)
    values, sizes = s.value(masks), masks.sum(dim=1)
    frontier = search_frontier(s)
    exact = torch.stack([values[sizes == M].max() for M in range(s.K + 1)])
    assert (frontier.masks.sum(dim=1) == frontier.sizes).all()
    torch.testing.assert_close(frontier.bounds, s.value(frontier.masks), rtol=1e-7, atol=1e-3)
    assert (frontier.bounds <= exact + 1e-3).all()
    assert ((exact - frontier.bounds).abs() < 1e-3).double().mean().item() >= 0.6


def test_search_frontier_permutes_with_candidates() -> None:
    order = torch.randperm(8, generator=torch.Generator().manual_seed(2))
    straight, permuted = (search_frontier(problem(35, order=o).statistics) for o in (None, order))
    torch.testing.assert_close(straight.bounds, permuted.bounds, rtol=1e-7, atol=1e-4)
    assert torch.equal(straight.masks[:, order], permuted.masks)


def test_search_frontier_works_with_one_candidate() -> None:
    s = problem(36, K=1).statistics
    frontier = search_frontier(s)
    assert frontier.sizes.tolist() == [0, 1]
    torch.testing.assert_close(frontier.bounds, s.value(all_masks(1)))


def test_search_frontier_works_in_float32() -> None:
    s = problem(37, K=30, N=100, dtype=torch.float32).statistics
    frontier = search_frontier(s)
    torch.testing.assert_close(frontier.bounds, s.value(frontier.masks), rtol=1e-3, atol=0.5)


def bounds(*values: float) -> Frontier:
    masks = torch.ones(len(values), len(values) - 1, dtype=torch.bool).tril(-1)
    return Frontier(torch.tensor(values, dtype=torch.float64), masks, N=10)


def test_size_frontier_is_the_envelope_of_frontiers() -> None:
    frontier = SizeFrontier.of(bounds(-9.0, -5.0, -6.0), bounds(-8.0, -7.0), N=10)
    assert frontier.elbos.tolist() == [-8.0, -5.0, -6.0]
    # Two points can do what one does.
    assert frontier.envelope.tolist() == [-8.0, -5.0, -5.0]
    assert frontier.gaps.tolist() == pytest.approx([0.3, 0.0, 0.1])


def test_size_frontier_accepts_the_same_model_up_to_rounding() -> None:
    frontier = SizeFrontier.of(bounds(-9.0, -5.0), N=10)
    same = frontier.with_model(1, elbo=-5.0 - 1e-10, log_density=-0.3)
    assert same.log_densities[1] == -0.3
    assert same.elbos[1] == -5.0 - 1e-10
    worse = frontier.with_model(1, elbo=-5.0 - 1e-4, log_density=-0.3)
    assert worse.log_densities[1].isnan()
    # A density that is known counts a little, once.
    nearly = frontier.with_model(1, elbo=-5.0 - 1e-6, log_density=-0.2)
    assert nearly.log_densities[1] == -0.2
    assert same.with_model(1, elbo=-5.0 - 1e-6, log_density=-0.2).log_densities[1] == -0.3
    longer = frontier.with_model(3, elbo=-4.0)
    assert longer.elbos.tolist() == [-9.0, -5.0, -torch.inf, -4.0]
    assert longer.envelope.tolist() == [-9.0, -5.0, -5.0, -4.0]
