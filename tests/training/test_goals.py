"""Goals on a frontier made by hand."""

import math

import pytest
import torch

from winnowgp.errors import InputError
from winnowgp.selection import Frontier
from winnowgp.training import FixedAlpha, Goal, MaxPoints, Tolerance


def frontier(*bounds: float, N: int = 10) -> Frontier:
    """The first M of K candidates are the best M."""
    K = len(bounds) - 1
    masks = torch.ones(K + 1, K, dtype=torch.bool).tril(-1)
    return Frontier(torch.tensor(bounds, dtype=torch.float64), masks, N)


# Differences 50, 30, 10, 1, −2, so that five points are worse than four.
FRONTIER = frontier(0.0, 50.0, 80.0, 90.0, 91.0, 89.0)


@pytest.mark.parametrize(
    ("goal", "size"),
    [
        # With ten rows, τ nats per row are 10 τ nats.
        (Tolerance(0.05), 4),
        (Tolerance(0.1), 3),
        (Tolerance(1.0), 3),
        (Tolerance(1.1), 2),
        (Tolerance(4.2), 1),
        (Tolerance(9.1), 0),
        (Tolerance(math.inf), 0),
        (MaxPoints(1), 1),
        (MaxPoints(3), 3),
        # Five are allowed, and the fifth has no gain.
        (MaxPoints(5), 4),
        (MaxPoints(100), 4),
        # L − α M²: the gains 50, 30, 10, 1 against α times 1, 3, 5, 7.
        (FixedAlpha(0.1), 4),
        (FixedAlpha(0.2), 3),
        (FixedAlpha(1.9), 3),
        (FixedAlpha(2.1), 2),
        (FixedAlpha(11.0), 1),
        (FixedAlpha(51.0), 0),
    ],
)
def test_goal_size_on_frontier(goal: Goal, size: int) -> None:
    assert goal.size(FRONTIER, reference=91.0) == size


def test_tolerance_size_depends_on_reference() -> None:
    assert Tolerance(0.2).size(FRONTIER, reference=91.0) == 3
    assert Tolerance(0.2).size(FRONTIER, reference=92.5) == 4
    # No size is within the tolerance: the best one.
    assert Tolerance(0.2).size(FRONTIER, reference=200.0) == 4


@pytest.mark.parametrize(
    ("gain", "N", "nats"),
    [
        (1000.0, 100, 0.01),
        # A fiftieth of 40 nats, shared by 100 observations.
        (40.0, 100, 0.008),
        # Half a nat in total may always be given up.
        (10.0, 100, 0.005),
        (0.0, 1000, 0.0005),
    ],
)
def test_tolerance_within_a_small_gain_is_smaller(gain: float, N: int, nats: float) -> None:
    tolerance = Tolerance(0.01).within(gain, N=N)
    assert tolerance.nats == pytest.approx(nats)
    assert tolerance.share == 0.02


@pytest.mark.parametrize(
    ("nats", "gain", "expected"),
    [
        # Five times the default may give up five fiftieths of 40 nats, shared by 100 observations.
        (0.05, 40.0, 0.04),
        (0.05, 400.0, 0.05),
        # A smaller tolerance has the share of the default.
        (0.008, 30.0, 0.006),
        # At most half of the gain, unless that is half a nat.
        (0.5, 40.0, 0.2),
        (0.5, 0.1, 0.005),
    ],
)
def test_tolerance_within_has_a_share_that_grows_with_it(
    nats: float, gain: float, expected: float
) -> None:
    assert Tolerance(nats).within(gain, N=100).nats == pytest.approx(expected)


def test_other_goals_ignore_reference() -> None:
    for goal in (MaxPoints(3), FixedAlpha(0.2)):
        assert goal.size(FRONTIER, reference=1e6) == goal.size(FRONTIER, reference=-1e6) == 3


def test_goal_size_without_candidates_is_zero() -> None:
    for goal in (MaxPoints(3), FixedAlpha(0.2), Tolerance()):
        assert goal.size(frontier(-3.0), reference=-3.0) == 0


@pytest.mark.parametrize("alpha", [0.0, -0.1, math.inf, math.nan])
def test_fixed_alpha_invalid_raises(alpha: float) -> None:
    with pytest.raises(InputError, match=r"`alpha` must be positive.*got .*Larger values select"):
        FixedAlpha(alpha)


@pytest.mark.parametrize("nats", [0.0, -0.1, math.nan])
def test_tolerance_invalid_raises(nats: float) -> None:
    with pytest.raises(InputError, match=r"`tolerance` must be positive nats.*got .*Larger values"):
        Tolerance(nats)


@pytest.mark.parametrize("points", [0, -3])
def test_max_points_invalid_raises(points: int) -> None:
    with pytest.raises(InputError, match=rf"`max_points` must be at least 1; got {points}"):
        MaxPoints(points)


FITS = [(9, 90.0), (6, 89.5), (3, 80.0), (6, 89.4)]


@pytest.mark.parametrize(
    ("goal", "index"),
    [
        (Tolerance(0.04), 0),
        (Tolerance(0.06), 1),
        (Tolerance(1.1), 2),
        (MaxPoints(9), 0),
        # L − α M²: 81 α, 36 α and 9 α less.
        (FixedAlpha(0.001), 0),
        (FixedAlpha(0.1), 1),
        (FixedAlpha(1.0), 2),
    ],
)
def test_goal_best_of_several_fits(goal: Goal, index: int) -> None:
    assert goal.best(FITS, N=10) == index
