"""How many points each strategy keeps, and which."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool
from torch import Tensor

from winnowgp.integrations.gpytorch.site_sums import SiteTotals
from winnowgp.point_processes import SquaredCardinality
from winnowgp.selection import (
    WEAKEST_ALPHA,
    Frontier,
    Selection,
    WalkObjective,
    alpha_at,
    path_frontier,
    select_naturally,
    strongest_alpha,
)
from winnowgp.training import FixedAlpha, Goal, MaxPoints, Tolerance

# Subsets drawn at most to learn the probabilities of inclusion of a set.
_SUBSETS = 60


@final
@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """What the sets of one strategy are worth; its tensors ask for as many points in each."""

    statistics: tuple[WalkObjective, ...]
    frontiers: tuple[Frontier, ...]

    @classmethod
    def of(cls, totals: SiteTotals, bound: float) -> "StrategyChoice":
        """Backward elimination in every set, O(K³) each."""
        statistics = totals.statistics(bound)
        return cls(statistics, tuple(path_frontier(each) for each in statistics))

    @property
    def together(self) -> Frontier:
        """Bounds of all sets with M points each; the masks are the first one's."""
        first = self.frontiers[0]
        bounds = torch.stack([each.bounds for each in self.frontiers]).sum(0)
        return Frontier(bounds, first.masks, first.N)

    def size(self, alpha: float) -> int:
        """The M ≥ 1 that is best under the prior exp(−α M²) on every set."""
        found = self.together.best_for_alpha(len(self.frontiers) * alpha)
        return max(1, int(found.mask.sum()))

    def keep(self, M: int) -> Bool[Tensor, "G K"]:
        """The best M points found of each set."""
        return torch.stack([each.masks[M] for each in self.frontiers])

    def selections(
        self, M: int, *, alpha: float | None, generator: torch.Generator
    ) -> tuple[Selection, ...]:
        """The sets of M points, and the probability of every candidate.

        Args:
            alpha: of the prior; the one that prefers M points if None.
        """
        implied = alpha_at(self.together, M) / len(self.frontiers)
        strength = implied if alpha is None else alpha
        # Where more points only cost, no α > 0 says how strong a prior is.
        strength = max(strength, WEAKEST_ALPHA)
        pairs = zip(self.statistics, self.frontiers, strict=True)
        return tuple(_selection(*pair, M, strength, generator) for pair in pairs)


def _selection(
    statistics: WalkObjective,
    frontier: Frontier,
    M: int,
    alpha: float,
    generator: torch.Generator,
) -> Selection:
    learnt = select_naturally(
        statistics,
        prior=SquaredCardinality(statistics.K, alpha),
        generator=generator,
        start=frontier.masks[M],
        max_steps=_SUBSETS,
    )
    return Selection(learnt.q.inclusion, frontier.masks[M], learnt.trace, alpha, frontier)


def sizes(choices: Sequence[StrategyChoice], goal: Goal) -> list[int]:
    """Points in each set of every strategy, one at least.

    A nat costs the same wherever it is bought: a tolerance over several strategies is the
    strongest prior, the same for all sets, that stays within it.
    """
    if isinstance(goal, FixedAlpha):
        return [choice.size(goal.alpha) for choice in choices]
    if isinstance(goal, MaxPoints) or len(choices) == 1:
        frontiers = [choice.together for choice in choices]
        return [max(1, goal.size(f, reference=f.bounds.max().item())) for f in frontiers]
    assert isinstance(goal, Tolerance)
    budget = goal.nats * choices[0].together.N

    def within(alpha: float) -> bool:
        lost = [
            c.together.bounds.max().item() - c.together.bounds[c.size(alpha)].item()
            for c in choices
        ]
        return sum(lost) <= budget

    alpha = strongest_alpha(within)
    return [choice.size(alpha) for choice in choices]
