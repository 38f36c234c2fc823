"""Greedy paths and local searches against enumeration."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers.selection_problems import SEARCHED, line_problem, neighbours, problem
from winnowgp.errors import InputError
from winnowgp.gradients import all_masks
from winnowgp.point_processes import SquaredCardinality
from winnowgp.selection import (
    SubsetStatistics,
    backward_elimination,
    forward_selection,
    local_search,
)
from winnowgp.selection.search import Path, oscillating_search, swap_search

cases = pytest.mark.parametrize("case", SEARCHED, ids=str)


@cases
@pytest.mark.parametrize(("search", "sign"), [(backward_elimination, -1), (forward_selection, 1)])
def test_greedy_paths_take_best_moves_with_correct_bounds(
    search: Callable[[SubsetStatistics], Path], sign: int, case: dict[str, Any]
) -> None:
    s = problem(30, **case).statistics
    path = search(s)
    torch.testing.assert_close(path.bounds, s.value(path.masks), rtol=1e-7, atol=1e-3)
    assert (path.masks.sum(dim=1).diff() == sign).all()
    assert len(path.masks) == s.K + 1
    for now, after in zip(path.masks[:-1], path.masks[1:], strict=True):
        moves = neighbours(now)[0 if sign > 0 else 1]
        moves = moves[moves.sum(dim=1) != now.sum()]
        assert s.value(after[None])[0] >= s.value(moves).max() - 1e-3


@cases
def test_backward_elimination_starts_from_any_subset(case: dict[str, Any]) -> None:
    s = problem(30, **case).statistics
    mask = torch.arange(s.K) % 3 != 0
    path = backward_elimination(s, start=mask)
    assert torch.equal(path.masks[0], mask)
    assert path.masks.sum(dim=1).tolist() == list(range(int(mask.sum()), -1, -1))
    assert bool((path.masks[:-1] >= path.masks[1:]).all())
    torch.testing.assert_close(path.bounds, s.value(path.masks), rtol=1e-7, atol=1e-3)


def greedy_order(s: SubsetStatistics) -> list[int]:
    """The candidates in order of removal, with all gains computed afresh for every one."""
    mask, order = torch.ones(s.K, dtype=torch.bool), []
    while mask.any():
        order.append(int(s.marginal_gains(mask).masked_fill(~mask, torch.inf).argmin()))
        mask[order[-1]] = False
    return order


def removals(path: Path) -> list[int]:
    return [int((a & ~b).nonzero()) for a, b in zip(path.masks[:-1], path.masks[1:], strict=True)]


@pytest.mark.parametrize("lengthscale", [0.3, 0.8])
def test_backward_elimination_few_candidates_is_greedy(lengthscale: float) -> None:
    s = problem(3, N=150, K=60, lengthscale=lengthscale).statistics
    path = backward_elimination(s, contenders=60)
    assert removals(path) == greedy_order(s)
    torch.testing.assert_close(path.bounds, s.value(path.masks), rtol=1e-9, atol=1e-6)


@pytest.mark.parametrize(("share", "least"), [(8, -1e-2), (32, -2e-3)])
@pytest.mark.parametrize("lengthscale", [0.2, 0.5])
def test_backward_elimination_in_blocks_is_close_to_greedy(
    lengthscale: float, share: int, least: float
) -> None:
    """Bounds differ little within 0.3 nats per observation of the best bound."""
    s = problem(6, N=600, K=300, lengthscale=lengthscale, chunk=600).statistics
    path = backward_elimination(s, contenders=24, share=share)
    greedy = backward_elimination(s, contenders=s.K)
    torch.testing.assert_close(path.bounds, s.value(path.masks), rtol=1e-9, atol=1e-6)
    near = greedy.bounds > greedy.bounds.max() - 0.3 * s.N
    difference = (path.bounds - greedy.bounds)[near] / s.N
    assert 20 < len(difference) < s.K
    assert difference.mean().item() > least
    assert difference.min().item() > -2e-2


def test_backward_elimination_removes_interacting_candidates_apart() -> None:
    """Of each pair of duplicates one is redundant: no block may remove both."""
    s = problem(8, N=400, K=240, duplicates=120, lengthscale=0.2, chunk=400).statistics
    path = backward_elimination(s, smallest=120, contenders=4)
    pairs = path.masks[-1].view(2, 120)
    assert bool((pairs[0] ^ pairs[1]).all())


@pytest.mark.parametrize("contenders", [1, 8, 200])
def test_backward_elimination_redundant_candidates_have_correct_bounds(contenders: int) -> None:
    """Candidates on a line, conditioned to 1e18, and 40 candidates of which 15 are duplicates."""
    for s in (line_problem().statistics, problem(6, K=40, duplicates=15).statistics):
        path = backward_elimination(s, contenders=contenders)
        assert path.masks.sum(dim=1).tolist() == list(range(s.K, -1, -1))
        torch.testing.assert_close(path.bounds, s.value(path.masks), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("smallest", [0, 5, 17, 20, 30])
def test_backward_elimination_stops_at_smallest(smallest: int) -> None:
    s = problem(7, K=20).statistics
    whole, path = backward_elimination(s), backward_elimination(s, smallest=smallest)
    count = max(20 - smallest, 0) + 1
    assert torch.equal(path.masks, whole.masks[:count])
    torch.testing.assert_close(path.bounds, whole.bounds[:count], rtol=1e-9, atol=1e-6)


def test_backward_elimination_is_greedy_down_to_the_lowest_bound() -> None:
    s = problem(7, K=60, N=150).statistics
    whole = backward_elimination(s)
    lowest = whole.bounds[20].item()
    path = backward_elimination(s, lowest=lowest, contenders=4)
    exact = backward_elimination(s, contenders=4)
    near = int((exact.bounds >= lowest).sum())
    assert torch.equal(path.masks[:near], exact.masks[:near])
    assert path.masks.sum(dim=1).tolist() == list(range(60, -1, -1))
    torch.testing.assert_close(path.bounds, s.value(path.masks), rtol=1e-9, atol=1e-6)
    # Below it all others leave in the order of their gains.
    left = path.masks[near]
    gains = s.search_state(left).marginal_gains().masked_fill(~left, torch.inf)
    order = gains.argsort()[: int(left.sum())].tolist()
    assert removals(path)[near:] == order != removals(exact)[near:]


@cases
def test_swap_and_oscillating_search_never_lower_the_bound(
    case: dict[str, Any],
) -> None:
    s = problem(31, **case).statistics
    for mask in all_masks(s.K)[:: 2**s.K // 12]:
        before = s.value(mask[None])[0].item()
        for after, bound in (swap_search(s, mask), oscillating_search(s, mask, depth=2)):
            assert int(after.sum()) == int(mask.sum())
            assert bound >= before - 1e-3
            assert bound == pytest.approx(s.value(after[None])[0].item(), rel=1e-7, abs=1e-3)


def test_local_search_from_empty_and_full_set_agree() -> None:
    s = problem(34).statistics
    table = SquaredCardinality(8, 0.2).log_weights(s.terms[0].L)
    empty, full = torch.zeros(8, dtype=torch.bool), torch.ones(8, dtype=torch.bool)
    low, high = (local_search(s, start, log_weights=table) for start in (empty, full))
    assert low.score == pytest.approx(high.score, abs=1e-3)


def test_local_search_result_is_local_optimum() -> None:
    s = problem(34).statistics
    table = SquaredCardinality(8, 0.2).log_weights(s.terms[0].L)
    result = local_search(s, torch.zeros(8, dtype=torch.bool), log_weights=table)
    assert result.bound == pytest.approx(s.value(result.mask[None])[0].item(), rel=1e-7)
    assert result.score == pytest.approx(result.bound + table[int(result.mask.sum())].item())
    near = torch.cat(neighbours(result.mask))
    assert (s.value(near) + table[near.sum(dim=1)]).max().item() <= result.score + 1e-3


def test_forward_selection_stops_at_max_size_or_without_improvement() -> None:
    s = problem(38, K=12).statistics
    assert len(forward_selection(s, max_size=3).masks) == 4
    strong = SquaredCardinality(12, 1e9).log_weights(s.terms[0].L)
    assert len(forward_selection(s, log_weights=strong).masks) == 6


def test_local_search_from_forbidden_size_raises() -> None:
    s = problem(34).statistics
    hard = torch.tensor([0.0] * 4 + [float("-inf")] * 5, dtype=torch.float64)
    with pytest.raises(InputError, match="must have a size that `log_weights` allows"):
        local_search(s, torch.ones(8, dtype=torch.bool), log_weights=hard)
