"""Goals: rules that decide how many inducing points to select."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, isqrt
from time import perf_counter
from typing import final

import torch

from winnowgp.data import Source
from winnowgp.errors import InputError
from winnowgp.models import Posterior, SparseGP
from winnowgp.models.base import InducingModel
from winnowgp.models.likelihoods import observation_model
from winnowgp.point_processes import SquaredCardinality
from winnowgp.selection import Frontier, SubsetStatistics, alpha_at, fit_inclusion
from winnowgp.selection.frontier import Selection, largest_alpha
from winnowgp.typing import Mask

ROWS = 1000
_REPEATS = 5
# The default tolerance in nats per observation, and the largest share of the gain over a constant
# that a larger one may give up: the data have shown an effect, so that a constant is not enough.
_DEFAULT, _MOST_SHARE = 0.01, 0.5


class Goal(ABC):
    """A rule that decides how many inducing points to select.

    A model with one candidate set selects the `size` on its frontier. A deep GP uses the strength α
    of the prior in each layer (`alphas`); each layer then has the M that maximises L(Z_M) − α M².
    The same α in all layers gives the highest ELBO for its total Σ M², because the price of M² in
    nats is then equal in all layers.
    """

    @abstractmethod
    def size(self, frontier: Frontier, *, reference: float) -> int:
        """Return the number of points to select.

        Args:
            reference: highest ELBO known, in nats; at least that of the frontier.
        """

    @abstractmethod
    def best(self, fits: Sequence[tuple[int, float]], *, N: int | float) -> int:
        """Return the index of the best fit.

        Args:
            fits: number of points and ELBO of each fit.
            N: number of observations.
        """

    @abstractmethod
    def alphas(
        self, frontiers: Sequence[Frontier], prices: Sequence[float] | None = None
    ) -> tuple[float, ...]:
        """Return the strength of the prior in each layer, given the frontier of each.

        Args:
            prices: relative cost of M² in each layer, for goals that share one α among the layers;
                equal if None.
        """


@final
@dataclass(frozen=True, slots=True)
class FixedAlpha(Goal):
    """Select the M that maximises L(Z_M) − α M², the paper's prior with a given strength.

    A deep GP accepts one strength for all layers, or a tuple with one per layer.
    """

    alpha: float | tuple[float, ...]

    def __post_init__(self) -> None:
        alphas = self.alpha if isinstance(self.alpha, tuple) else (self.alpha,)
        if not alphas or not all(0 < alpha < inf for alpha in alphas):
            raise InputError(
                "`alpha` must be positive or 'auto', for a deep GP also one number per layer; "
                f"got {self.alpha}. Larger values select fewer inducing points."
            )

    @property
    def single_alpha(self) -> float:
        """The strength for a model with one candidate set."""
        return per_layer(self.alpha, 1)[0]

    def size(self, frontier: Frontier, *, reference: float) -> int:
        return int(frontier.best_for_alpha(self.single_alpha).mask.sum())

    def best(self, fits: Sequence[tuple[int, float]], *, N: int | float) -> int:
        scores = [elbo - self.single_alpha * M**2 for M, elbo in fits]
        return scores.index(max(scores))

    def alphas(
        self, frontiers: Sequence[Frontier], prices: Sequence[float] | None = None
    ) -> tuple[float, ...]:
        return per_layer(self.alpha, len(frontiers))


@final
@dataclass(frozen=True, slots=True)
class Tolerance(Goal):
    """Select the fewest points whose ELBO is within a tolerance of the best one.

    The tolerance is in nats per observation; in a deep GP it is shared by all layers.
    """

    nats: float = _DEFAULT
    share: float = 0.02
    """Largest ELBO gap of the default tolerance, as a share of the gain over the constant model. It
    grows in proportion with a larger tolerance, to one half."""
    limit: "MaxPoints | MaxCost | MaxPredictTime | None" = None
    """A limit that holds as well: as many points as it allows if the tolerance needs more."""

    def __post_init__(self) -> None:
        if not self.nats > 0:
            raise InputError(
                f"`tolerance` must be positive nats per observation; got {self.nats}. "
                "Larger values select fewer inducing points."
            )

    def within(self, gain: float, *, N: int | float) -> "Tolerance":
        """Return the tolerance for data on which the largest model gains little.

        The ELBO gap may be at most a share of the gain. A gap of half a nat in total is always
        allowed, since no data could show the difference.

        Args:
            gain: nats by which the largest model exceeds the constant model.
            N: number of observations.
        """
        share = min(self.share * max(self.nats / _DEFAULT, 1.0), max(self.share, _MOST_SHARE))
        return replace(self, nats=min(self.nats, max(share * gain, 0.5) / N))

    def size(self, frontier: Frontier, *, reference: float) -> int:
        size = frontier.smallest(self.nats, reference=reference)
        if self.limit is None:
            return size
        return min(size, self.limit.size(frontier, reference=reference))

    def best(self, fits: Sequence[tuple[int, float]], *, N: int | float) -> int:
        reference = max(elbo for _, elbo in fits)
        ranked = [(M, -elbo, i) for i, (M, elbo) in enumerate(fits)]
        return min(k for k in ranked if -k[1] >= reference - self.nats * N)[2]

    def alphas(
        self, frontiers: Sequence[Frontier], prices: Sequence[float] | None = None
    ) -> tuple[float, ...]:
        priced = list(zip(frontiers, prices or [1.0] * len(frontiers), strict=True))

        def within(alpha: float) -> bool:
            gaps = [f.bounds.max().item() - f.best_for_alpha(alpha * w).bound for f, w in priced]
            return sum(gaps) <= self.nats * frontiers[0].N

        largest = largest_alpha(within)
        alphas = tuple(largest * price for _, price in priced)
        if self.limit is None:
            return alphas
        # The larger price keeps fewer points.
        return tuple(map(max, alphas, self.limit.alphas(frontiers, prices)))


@final
@dataclass(frozen=True, slots=True)
class MaxPoints(Goal):
    """Select a given number of points, fewer only where more candidates add no information.

    For models with one candidate set; `MaxCost` limits the layers of a deep GP.
    """

    points: int

    def __post_init__(self) -> None:
        if self.points < 1:
            raise InputError(f"`max_points` must be at least 1; got {self.points}.")

    @property
    def most_points(self) -> int:
        """Largest number of points of one candidate set."""
        return self.points

    def size(self, frontier: Frontier, *, reference: float) -> int:
        return frontier.at_most(self.points)

    def best(self, fits: Sequence[tuple[int, float]], *, N: int | float) -> int:
        return _highest(fits)

    def alphas(
        self, frontiers: Sequence[Frontier], prices: Sequence[float] | None = None
    ) -> tuple[float, ...]:
        raise InputError(
            "`goal` must be Tolerance, MaxCost or FixedAlpha for a deep GP; got MaxPoints. "
            "`MaxCost` limits the sum of squared numbers of points over all layers."
        )


@final
@dataclass(frozen=True, slots=True)
class AllCandidates(Goal):
    """Select all candidates of the model.

    `FastSchedule` learns the other parameters only. Freeze the locations as well, with
    `model.candidates.requires_grad_(False)`, to use them as they are. For models with one candidate
    set and observed inputs.
    """

    def size(self, frontier: Frontier, *, reference: float) -> int:
        return len(frontier.bounds) - 1

    def best(self, fits: Sequence[tuple[int, float]], *, N: int | float) -> int:
        return _highest(fits)

    def alphas(
        self, frontiers: Sequence[Frontier], prices: Sequence[float] | None = None
    ) -> tuple[float, ...]:
        raise InputError(
            "`goal` must be Tolerance, MaxCost or FixedAlpha for a deep GP; got AllCandidates."
        )


@final
@dataclass(frozen=True, slots=True)
class MaxCost(Goal):
    """Select the best points whose cost Σ_l M_l², summed over layers, is at most `cost`."""

    cost: float

    def __post_init__(self) -> None:
        if not self.cost >= 1:
            raise InputError(
                "`max_cost` is a sum of squared numbers of points and must be at least 1; "
                f"got {self.cost}."
            )

    @property
    def most_points(self) -> int:
        """Largest number of points of one candidate set."""
        return isqrt(int(min(self.cost, 2**60)))

    def size(self, frontier: Frontier, *, reference: float) -> int:
        return frontier.at_most(min(self.most_points, len(frontier.bounds)))

    def best(self, fits: Sequence[tuple[int, float]], *, N: int | float) -> int:
        return _highest(fits)

    def alphas(
        self, frontiers: Sequence[Frontier], prices: Sequence[float] | None = None
    ) -> tuple[float, ...]:
        if self.cost < len(frontiers):
            raise InputError(
                f"`max_cost` must allow one point in each of {len(frontiers)} layers; "
                f"got {self.cost:g}."
            )

        def exceeds(alpha: float) -> bool:
            sizes = [int(f.best_for_alpha(alpha).mask.sum()) for f in frontiers]
            # A layer keeps at least one point.
            return sum(max(M, 1) ** 2 for M in sizes) > self.cost

        # Just above the strongest α that would still keep too many points.
        return (largest_alpha(exceeds) * (1 + 1e-9),) * len(frontiers)


@final
@dataclass(frozen=True, slots=True)
class MaxPredictTime(Goal):
    """Select the best inducing points of the layers of a deep GP that predict a row in time.

    The layers share one α, weighted by their prices; it is found by bisection on measured times.
    """

    microseconds: float
    """Largest time per row."""
    predict_us: Callable[[tuple[int, ...]], float]
    """A function that returns microseconds per row from the number of points of each layer."""

    @property
    def most_points(self) -> int:
        raise self._unsuitable

    def size(self, frontier: Frontier, *, reference: float) -> int:
        raise self._unsuitable

    def best(self, fits: Sequence[tuple[int, float]], *, N: int | float) -> int:
        raise self._unsuitable

    def alphas(
        self, frontiers: Sequence[Frontier], prices: Sequence[float] | None = None
    ) -> tuple[float, ...]:
        prices = prices or [1.0] * len(frontiers)
        measured: dict[tuple[int, ...], float] = {}

        def microseconds(*sizes: int) -> float:
            if sizes not in measured:
                measured[sizes] = self.predict_us(sizes)
            return measured[sizes]

        least = microseconds(*[1] * len(frontiers))
        if least > self.microseconds:
            raise InputError(
                "`max_predict_us` must allow at least one inducing point in each layer; got "
                f"{self.microseconds:g}, and one point in each takes {least:.3g} here."
            )

        def exceeds(alpha: float) -> bool:
            priced = zip(frontiers, prices, strict=True)
            # A layer keeps at least one point.
            sizes = [max(int(f.best_for_alpha(alpha * w).mask.sum()), 1) for f, w in priced]
            return microseconds(*sizes) > self.microseconds

        alpha = largest_alpha(exceeds) * (1 + 1e-9)
        return tuple(alpha * price for price in prices)

    @property
    def _unsuitable(self) -> InputError:
        return InputError(
            "`goal` is MaxPredictTime, which is for deep GPs; use `MaxPoints` for other models, "
            "with the number of points that `points_within` returns."
        )


def _highest(fits: Sequence[tuple[int, float]]) -> int:
    elbos = [elbo for _, elbo in fits]
    return elbos.index(max(elbos))


def per_layer(alpha: float | tuple[float, ...], layers: int) -> tuple[float, ...]:
    """Return one strength per layer; a single number applies to all layers."""
    alphas = alpha if isinstance(alpha, tuple) else (alpha,) * layers
    if len(alphas) != layers:
        raise InputError(
            f"`alpha` must be one number or one for each of {layers} layers; got {len(alphas)}."
        )
    return alphas


def points_within(max_us: float, *, predict_us: Callable[[int], float], most: int) -> int:
    """Return the largest number of points, up to `most`, that predicts a row in `max_us` µs.

    The number is found by bisection. Measured times are noisy, and the result is only as accurate
    as they are.

    Args:
        predict_us: returns the microseconds per row with a given number of points.

    >>> points_within(10.0, predict_us=lambda M: 1 + M**2 / 100, most=500)
    30
    """
    if predict_us(1) > max_us:
        raise InputError(
            f"`max_predict_us` must allow at least one inducing point; got {max_us:g}, and "
            f"one takes {predict_us(1):.3g} here."
        )
    low, high = 1, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if predict_us(middle) <= max_us else (low, middle)
    return low


def measured_predict_us(model: InducingModel, data: Source, M: int) -> float:
    """Return the microseconds per row that mean and variance of 1,000 rows take with M points."""
    subset = data.part(torch.arange(min(data.N, max(ROWS, M)))).to(model.candidates.device).X
    rows = subset[torch.arange(ROWS, device=subset.device) % len(subset)]
    points = subset[torch.arange(M, device=subset.device) % len(subset)]
    # The time does not depend on the locations as long as they are distinct.
    points = points + torch.linspace(0, 1, M, dtype=points.dtype, device=points.device)[:, None]
    P = observation_model(model.likelihood).num_latents(data.P)
    eye = torch.eye(M, dtype=points.dtype, device=points.device)
    # Only the collapsed model has one covariance for all outputs.
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


def learn_inclusion(
    statistics: SubsetStatistics,
    frontier: Frontier,
    mask: Mask,
    *,
    goal: Goal,
    generator: torch.Generator,
    max_steps: int,
) -> Selection:
    """Return the selection of `mask`, with inclusion probabilities learnt by natural updates.

    The strength α of the prior is the goal's, or the one under which the frontier prefers as many
    points.

    Args:
        max_steps: largest number of subsets drawn.
    """
    fixed = isinstance(goal, FixedAlpha)
    alpha = goal.single_alpha if fixed else alpha_at(frontier, int(mask.sum()))
    return natural_selection(
        statistics, frontier, mask, alpha=alpha, generator=generator, max_steps=max_steps
    )


def natural_selection(
    statistics: SubsetStatistics,
    frontier: Frontier,
    mask: Mask,
    *,
    alpha: float,
    generator: torch.Generator,
    max_steps: int,
) -> Selection:
    """Return the selection of `mask` under the prior exp(−α M²), with its inclusion probabilities.

    Args:
        max_steps: largest number of subsets drawn.
    """
    learnt = fit_inclusion(
        statistics,
        prior=SquaredCardinality(statistics.K, alpha),
        generator=generator,
        start=mask,
        max_steps=max_steps,
    )
    return Selection(learnt.q.inclusion, mask, learnt.trace, alpha, frontier)
