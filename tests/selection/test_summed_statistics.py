"""Sums of statistics over kernels, and separate inducing points for means and covariances."""

from dataclasses import replace

import pytest
import torch

from helpers.selection_problems import neighbours, problem
from winnowgp.errors import InputError
from winnowgp.gradients import all_masks
from winnowgp.point_processes import SquaredCardinality
from winnowgp.selection import SubsetStatistics, elimination_frontier, fit_inclusion, local_search
from winnowgp.selection.statistics import Roots, SummedStatistics

K = 6


def terms() -> tuple[SubsetStatistics, SubsetStatistics]:
    """The same candidates and rows under two kernels; the second has three outputs."""
    first = problem(1, K=K)
    second = replace(first, lengthscale=2.5 * first.lengthscale, variance=0.5)
    return first.statistics, replace(second, Y=second.Y.repeat(1, 3)).statistics


def test_summed_value_equals_sum_at_every_subset() -> None:
    one, other = terms()
    masks = all_masks(K)
    total = SummedStatistics((one, other)).value(masks)
    torch.testing.assert_close(total, one.value(masks) + other.value(masks), rtol=1e-12, atol=0)
    assert not torch.allclose(one.value(masks), other.value(masks))


def test_summed_marginal_gains_equal_differences_of_value() -> None:
    s = SummedStatistics(terms())
    for mask in all_masks(K)[::3]:
        up, down = neighbours(mask)
        torch.testing.assert_close(
            s.marginal_gains(mask), s.value(up) - s.value(down), rtol=1e-6, atol=1e-5
        )


def test_summed_elimination_frontier_has_correct_bounds() -> None:
    s = SummedStatistics(terms())
    frontier = elimination_frontier(s)
    assert frontier.masks.sum(1).tolist() == list(range(K + 1))
    torch.testing.assert_close(s.value(frontier.masks), frontier.bounds, rtol=1e-7, atol=1e-6)
    torch.testing.assert_close(s.empty, frontier.bounds[0], rtol=1e-7, atol=1e-6)


def test_summed_contenders_equal_toggle() -> None:
    s = SummedStatistics(terms())
    state = s.search_state(torch.ones(K, dtype=torch.bool))
    contenders = state.contenders(torch.arange(K))
    for at in (2, 5, 0):
        state = state.toggle(at, gain=state.marginal_gains()[at])
        contenders.remove(at)
        left = state.included
        assert torch.equal(left, torch.from_numpy(contenders.included))
        gains = torch.from_numpy(contenders.marginal_gains())
        torch.testing.assert_close(gains[left], state.marginal_gains()[left], rtol=1e-8, atol=1e-8)


def best_of_all(s: SummedStatistics, alpha: float) -> tuple[torch.Tensor, float]:
    masks = all_masks(K)
    scores = s.value(masks) - alpha * masks.sum(1).square()
    return masks[scores.argmax()], scores.max().item()


def test_summed_local_search_finds_best_of_all_subsets() -> None:
    s = SummedStatistics(terms())
    mask, best = best_of_all(s, 15.0)
    assert 0 < mask.sum() < K
    weights = SquaredCardinality(K, 15.0).log_weights(s.empty)
    result = local_search(s, elimination_frontier(s).best(weights).mask, log_weights=weights)
    assert result.score == pytest.approx(best, abs=1e-6)


def test_summed_fit_inclusion_selects_best_of_all_subsets(generator: torch.Generator) -> None:
    """Marginal gains of tens of nats give inclusion probabilities close to 0 or 1."""
    s = SummedStatistics(terms())
    fitted = fit_inclusion(s, prior=SquaredCardinality(K, 15.0), generator=generator)
    assert torch.equal(fitted.q.inclusion > 0.5, best_of_all(s, 15.0)[0])


def test_summed_statistics_different_candidates_raise() -> None:
    with pytest.raises(InputError, match=r"`terms` must be .* the same candidates"):
        SummedStatistics((problem(1, K=5).statistics, problem(1, K=6).statistics))


@pytest.mark.parametrize("means", [True, False])
def test_statistics_separate_means_and_covariances(means: bool) -> None:
    """L(Z) − L(∅) = ½ [fit + P (explained − log det)]; a root may hold either term."""
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
