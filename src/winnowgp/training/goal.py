"""What a user can say about how many points they want."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from winnowgp.errors import InputError
from winnowgp.selection import Frontier


class Goal(ABC):
    """A rule that turns a frontier into a number of points."""

    @abstractmethod
    def size(self, frontier: Frontier, *, reference: float) -> int:
        """How many points to keep.

        Args:
            reference: the best bound known, in nats; the frontier's own best or a higher one.
        """

    @abstractmethod
    def best(self, fits: Sequence[tuple[int, float]], *, N: int | float) -> int:
        """Which of several fits, each a number of points and a bound, serves the goal best."""


@final
@dataclass(frozen=True, slots=True)
class FixedAlpha(Goal):
    """The paper's prior with a strength set by hand: the M that maximises L(Z_M) − α M²."""

    alpha: float

    def __post_init__(self) -> None:
        if not 0 < self.alpha < float("inf"):
            raise InputError(
                f"`alpha` must be positive or 'auto'; got {self.alpha}. "
                "Larger values keep fewer points."
            )

    def size(self, frontier: Frontier, *, reference: float) -> int:
        return int(frontier.best_for_alpha(self.alpha).mask.sum())

    def best(self, fits: Sequence[tuple[int, float]], *, N: int | float) -> int:
        scores = [bound - self.alpha * M**2 for M, bound in fits]
        return scores.index(max(scores))


@final
@dataclass(frozen=True, slots=True)
class Tolerance(Goal):
    """The fewest points that give up at most so many nats an observation."""

    nats: float = 0.01

    def __post_init__(self) -> None:
        if not self.nats > 0:
            raise InputError(
                f"`tolerance` must be positive nats per observation; got {self.nats}. "
                "Larger values keep fewer points."
            )

    def size(self, frontier: Frontier, *, reference: float) -> int:
        return frontier.smallest(self.nats, reference=reference)

    def best(self, fits: Sequence[tuple[int, float]], *, N: int | float) -> int:
        reference = max(bound for _, bound in fits)
        kept = [(M, -bound, i) for i, (M, bound) in enumerate(fits)]
        return min(k for k in kept if -k[1] >= reference - self.nats * N)[2]


@final
@dataclass(frozen=True, slots=True)
class MaxPoints(Goal):
    """As many points as are allowed, fewer only where candidates hold no more information."""

    points: int

    def __post_init__(self) -> None:
        if self.points < 1:
            raise InputError(f"`max_points` must be at least 1; got {self.points}.")

    def size(self, frontier: Frontier, *, reference: float) -> int:
        return frontier.at_most(self.points)

    def best(self, fits: Sequence[tuple[int, float]], *, N: int | float) -> int:
        bounds = [bound for _, bound in fits]
        return bounds.index(max(bounds))
