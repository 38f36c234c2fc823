"""Functions with kernels of their own, and means and covariances with points of their own."""

from dataclasses import replace

import pytest
import torch

from helpers.selection_problems import neighbours, problem
from winnowgp.errors import InputError
from winnowgp.gradients import all_masks
from winnowgp.point_processes import SquaredCardinality
from winnowgp.selection import SubsetStatistics, elimination_frontier, fit_inclusion, local_search
from winnowgp.selection.elimination import Roots
from winnowgp.selection.statistics import SummedStatistics

K = 6


def parts() -> tuple[SubsetStatistics, SubsetStatistics]:
    """The same candidates and rows under two kernels, the second of three outputs."""
    first = problem(1, K=K)
    second = replace(first, lengthscale=2.5 * first.lengthscale, variance=0.5)
    return first.statistics, replace(second, Y=second.Y.repeat(1, 3)).statistics


def test_value_is_the_sum_at_every_subset() -> None:
    one, other = parts()
    masks = all_masks(K)
    total = SummedStatistics((one, other)).value(masks)
    torch.testing.assert_close(total, one.value(masks) + other.value(masks), rtol=1e-12, atol=0)
    assert not torch.allclose(one.value(masks), other.value(masks))


def test_flips_are_differences_of_value_at_every_subset() -> None:
    s = SummedStatistics(parts())
    for mask in all_masks(K)[::3]:
        up, down = neighbours(mask)
        torch.testing.assert_close(
            s.marginal_gains(mask), s.value(up) - s.value(down), rtol=1e-6, atol=1e-5
        )


def test_a_walk_down_has_the_bounds_of_its_sets() -> None:
    s = SummedStatistics(parts())
    frontier = elimination_frontier(s)
    assert frontier.masks.sum(1).tolist() == list(range(K + 1))
    torch.testing.assert_close(s.value(frontier.masks), frontier.bounds, rtol=1e-7, atol=1e-6)
    torch.testing.assert_close(s.empty, frontier.bounds[0], rtol=1e-7, atol=1e-6)


def test_dropping_is_flipping_out() -> None:
    s = SummedStatistics(parts())
    state = s.search_state(torch.ones(K, dtype=torch.bool))
    for at in (2, 5, 0):
        worth = state.marginal_gains()[[at]]
        flipped = s.search_state(state.mask).toggle(at, gain=worth[0])
        state = state.remove(torch.tensor([at]), gain=worth)
        assert torch.equal(state.mask, flipped.mask)
        torch.testing.assert_close(state.bound, flipped.bound, rtol=1e-10, atol=0)
        left = state.included
        torch.testing.assert_close(
            state.marginal_gains()[left], flipped.marginal_gains()[left], rtol=1e-8, atol=1e-8
        )


def best_of_all(s: SummedStatistics, alpha: float) -> tuple[torch.Tensor, float]:
    masks = all_masks(K)
    scores = s.value(masks) - alpha * masks.sum(1).square()
    return masks[scores.argmax()], scores.max().item()


def test_a_climb_ends_at_the_best_of_all_subsets() -> None:
    s = SummedStatistics(parts())
    mask, best = best_of_all(s, 15.0)
    assert 0 < mask.sum() < K
    weights = SquaredCardinality(K, 15.0).log_weights(s.empty)
    found = local_search(s, elimination_frontier(s).best(weights).mask, log_weights=weights)
    assert found.score == pytest.approx(best, abs=1e-6)


def test_learnt_inclusion_says_the_best_of_all_subsets(generator: torch.Generator) -> None:
    """Worths of tens of nats leave little to doubt."""
    s = SummedStatistics(parts())
    learnt = fit_inclusion(s, prior=SquaredCardinality(K, 15.0), generator=generator)
    assert torch.equal(learnt.q.inclusion > 0.5, best_of_all(s, 15.0)[0])


def test_parts_of_other_candidates_are_refused() -> None:
    with pytest.raises(InputError, match=r"`terms` must be .* the same candidates"):
        SummedStatistics((problem(1, K=5).statistics, problem(1, K=6).statistics))


@pytest.mark.parametrize("means", [True, False])
def test_means_and_covariances_can_be_worth_something_apart(means: bool) -> None:
    """L(Z) less L(∅) is ½ [fit + P (explained − log det)]; a root may hold either part."""
    whole = problem(4, K=K).statistics
    (root,) = whole.roots.data
    half = replace(root, P=0) if means else replace(root, y=root.y[:, :0])
    apart = SubsetStatistics(
        Roots(L=whole.roots.L, data=(half,), empty=torch.zeros(()).double(), N=1)
    )
    for mask in all_masks(K)[1::5]:
        # ½ bᵢᵀ Sᵢᵢ⁻¹ bᵢ with b = L R y and S = (L R)(L R)ᵀ
        S, b = root.LR @ root.LR.mT, root.LR @ root.y
        fit = 0.5 * (b[mask] * torch.linalg.solve(S[mask][:, mask], b[mask])).sum()
        rest = whole.value(mask[None])[0] - whole.empty - fit
        expected = fit if means else rest
        torch.testing.assert_close(apart.value(mask[None])[0], expected, rtol=1e-6, atol=1e-6)
        up, down = neighbours(mask)
        torch.testing.assert_close(
            apart.marginal_gains(mask), apart.value(up) - apart.value(down), rtol=1e-6, atol=1e-5
        )
