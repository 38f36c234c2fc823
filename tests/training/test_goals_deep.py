"""Goals on several frontiers made by hand."""

import math
from itertools import product

import pytest
import torch

from winnowgp.errors import InputError
from winnowgp.selection import Frontier
from winnowgp.training import FixedAlpha, MaxCost, MaxPoints, MaxPredictTime, Tolerance


def frontier(*bounds: float, N: int = 10) -> Frontier:
    """The first M of K candidates are the best M."""
    K = len(bounds) - 1
    masks = torch.ones(K + 1, K, dtype=torch.bool).tril(-1)
    return Frontier(torch.tensor(bounds, dtype=torch.float64), masks, N)


# The second layer gains ten times less from its points, and nothing from its last one.
FRONTIERS = [
    frontier(0.0, 50.0, 80.0, 90.0, 96.0, 99.0, 100.0),
    frontier(90.0, 95.0, 98.0, 99.0, 99.6, 99.9, 99.8),
    frontier(0.0, 99.0, 99.1),
]


def sizes(alphas: tuple[float, ...]) -> list[int]:
    pairs = zip(FRONTIERS, alphas, strict=True)
    return [int(each.best_for_alpha(alpha).mask.sum()) for each, alpha in pairs]


def lost(counts: list[int]) -> float:
    pairs = zip(FRONTIERS, counts, strict=True)
    return sum(each.bounds.max().item() - each.bounds[M].item() for each, M in pairs)


@pytest.mark.parametrize("nats", [0.001, 0.05, 0.2, 1.0, 3.0, 8.0])
def test_tolerance_alphas_use_the_whole_tolerance(nats: float) -> None:
    alphas = Tolerance(nats).alphas(FRONTIERS)
    assert len(set(alphas)) == 1
    # The tolerance of ten rows, summed over layers.
    assert lost(sizes(alphas)) <= 10 * nats
    stronger = tuple(alpha * (1 + 1e-6) for alpha in alphas)
    assert lost(sizes(stronger)) > 10 * nats


def test_tolerance_alphas_larger_select_fewer_points() -> None:
    kept = [sum(sizes(Tolerance(nats).alphas(FRONTIERS))) for nats in (0.01, 0.3, 2.0, 9.0)]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > kept[-1]


def test_tolerance_default_is_one_hundredth() -> None:
    assert Tolerance().alphas(FRONTIERS) == Tolerance(0.01).alphas(FRONTIERS)


@pytest.mark.parametrize("cost", [3.0, 6.0, 14.0, 30.0, 60.0])
def test_max_cost_alphas_use_the_budget(cost: float) -> None:
    alphas = MaxCost(cost).alphas(FRONTIERS)
    assert len(set(alphas)) == 1
    assert sum(M**2 for M in sizes(alphas)) <= cost
    weaker = tuple(alpha * (1 - 1e-6) for alpha in alphas)
    assert sum(M**2 for M in sizes(weaker)) > cost


def test_max_cost_counts_one_point_of_empty_layers() -> None:
    poor = [frontier(90.0, 90.0, 90.0), frontier(0.0, 50.0, 80.0, 90.0)]
    (first, second) = MaxCost(4.0).alphas(poor)
    assert first == second
    kept = [int(each.best_for_alpha(first).mask.sum()) for each in poor]
    assert kept == [0, 1]


def test_max_cost_equal_alphas_are_optimal() -> None:
    """Of all allocations that cost no more, none has a higher sum of bounds."""
    counts = sizes(MaxCost(30.0).alphas(FRONTIERS))
    cost = sum(M**2 for M in counts)
    ranges = [range(len(each.bounds)) for each in FRONTIERS]
    others = [list(c) for c in product(*ranges) if sum(M**2 for M in c) <= cost]
    assert lost(counts) == pytest.approx(min(lost(other) for other in others))


def test_max_cost_large_budget_selects_all_useful_points() -> None:
    assert sizes(MaxCost(1e6).alphas(FRONTIERS)) == [6, 5, 2]


PRICES = (0.2, 1.0, 5.0)


