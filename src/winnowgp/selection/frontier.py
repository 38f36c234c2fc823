"""The best bound for each number of points, and the α that each number implies."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.selection.objective import SearchObjective
from winnowgp.selection.search import (
    SearchResult,
    backward_elimination,
    forward_selection,
    local_search,
    oscillating_search,
    swap_search,
)
from winnowgp.typing import Mask, SizeTable

# The frontier: the best bound found for each number of points, from one search.


@dataclass(frozen=True, slots=True)
class Frontier:
    """Best bound found, and its subset, for each M = 0..K.

    Attributes:
        bounds: L(Z_M) in nats.
        masks: Z_M, with exactly M points each.
        N: observations, for tolerances stated per observation.
    """

    bounds: Float[Tensor, " sizes"]
    masks: Bool[Tensor, "sizes K"]
    N: int | float

    @property
    def sizes(self) -> Int[Tensor, " sizes"]:
        """0, 1, ..., K."""
        return torch.arange(len(self.bounds), device=self.bounds.device)

    def best(self, log_weights: SizeTable) -> SearchResult:
        """Subset with the highest L(Z_M) + w(M), for a table of w(0..K)."""
        return self.at(int((self.bounds + log_weights).argmax()), log_weights=log_weights)

    def best_for_alpha(self, alpha: float) -> SearchResult:
        """Subset with the highest L(Z_M) − α M²."""
        return self.best(-alpha * self.sizes.to(self.bounds.dtype).square())

    def smallest(self, tolerance: float, *, reference: float | None = None) -> int:
        """Fewest points within `tolerance` nats per observation of a reference bound.

        Args:
            tolerance: nats per observation given up at most.
            reference: bound in nats to compare with; the frontier's own best if not given. When no
                M comes that close (the reference may be an upper bound), the M of the best bound.
        """
        target = self.bounds.max().item() if reference is None else reference
        enough = self.bounds >= target - tolerance * self.N
        return int(
            (enough if bool(enough.any()) else self.bounds >= self.bounds.max()).int().argmax()
        )

    def at_most(self, max_points: int) -> int:
        """Size up to `max_points` with the highest bound."""
        if max_points < 0:
            raise InputError(f"`max_points` must not be negative; got {max_points}.")
        return int(self.bounds[: max_points + 1].argmax())

    def at(self, M: int, *, log_weights: SizeTable | None = None) -> SearchResult:
        """The subset of size M; its score is its bound unless a prior is given."""
        bound = self.bounds[M].item()
        extra = 0.0 if log_weights is None else log_weights[M].item()
        return SearchResult(mask=self.masks[M], bound=bound, score=bound + extra)


def elimination_frontier(statistics: SearchObjective) -> Frontier:
    """The frontier of one backward path: nested sets, the quickest to find. O(K³)."""
    back = backward_elimination(statistics)
    return Frontier(bounds=back.bounds.flip(0), masks=back.masks.flip(0), N=statistics.N)


def search_frontier(
    statistics: SearchObjective, *, improved_at: int = 5, longest_forward: int | None = None
) -> Frontier:
    """Backward path, forward path, and both improved at a few sizes and walked down from there.

    O(K³) for the paths, O(K² M) for each size improved. No optimality is claimed; see `multistart_search`
    for one subset under a prior.

    Args:
        statistics: of the data.
        improved_at: number of sizes, spread geometrically, whose subsets are oscillating_search and
            swap_search, then walked down from.
        longest_forward: where the forward path stops; K/2 if not given.
    """
    K = statistics.K
    ahead = forward_selection(
        statistics, longest=K // 2 if longest_forward is None else longest_forward
    )
    frontier = _merged(elimination_frontier(statistics), ahead.masks, ahead.bounds)
    sizes = {round(K ** ((i + 1) / (improved_at + 1))) for i in range(improved_at)} - {0, K}
    for M in sorted(sizes, reverse=True):
        mask, _ = oscillating_search(statistics, frontier.masks[M], depth=max(M // 3, 1))
        mask, _ = swap_search(statistics, mask, sweeps=1)
        walk = backward_elimination(statistics, start=mask)
        frontier = _merged(frontier, walk.masks, walk.bounds)
    return frontier


def multistart_search(
    statistics: SearchObjective, frontier: Frontier, *, log_weights: SizeTable
) -> tuple[SearchResult, Frontier]:
    """Best subset under a prior, and the frontier that knows of it and of the way down from it.

    Climbs from the frontier's best and from a forward path's best, and keeps the higher: on kin8nm
    the forward start was 110 nats lower and ended 73 nats higher.
    """
    path = forward_selection(statistics, log_weights=log_weights)
    ahead = path.masks[int((path.bounds + log_weights[path.masks.sum(dim=1)]).argmax())]
    starts = [frontier.best(log_weights).mask, ahead]
    climbs = [local_search(statistics, mask, log_weights=log_weights) for mask in starts]
    found = max(climbs, key=lambda climb: climb.score)
    walk = backward_elimination(statistics, start=found.mask)
    return found, _merged(frontier, walk.masks, walk.bounds)


def _merged(
    frontier: Frontier, masks: Bool[Tensor, "T K"], bounds: Float[Tensor, " T"]
) -> Frontier:
    """The frontier with subsets of distinct sizes taken into account."""
    sizes = masks.sum(dim=1)
    better = bounds > frontier.bounds[sizes]
    new_bounds, new_masks = frontier.bounds.clone(), frontier.masks.clone()
    new_bounds[sizes[better]] = bounds[better]
    new_masks[sizes[better]] = masks[better]
    return Frontier(bounds=new_bounds, masks=new_masks, N=frontier.N)


# Which strength α of the paper's prior prefers a given number of points.
#
# Under the prior exp(−α|Z|²) the frontier's best subset maximises L(Z_M) − α M². Seen over x = M²,
# only vertices of the upper concave hull of (x, L) are ever best, each for α between the slopes of
# its two edges.


MIN_ALPHA = 1e-8

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


def largest_alpha(holds: Callable[[float], bool]) -> float:
    """The largest α for which a rule holds that weak priors keep and strong ones break.

    For one α over several sets of points: a nat then costs the same wherever it is bought.
    """
    low, high = MIN_ALPHA, _STRONGEST_ALPHA
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


# What a selector found.


@dataclass(frozen=True, slots=True)
class Selection:
    """Which of the K candidates to keep, and how sure the process is of each."""

    inclusion: Float[Tensor, " K"]
    """λ, the probability that q(Z) gives each candidate."""
    mask: Mask
    """The chosen set."""
    trace: Float[Tensor, " T"]
    """The objective E_q[L(Z)] − KL[q ‖ p] after each step, in nats; an estimate where sampled."""

    alpha: float | None
    """Strength of the prior exp(−α M²) behind the choice; None under another prior."""
    frontier: Frontier | None
    """What other numbers of points would have bought, if that is known."""

    @property
    def K(self) -> int:
        """Number of candidates chosen from."""
        return self.mask.shape[0]

    @property
    def M(self) -> int:
        """Number of points chosen."""
        return int(self.mask.sum())
