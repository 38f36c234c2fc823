"""The frontier: the best bound found for each number of points, from one search."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.selection.objective import WalkObjective
from winnowgp.selection.search import (
    Found,
    backward_path,
    climbed,
    forward_path,
    oscillated,
    swapped,
)
from winnowgp.typing import SizeTable


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

    def best(self, log_weights: SizeTable) -> Found:
        """Subset with the highest L(Z_M) + w(M), for a table of w(0..K)."""
        return self.at(int((self.bounds + log_weights).argmax()), log_weights=log_weights)

    def best_for_alpha(self, alpha: float) -> Found:
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

    def at(self, M: int, *, log_weights: SizeTable | None = None) -> Found:
        """The subset of size M; its score is its bound unless a prior is given."""
        bound = self.bounds[M].item()
        extra = 0.0 if log_weights is None else log_weights[M].item()
        return Found(mask=self.masks[M], bound=bound, score=bound + extra)


def path_frontier(statistics: WalkObjective) -> Frontier:
    """The frontier of one backward path: nested sets, the quickest to find. O(K³)."""
    back = backward_path(statistics)
    return Frontier(bounds=back.bounds.flip(0), masks=back.masks.flip(0), N=statistics.N)


def search_frontier(
    statistics: WalkObjective, *, improved_at: int = 5, longest_forward: int | None = None
) -> Frontier:
    """Backward path, forward path, and both improved at a few sizes and walked down from there.

    O(K³) for the paths, O(K² M) for each size improved. No optimality is claimed; see `polished`
    for one subset under a prior.

    Args:
        statistics: of the data.
        improved_at: number of sizes, spread geometrically, whose subsets are oscillated and
            swapped, then walked down from.
        longest_forward: where the forward path stops; K/2 if not given.
    """
    K = statistics.K
    ahead = forward_path(statistics, longest=K // 2 if longest_forward is None else longest_forward)
    frontier = _merged(path_frontier(statistics), ahead.masks, ahead.bounds)
    sizes = {round(K ** ((i + 1) / (improved_at + 1))) for i in range(improved_at)} - {0, K}
    for M in sorted(sizes, reverse=True):
        mask, _ = oscillated(statistics, frontier.masks[M], depth=max(M // 3, 1))
        mask, _ = swapped(statistics, mask, sweeps=1)
        walk = backward_path(statistics, start=mask)
        frontier = _merged(frontier, walk.masks, walk.bounds)
    return frontier


def polished(
    statistics: WalkObjective, frontier: Frontier, *, log_weights: SizeTable
) -> tuple[Found, Frontier]:
    """Best subset under a prior, and the frontier that knows of it and of the way down from it.

    Climbs from the frontier's best and from a forward path's best, and keeps the higher: on kin8nm
    the forward start was 110 nats lower and ended 73 nats higher.
    """
    path = forward_path(statistics, log_weights=log_weights)
    ahead = path.masks[int((path.bounds + log_weights[path.masks.sum(dim=1)]).argmax())]
    starts = [frontier.best(log_weights).mask, ahead]
    climbs = [climbed(statistics, mask, log_weights=log_weights) for mask in starts]
    found = max(climbs, key=lambda climb: climb.score)
    walk = backward_path(statistics, start=found.mask)
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