def microseconds(counts: tuple[int, ...]) -> float:
    return sum(price * M**2 for M, price in zip(counts, PRICES, strict=True))


def test_tolerance_alphas_follow_prices() -> None:
    """No allocation that loses as little is cheaper."""
    alphas = Tolerance(0.5).alphas(FRONTIERS, PRICES)
    assert alphas == pytest.approx([alphas[1] * price for price in PRICES])
    counts = sizes(alphas)
    assert lost(counts) <= 5
    ranges = [range(len(each.bounds)) for each in FRONTIERS]
    others = [list(c) for c in product(*ranges) if lost(list(c)) <= lost(counts)]
    assert microseconds(tuple(counts)) == pytest.approx(min(microseconds(tuple(c)) for c in others))


@pytest.mark.parametrize("limit", [6.3, 9.0, 20.0, 1e3])
def test_max_predict_time_uses_the_time(limit: float) -> None:
    measured = []

    def clock(counts: tuple[int, ...]) -> float:
        measured.append(counts)
        return microseconds(counts)

    alphas = MaxPredictTime(limit, clock).alphas(FRONTIERS, PRICES)
    assert alphas == pytest.approx([alphas[1] * price for price in PRICES])

    def kept(factor: float) -> tuple[int, ...]:
        return tuple(max(M, 1) for M in sizes(tuple(factor * alpha for alpha in alphas)))

    assert microseconds(kept(1.0)) <= limit
    assert limit == 1e3 or microseconds(kept(1 - 1e-6)) > limit
    # Times are measured once.
    assert len(measured) == len(set(measured))


def test_max_predict_time_impossible_or_shallow_raises() -> None:
    with pytest.raises(InputError, match=r"`max_predict_us` must allow .* got 3, .* takes 6.2"):
        MaxPredictTime(3.0, microseconds).alphas(FRONTIERS, PRICES)
    with pytest.raises(InputError, match="for deep GPs"):
        MaxPredictTime(3.0, microseconds).size(FRONTIERS[0], reference=0.0)


def test_fixed_alpha_per_layer() -> None:
    assert FixedAlpha(0.3).alphas(FRONTIERS) == (0.3, 0.3, 0.3)
    assert FixedAlpha((0.1, 2.0, 3.0)).alphas(FRONTIERS) == (0.1, 2.0, 3.0)
    assert sizes(FixedAlpha((1e-6, 0.5, 1e6)).alphas(FRONTIERS)) == [6, 2, 0]
    with pytest.raises(InputError, match="one for each of 3 layers"):
        FixedAlpha((0.1, 0.2)).alphas(FRONTIERS)


@pytest.mark.parametrize("alpha", [0.0, -0.1, math.inf, math.nan, (0.1, 0.0), ()])
def test_fixed_alpha_per_layer_invalid_raises(alpha) -> None:
    with pytest.raises(InputError, match=r"`alpha` must be positive.*Larger values select"):
        FixedAlpha(alpha)


@pytest.mark.parametrize("nats", [0.0, -0.1, math.nan])
def test_tolerance_invalid_raises(nats: float) -> None:
    with pytest.raises(InputError, match=r"`tolerance` must be positive nats.*got .*Larger values"):
        Tolerance(nats)


@pytest.mark.parametrize("cost", [0.0, -4.0, math.nan])
def test_max_cost_invalid_raises(cost: float) -> None:
    with pytest.raises(InputError, match="`max_cost`"):
        MaxCost(cost)


@pytest.mark.parametrize(("cost", "size"), [(1.0, 1), (8.9, 2), (9.0, 3), (1e300, 6)])
def test_max_cost_size_is_root_of_cost(cost: float, size: int) -> None:
    frontier = FRONTIERS[0]
    assert len(frontier.bounds) == 7
    assert MaxCost(cost).size(frontier, reference=0.0) == size


def test_max_points_several_frontiers_raises() -> None:
    with pytest.raises(InputError, match="`MaxCost` limits"):
        MaxPoints(3).alphas(FRONTIERS)
