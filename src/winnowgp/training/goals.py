"""Goals: how many inducing points to select."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from time import perf_counter
from typing import final

import torch

from winnowgp.data import Source
from winnowgp.errors import InputError
from winnowgp.models import Posterior, SparseGP
from winnowgp.models.base import InducingModel
from winnowgp.models.likelihoods import observation_model
from winnowgp.selection import Frontier, strongest_alpha

# What a user can say about how many points they want.


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


# What a user can say about how many points the layers of a deep model get.


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


# How long a prediction takes with M points, on this machine.


ROWS = 1000

_REPEATS = 5


def points_within(max_us: float, *, predict_us: Callable[[int], float], most: int) -> int:
    """The largest number of points, up to `most`, that predicts a row in `max_us` microseconds.

    Bisection; a measured time is noisy, and the answer is as good as the measurements.

    >>> points_within(10.0, predict_us=lambda M: 1 + M**2 / 100, most=500)
    30
    """
    if predict_us(1) > max_us:
        raise InputError(
            f"`max_predict_us` must allow at least one point; got {max_us:g}, and one point takes "
            f"{predict_us(1):.3g} here."
        )
    low, high = 1, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if predict_us(middle) <= max_us else (low, middle)
    return low


def measured_predict_us(model: InducingModel, data: Source, M: int) -> float:
    """Microseconds a row for mean and variance of a batch of 1,000 rows with M points."""
    some = data.part(torch.arange(min(data.N, max(ROWS, M)))).to(model.candidates.device).X
    rows = some[torch.arange(ROWS, device=some.device) % len(some)]
    points = some[torch.arange(M, device=some.device) % len(some)]
    # Times do not depend on where the points are, so long as they are apart.
    points = points + torch.linspace(0, 1, M, dtype=points.dtype, device=points.device)[:, None]
    P = observation_model(model.likelihood).num_latents(data.P)
    eye = torch.eye(M, dtype=points.dtype, device=points.device)
    # Only the collapsed model has one covariance for all its outputs.
    posterior = Posterior(
        model.kernel,
        points,
        mean=model.mean,
        likelihood=model.likelihood,
        q_mean=points.new_zeros(M, P),
        q_factor=eye.repeat(1 if isinstance(model, SparseGP) else P, 1, 1),
    )
    seconds = []
    for _ in range(_REPEATS):
        start = perf_counter()
        posterior.predict(rows).variance.sum().item()
        seconds.append(perf_counter() - start)
    return 1e6 * min(seconds) / ROWS
