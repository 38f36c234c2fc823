"""What a user can say about how many points the layers of a deep model get."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import final

from winnowgp.errors import InputError
from winnowgp.selection import Frontier, strongest_alpha


class LayerGoal(ABC):
    """A rule that turns one frontier a layer into one strength α a layer.

    Each layer then keeps the M that maximises L(Z_M) − α M²; with the same α everywhere that is the
    best use of any total Σ M², for a nat costs the same wherever it is bought.
    """

    @abstractmethod
    def alphas(self, frontiers: Sequence[Frontier]) -> tuple[float, ...]:
        """The strength of the prior in each layer."""


@final
@dataclass(frozen=True, slots=True)
class LayerAlphas(LayerGoal):
    """The paper's prior, one strength for all layers or one for each."""

    alpha: float | tuple[float, ...]

    def __post_init__(self) -> None:
        given = self.alpha if isinstance(self.alpha, tuple) else (self.alpha,)
        if not given or not all(0 < alpha < inf for alpha in given):
            raise InputError(
                "`alpha` must be a positive number, one for each layer, or 'auto'; "
                f"got {self.alpha}. Larger values keep fewer points."
            )

    def alphas(self, frontiers: Sequence[Frontier]) -> tuple[float, ...]:
        return layer_alphas(self.alpha, len(frontiers))


@final
@dataclass(frozen=True, slots=True)
class SharedTolerance(LayerGoal):
    """The fewest points that give up at most so many nats an observation in all layers together."""

    nats: float = 0.01

    def __post_init__(self) -> None:
        if not self.nats > 0:
            raise InputError(
                f"`tolerance` must be positive nats per observation; got {self.nats}. "
                "Larger values keep fewer points."
            )

    def alphas(self, frontiers: Sequence[Frontier]) -> tuple[float, ...]:
        def within(alpha: float) -> bool:
            lost = [f.bounds.max().item() - f.best_for_alpha(alpha).bound for f in frontiers]
            return sum(lost) <= self.nats * frontiers[0].N

        return (strongest_alpha(within),) * len(frontiers)


@final
@dataclass(frozen=True, slots=True)
class SharedBudget(LayerGoal):
    """The best allocation whose cost Σ_l M_l² is at most so much."""

    cost: float

    def __post_init__(self) -> None:
        if not self.cost > 0:
            raise InputError(f"`max_cost` is a sum of squared numbers of points; got {self.cost}.")

    def alphas(self, frontiers: Sequence[Frontier]) -> tuple[float, ...]:
        if self.cost < len(frontiers):
            raise InputError(
                f"`max_cost` must allow one point in each of {len(frontiers)} layers; "
                f"got {self.cost:g}."
            )

        def beyond(alpha: float) -> bool:
            sizes = [int(f.best_for_alpha(alpha).mask.sum()) for f in frontiers]
            # A layer keeps one point at least.
            return sum(max(M, 1) ** 2 for M in sizes) > self.cost

        # Just above the strongest α that would still keep too much.
        return (strongest_alpha(beyond) * (1 + 1e-9),) * len(frontiers)


def layer_alphas(alpha: float | tuple[float, ...], layers: int) -> tuple[float, ...]:
    """One strength a layer."""
    given = alpha if isinstance(alpha, tuple) else (alpha,) * layers
    if len(given) != layers:
        raise InputError(f"`alpha` must be one number or one for each of {layers} layers.")
    return given
