"""Which strength α of the paper's prior prefers a given number of points.

Under the prior exp(−α|Z|²) the frontier's best subset maximises L(Z_M) − α M². Seen over x = M²,
only vertices of the upper concave hull of (x, L) are ever best, each for α between the slopes of
its two edges.
"""

import math
from collections.abc import Callable

from winnowgp.selection.frontier import Frontier

WEAKEST_ALPHA = 1e-8
"""The least α that is searched for: below it the prior says nothing."""
_STRONGEST_ALPHA = 1e8
_BISECTIONS = 40


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


def strongest_alpha(holds: Callable[[float], bool]) -> float:
    """The largest α for which a rule holds that weak priors keep and strong ones break.

    For one α over several sets of points: a nat then costs the same wherever it is bought.
    """
    low, high = WEAKEST_ALPHA, _STRONGEST_ALPHA
    for _ in range(_BISECTIONS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _slope(bounds: list[float], low: int, high: int) -> float:
    """Nats per unit of M² from size `low` to size `high`."""
    return (bounds[high] - bounds[low]) / (high**2 - low**2)


def _middle(lowest: float, highest: float) -> float:
    """Geometric middle of an interval, for slopes fall by orders of magnitude along the hull."""
    if math.isinf(highest):
        return 2 * lowest if lowest > 0 else 1.0
    return math.sqrt(lowest * highest) if lowest > 0 else highest / 2
