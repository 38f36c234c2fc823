"""States in blocks and in few coordinates, and problems of fewer candidates, against `value`."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from helpers.selection_problems import line_problem, neighbours, problem
from winnowgp.selection import SubsetStatistics
from winnowgp.selection.objective import subset_statistics


def summed() -> SubsetStatistics:
    """Two kernels; the second has three outputs and other row weights for one of them."""
    first = problem(1, K=14)
    second = replace(first, lengthscale=2.5, variance=0.5, Y=first.Y.repeat(1, 3))
    third = replace(second, Y=first.Y, weights=2 * first.weights.flip(0))
    other = subset_statistics(second.factor.L, second.moments, third.moments)
    return SubsetStatistics((*first.statistics.terms, *other.terms))


OBJECTIVES: dict[str, Callable[[], SubsetStatistics]] = {
    "plain": lambda: problem(2, K=14).statistics,
    "outputs": lambda: problem(3, K=14, P=3).statistics,
    "duplicates": lambda: problem(4, K=14, duplicates=4).statistics,
    "smooth": lambda: problem(5, K=14, noise=1e-4, lengthscale=3.0).statistics,
    "line": lambda: line_problem().statistics,
    "summed": summed,
}
objectives = pytest.mark.parametrize("make", OBJECTIVES.values(), ids=OBJECTIVES.keys())


def subset(K: int, seed: int, *, share: float = 0.6) -> Tensor:
    return torch.rand(K, generator=torch.Generator().manual_seed(seed)) < share


def everything(s: SubsetStatistics) -> Tensor:
    return torch.ones(s.K, dtype=torch.bool)


@objectives
def test_restrict_keeps_bounds_of_subsets(make: Callable[[], SubsetStatistics]) -> None:
    s = make()
    mask = subset(s.K, 0)
    part = s.restrict(mask)
    assert int(mask.sum()) == part.K
    inner = torch.stack([subset(part.K, seed) for seed in range(1, 9)] + [everything(part)])
    masks = torch.zeros(len(inner), s.K, dtype=torch.bool)
    masks[:, mask] = inner
    torch.testing.assert_close(part.value(inner), s.value(masks), rtol=1e-7, atol=1e-5)


@objectives
def test_restrict_to_nothing_leaves_the_empty_bound(make: Callable[[], SubsetStatistics]) -> None:
    s = make()
    part = s.restrict(~everything(s))
    state = part.search_state(everything(part))
    assert part.K == 0
    torch.testing.assert_close(state.bound, s.empty, rtol=1e-12, atol=0)


@objectives
def test_state_of_all_candidates_matches_value(make: Callable[[], SubsetStatistics]) -> None:
    s = make()
    state = s.search_state(everything(s))
    up, down = neighbours(everything(s))
    torch.testing.assert_close(state.bound, s.value(up)[0], rtol=1e-7, atol=1e-5)
    expected = s.value(up) - s.value(down)
    torch.testing.assert_close(state.marginal_gains(), expected, rtol=1e-6, atol=1e-4)


@objectives
@pytest.mark.parametrize("share", [1, 2, 7])
def test_remove_block_matches_recomputed_state(
    make: Callable[[], SubsetStatistics], share: int
) -> None:
    s = make()
    rows = torch.randperm(s.K, generator=torch.Generator().manual_seed(1))[: s.K // share]
    removed = torch.arange(len(rows) + 1)[:, None] > torch.arange(len(rows))
    masks = everything(s).repeat(len(rows) + 1, 1)
    masks[:, rows] = ~removed
    before = s.search_state(everything(s))
    removal = before.block_removal(rows)
    gains = -s.value(masks).diff()
    torch.testing.assert_close(removal.gains, gains, rtol=1e-6, atol=1e-4)
    after, expected = before.remove_block(removal), s.search_state(masks[-1])
    assert torch.equal(after.mask, masks[-1])
    assert torch.equal(after.candidates, masks[-1].nonzero()[:, 0])
    torch.testing.assert_close(after.bound, expected.bound, rtol=1e-7, atol=1e-5)
    gains = expected.marginal_gains()[masks[-1]]
    torch.testing.assert_close(after.marginal_gains(), gains, rtol=1e-6, atol=1e-4)


def test_cosines_are_partial_correlations() -> None:
    """The inner products of duals are the entries of K⁻¹ and of S⁻¹."""
    s = problem(2, K=14).statistics
    rows = torch.tensor([9, 2, 5])
    covariances = [A @ A.mT for A in (s.terms[0].L, s.terms[0].data[0].LR)]
    expected = []
    for precision in (torch.linalg.inv(A) for A in covariances):
        scale = precision.diagonal().rsqrt()
        expected.append((scale[:, None] * precision * scale).abs()[rows][:, rows])
    cosines = s.search_state(everything(s)).cosines(rows)
    torch.testing.assert_close(cosines, torch.maximum(*expected), rtol=1e-6, atol=1e-6)


@objectives
def test_contenders_follow_gains_while_they_leave(
    make: Callable[[], SubsetStatistics],
) -> None:
    s = make()
    state = s.search_state(everything(s))
    rows = torch.randperm(s.K, generator=torch.Generator().manual_seed(2))[:6]
    few, mask = state.contenders(rows), everything(s)
    for at in (4, 0, 3):
        few.remove(at)
        mask[rows[at]] = False
        left = torch.from_numpy(few.included)
        gains = torch.from_numpy(few.marginal_gains())
        assert gains[~left].isinf().all()
        expected = s.marginal_gains(mask)[rows][left]
        torch.testing.assert_close(gains[left], expected, rtol=1e-6, atol=1e-4)


@objectives
def test_remove_least_takes_the_smallest_gain_each_time(
    make: Callable[[], SubsetStatistics],
) -> None:
    s = make()
    rows = torch.randperm(s.K, generator=torch.Generator().manual_seed(2))[:6]
    mask, expected, least = everything(s), [], []
    for _ in range(4):
        gains = s.marginal_gains(mask)[rows].masked_fill(~mask[rows], torch.inf)
        expected.append(int(gains.argmin()))
        least.append(gains.min())
        mask[rows[expected[-1]]] = False
    order, gains = s.search_state(everything(s)).contenders(rows).remove_least(4)
    assert order.tolist() == expected
    torch.testing.assert_close(gains, torch.stack(least), rtol=1e-6, atol=1e-4)


@objectives
def test_contenders_of_all_rows_follow_gains_without_a_factorisation(
    make: Callable[[], SubsetStatistics],
) -> None:
    s = make()
    few, mask = s.search_state(everything(s)).contenders(torch.arange(s.K).flip(0)), everything(s)
    for at in (4, 0, 3):
        few.remove(at)
        mask[s.K - 1 - at] = False
    gains = torch.from_numpy(few.marginal_gains()).flip(0)
    torch.testing.assert_close(gains[mask], s.marginal_gains(mask)[mask], rtol=1e-6, atol=1e-4)
