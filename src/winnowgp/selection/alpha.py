"""α from what a user can state: nats given up, a number of points, or a prediction time.

Under the prior exp(−α|Z|²) the frontier's best subset maximises L(Z_M) − α M². Seen over x = M²,
only vertices of the upper concave hull of (x, L) are ever best, each for α between the slopes of
its two edges. Each rule names a size, moves to the nearest vertex that keeps its promise, and
returns an α from the middle of that vertex's interval.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from winnowgp.errors import InputError
from winnowgp.selection.frontier import Frontier


@dataclass(frozen=True, slots=True)
class AlphaChoice:
    """An α, and what it buys.

    Attributes:
        alpha: for which M points are best on the frontier.
        lowest: end of the interval of such α.
        highest: other end; infinite when M is 0.
        M: number of points.
        given_up: reference less L(Z_M), nats, summed over the data.
        reference: the bound compared with, nats.
        rule: "tolerance", "max_points" or "max_predict_us".
    """

    alpha: float
    lowest: float
    highest: float
    M: int
    given_up: float
    reference: float
    rule: str


def concave_hull(frontier: Frontier) -> list[int]:
    """Sizes M on the upper concave hull of (M², L(Z_M)), up to the size of the highest bound."""
    bounds = frontier.bounds.tolist()
    last = bounds.index(max(bounds))
    hull: list[int] = []
    for M in range(last + 1):
        while len(hull) > 1 and _slope(bounds, hull[-1], M) >= _slope(bounds, hull[-2], hull[-1]):
            hull.pop()
        hull.append(M)
    return hull


def alpha_interval(frontier: Frontier, M: int) -> tuple[float, float]:
    """The α ≥ 0 for which vertex M of the hull maximises L(Z_M) − α M²."""
    hull, bounds = concave_hull(frontier), frontier.bounds.tolist()
    at = hull.index(M)
    lowest = _slope(bounds, M, hull[at + 1]) if at + 1 < len(hull) else 0.0
    highest = _slope(bounds, hull[at - 1], M) if at > 0 else math.inf
    return lowest, highest


def alpha_at(frontier: Frontier, M: int) -> float:
    """An α that prefers M points: the middle of its interval on the hull, or the slope of its edge.

    Off the hull no α prefers M alone; the slope of the edge that spans it ties its two ends.
    """
    hull, bounds = concave_hull(frontier), frontier.bounds.tolist()
    if M in hull:
        return _middle(*alpha_interval(frontier, M))
    above = next((size for size in hull if size > M), None)
    if above is None:
        return _middle(*alpha_interval(frontier, hull[-1]))
    return _slope(bounds, hull[hull.index(above) - 1], above)


def alpha_for_tolerance(
    frontier: Frontier, tolerance: float, *, reference: float | None = None
) -> AlphaChoice:
    """Fewest points that give up at most `tolerance` nats per observation.

    The nearest vertex with at least that many points is taken, so the promise holds. With a
    reference that no subset comes near (an evidence upper bound may be far above), the highest
    bound is taken, and `given_up` says so.

    Args:
        frontier: of the candidates.
        tolerance: nats per observation, not negative.
        reference: bound in nats to compare with; that of the best subset found if not given.
    """
    if not tolerance >= 0:
        raise InputError(
            f"`tolerance` must be nats per observation, zero or more; got {tolerance}. "
            "Larger values keep fewer points."
        )
    wanted = frontier.smallest(tolerance, reference=reference)
    enough = [M for M in concave_hull(frontier) if wanted <= M]
    return _choice(frontier, enough[0], rule="tolerance", reference=reference)


def alpha_for_size(
    frontier: Frontier, max_points: int, *, reference: float | None = None
) -> AlphaChoice:
    """As many points as are worth having, but no more than `max_points`."""
    if max_points < 0:
        raise InputError(f"`max_points` must not be negative; got {max_points}.")
    few = [M for M in concave_hull(frontier) if max_points >= M]
    return _choice(frontier, few[-1], rule="max_points", reference=reference)


def alpha_for_time(
    frontier: Frontier,
    max_predict_us: float,
    *,
    predict_us: Callable[[int], float],
    reference: float | None = None,
) -> AlphaChoice:
    """As many points as predict one row within `max_predict_us` microseconds.

    Args:
        frontier: of the candidates.
        max_predict_us: microseconds.
        predict_us: time for one row with M points; need not be monotone, for a measured time may
        not be. reference: bound in nats to compare with; that of the best subset found if not
        given.
    """
    quick = [M for M in concave_hull(frontier) if predict_us(M) <= max_predict_us]
    if not quick:
        raise InputError(
            f"`max_predict_us` must allow at least a model without points; got {max_predict_us}, "
            f"and that takes {predict_us(0):.3g}."
        )
    return _choice(frontier, quick[-1], rule="max_predict_us", reference=reference)


def _slope(bounds: list[float], low: int, high: int) -> float:
    """Nats per unit of M² from size `low` to size `high`."""
    return (bounds[high] - bounds[low]) / (high**2 - low**2)


def _middle(lowest: float, highest: float) -> float:
    """Geometric middle of an interval, for slopes fall by orders of magnitude along the hull."""
    if math.isinf(highest):
        return 2 * lowest if lowest > 0 else 1.0
    return math.sqrt(lowest * highest) if lowest > 0 else highest / 2


def _choice(frontier: Frontier, M: int, *, rule: str, reference: float | None) -> AlphaChoice:
    lowest, highest = alpha_interval(frontier, M)
    alpha = _middle(lowest, highest)
    best = frontier.bounds.max().item() if reference is None else reference
    return AlphaChoice(
        alpha=alpha,
        lowest=lowest,
        highest=highest,
        M=M,
        given_up=best - frontier.bounds[M].item(),
        reference=best,
        rule=rule,
    )
