"""The frontier of bound against number of inducing points, and the α that each number implies.

Under the prior exp(−α|Z|²) the best subset of a frontier maximises L(Z_M) − α M². As a function of
x = M², only vertices of the upper concave hull of (x, L) maximise it for some α, each for α between
the slopes of its two edges.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.selection.objective import SubsetStatistics
from winnowgp.selection.search import (
    CONTENDERS,
    SHARE,
    Path,
    SearchResult,
    backward_elimination,
    forward_selection,
    local_search,
    oscillating_search,
    swap_search,
)
from winnowgp.typing import Mask, SizeTable

MIN_ALPHA = 1e-8
"""Smallest α that is searched for; below it the prior has no effect."""
_MAX_ALPHA = 1e8
_BISECTIONS = 40
# Nats per observation by which two ELBOs of the same model may differ, and that are negligible.
_ROUNDING, _NEGLIGIBLE = 1e-9, 1e-6


@dataclass(frozen=True, slots=True)
class Frontier:
    """The best bound found, and its subset, for each number M = 0..K of inducing points.

    Attributes:
        bounds: L(Z_M) in nats.
        masks: Z_M, with exactly M inducing points each.
        N: number of observations, for tolerances per observation.
    """

    bounds: Float[Tensor, " sizes"]
    masks: Bool[Tensor, "sizes K"]
    N: int | float

    @property
    def sizes(self) -> Int[Tensor, " sizes"]:
        """The numbers of inducing points 0, 1, ..., K."""
        return torch.arange(len(self.bounds), device=self.bounds.device)

    def best(self, log_weights: SizeTable) -> SearchResult:
        """Return the subset with the highest L(Z_M) + w(M), for a table w(0..K)."""
        return self.at(int((self.bounds + log_weights).argmax()), log_weights=log_weights)

    def best_for_alpha(self, alpha: float) -> SearchResult:
        """Return the subset with the highest L(Z_M) − α M²."""
        return self.best(-alpha * self.sizes.to(self.bounds.dtype).square())

    def smallest(self, tolerance: float, *, reference: float | None = None) -> int:
        """Return the smallest M whose ELBO gap to a reference is at most `tolerance`.

        Args:
            tolerance: largest ELBO gap, in nats per observation.
            reference: bound in nats to compare with; the best bound of the frontier if not given.
                When no M is that close (the reference may be an upper bound), the M of the best
                bound is returned.
        """
        best = self.bounds.max()
        target = best.item() if reference is None else reference
        enough = self.bounds >= target - tolerance * self.N
        return int((enough if bool(enough.any()) else self.bounds >= best).int().argmax())

    def at_most(self, max_points: int) -> int:
        """Return the M ≤ `max_points` with the highest bound."""
        if max_points < 0:
            raise InputError(f"`max_points` must be zero or more; got {max_points}.")
        return int(self.bounds[: max_points + 1].argmax())

    def at(self, M: int, *, log_weights: SizeTable | None = None) -> SearchResult:
        """Return the subset of size M with its score, the bound L(Z_M) plus `log_weights[M]`."""
        bound = self.bounds[M].item()
        log_weight = 0.0 if log_weights is None else log_weights[M].item()
        return SearchResult(mask=self.masks[M], bound=bound, score=bound + log_weight)

    def merge(self, path: Path) -> "Frontier":
        """Return the frontier improved by the subsets of a path, which have distinct sizes."""
        sizes = path.masks.sum(dim=1)
        better = path.bounds > self.bounds[sizes]
        bounds, masks = self.bounds.clone(), self.masks.clone()
        bounds[sizes[better]] = path.bounds[better]
        masks[sizes[better]] = path.masks[better]
        return Frontier(bounds=bounds, masks=masks, N=self.N)


@dataclass(frozen=True, slots=True)
class SizeFrontier:
    """The best model known for each number of inducing points, under its own hyper-parameters.

    It is the upper envelope of several frontiers at fixed hyper-parameters (the regimes that a fit
    visited) and of models that were refitted at their size.

    Attributes:
        elbos: best ELBO with M = 0, 1, 2, … inducing points, in nats; −∞ where none is known.
        log_densities: held-out log density of the best model, in nats per observation; NaN
            where it was not computed.
        N: number of observations.
        evidence: exact log evidence of all rows at its maximum, in nats, where it is known: the
            last point of the frontier, the exact GP with M = N. For likelihoods other than
            Gaussian, the bound with every row as an inducing point.
        exact_log_density: held-out log density of that exact GP, per observation.
        earlier_gap: ELBO gap of the earlier batches of a stream, in nats; part of every size's gap.
    """

    elbos: Float[Tensor, " sizes"]
    log_densities: Float[Tensor, " sizes"]
    N: int | float
    evidence: float | None = None
    exact_log_density: float | None = None
    earlier_gap: float = 0.0

    @classmethod
    def of(cls, *frontiers: Frontier, N: int | float) -> "SizeFrontier":
        """Return the upper envelope of frontiers at fixed hyper-parameters."""
        length = max(len(frontier.bounds) for frontier in frontiers)
        elbos = torch.full((length,), -math.inf, dtype=torch.float64)
        for frontier in frontiers:
            bounds = frontier.bounds.to(elbos)
            elbos[: len(bounds)] = torch.maximum(elbos[: len(bounds)], bounds)
        return cls(elbos, torch.full_like(elbos, math.nan), N)

    @property
    def sizes(self) -> Int[Tensor, " sizes"]:
        """The numbers of inducing points 0, 1, ..., K."""
        return torch.arange(len(self.elbos))

    @property
    def best(self) -> float:
        """The exact evidence where it is known, else the highest ELBO, in nats."""
        highest = self.elbos.max().item()
        return highest if self.evidence is None else max(highest, self.evidence)

    @property
    def envelope(self) -> Float[Tensor, " sizes"]:
        """Best ELBO known with at most M inducing points, in nats.

        One more point cannot lower the ELBO at the same hyper-parameters, so that M + 1 points
        reach at least what M points do.
        """
        return self.elbos.cummax(0).values

    @property
    def gaps(self) -> Float[Tensor, " sizes"]:
        """Gap of each ELBO to `best` and of earlier batches, in nats per observation."""
        return (self.best + self.earlier_gap - self.elbos) / self.N

    def with_model(
        self, M: int, *, elbo: float, log_density: float | None = None
    ) -> "SizeFrontier":
        """Return the frontier with another model of M inducing points, if its ELBO is higher.

        Rounding is allowed for, so that a model whose ELBO the frontier already has replaces the
        earlier entry. If only the new model has a held-out log density, its ELBO may be lower by a
        millionth of a nat per observation.

        Args:
            M: number of inducing points of the model.
            elbo: its ELBO in nats.
            log_density: its held-out log density in nats per observation, if it was computed.
        """
        elbos, densities = self.elbos.clone(), self.log_densities.clone()
        if len(elbos) <= M:
            missing = M + 1 - len(elbos)
            elbos = torch.cat([elbos, elbos.new_full((missing,), -math.inf)])
            densities = torch.cat([densities, densities.new_full((missing,), math.nan)])
        known = log_density is not None and bool(densities[M].isnan())
        if elbo >= elbos[M] - (_NEGLIGIBLE if known else _ROUNDING) * self.N:
            elbos[M] = elbo
            densities[M] = math.nan if log_density is None else log_density
        return replace(self, elbos=elbos, log_densities=densities)


def elimination_frontier(
    statistics: SubsetStatistics,
    *,
    lowest: float = -math.inf,
    contenders: int = CONTENDERS,
    share: int = SHARE,
) -> Frontier:
    """Return the frontier of one backward elimination, the fastest to compute; O(K³).

    Its subsets are nested.

    Args:
        lowest: bound in nats below which subsets need not be good ones, which is faster.
        contenders: number of candidates whose gains are followed exactly; fewer are faster.
        share: largest number of inducing points per candidate that leaves with others; a smaller
            share is faster.
    """
    path = backward_elimination(statistics, lowest=lowest, contenders=contenders, share=share)
    return Frontier(bounds=path.bounds.flip(0), masks=path.masks.flip(0), N=statistics.N)


def search_frontier(
    statistics: SubsetStatistics, *, improved_sizes: int = 5, max_forward: int | None = None
) -> Frontier:
    """Return the frontier of backward elimination, forward selection and local improvements.

    A few subsets are improved by oscillating search and swaps, with a backward elimination from
    each of them. The cost is O(K³) for eliminations and selection, and O(K² M) for each size
    improved. The subsets need not be optimal; see `multistart_search` for one subset under a prior.

    Args:
        statistics: statistics of the data.
        improved_sizes: number of sizes, spaced geometrically, whose subsets are improved.
        max_forward: largest size of the forward selection; K/2 if not given.
    """
    K = statistics.K
    forward = forward_selection(statistics, max_size=K // 2 if max_forward is None else max_forward)
    frontier = elimination_frontier(statistics).merge(forward)
    sizes = {round(K ** ((i + 1) / (improved_sizes + 1))) for i in range(improved_sizes)} - {0, K}
    for M in sorted(sizes, reverse=True):
        mask, _ = oscillating_search(statistics, frontier.masks[M], depth=max(M // 3, 1))
        mask, _ = swap_search(statistics, mask, sweeps=1)
        frontier = frontier.merge(backward_elimination(statistics, start=mask))
    return frontier


def multistart_search(
    statistics: SubsetStatistics, frontier: Frontier, *, log_weights: SizeTable
) -> tuple[SearchResult, Frontier]:
    """Return the best subset under a prior, and the frontier improved by it.

    Local searches start from the best subset of the frontier and from that of a forward selection,
    and the higher score wins: on kin8nm the forward start was 110 nats lower and ended 73 nats
    higher. The frontier is improved by a backward elimination from the result.
    """
    forward = forward_selection(statistics, log_weights=log_weights).best(log_weights)
    starts = [frontier.best(log_weights).mask, forward]
    results = [local_search(statistics, mask, log_weights=log_weights) for mask in starts]
    best = max(results, key=lambda result: result.score)
    return best, frontier.merge(backward_elimination(statistics, start=best.mask))


def concave_hull(frontier: Frontier) -> list[int]:
    """Return the sizes M on the upper concave hull of (M², L(Z_M)), up to the best bound's."""
    bounds = frontier.bounds.tolist()
    last = bounds.index(max(bounds))
    hull: list[int] = []
    for M in range(last + 1):
        while len(hull) > 1 and _slope(bounds, hull[-1], M) >= _slope(bounds, hull[-2], hull[-1]):
            hull.pop()
        hull.append(M)
    return hull


def alpha_interval(frontier: Frontier, M: int) -> tuple[float, float]:
    """Return the interval of α ≥ 0 for which vertex M of the hull maximises L(Z_M) − α M²."""
    hull, bounds = concave_hull(frontier), frontier.bounds.tolist()
    index = hull.index(M)
    lowest = _slope(bounds, M, hull[index + 1]) if index + 1 < len(hull) else 0.0
    highest = _slope(bounds, hull[index - 1], M) if index > 0 else math.inf
    return lowest, highest


def alpha_at(frontier: Frontier, M: int) -> float:
    """Return an α whose optimum is M: the middle of its interval on the hull.

    Off the hull M is optimal for no α; the slope of the edge that spans M is returned, for which
    both ends of the edge are optimal.
    """
    hull, bounds = concave_hull(frontier), frontier.bounds.tolist()
    if M in hull:
        return _middle(*alpha_interval(frontier, M))
    above = next((size for size in hull if size > M), None)
    if above is None:
        return _middle(*alpha_interval(frontier, hull[-1]))
    return _slope(bounds, hull[hull.index(above) - 1], above)


def largest_alpha(condition: Callable[[float], bool]) -> float:
    """Return the largest α that satisfies a condition which small α satisfy and large α do not.

    It is used to share one α between several sets of inducing points.
    """
    low, high = MIN_ALPHA, _MAX_ALPHA
    for _ in range(_BISECTIONS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if condition(middle) else (low, middle)
    return low


def _slope(bounds: list[float], low: int, high: int) -> float:
    """Return the slope of the bound over M² between two sizes."""
    return (bounds[high] - bounds[low]) / (high**2 - low**2)


def _middle(lowest: float, highest: float) -> float:
    """Return the geometric middle of an interval: slopes span orders of magnitude on the hull."""
    if math.isinf(highest):
        return 2 * lowest if lowest > 0 else 1.0
    return math.sqrt(lowest * highest) if lowest > 0 else highest / 2


@dataclass(frozen=True, slots=True)
class Selection:
    """The inducing points selected from K candidates, and the inclusion probabilities."""

    inclusion: Float[Tensor, " K"]
    """λ, the probability of each candidate under q(Z)."""
    mask: Mask
    """The selected subset."""
    trace: Float[Tensor, " T"]
    """The objective E_q[L(Z)] − KL[q ‖ p] after each step, in nats; an estimate where sampled."""
    alpha: float | None
    """Strength α of the prior exp(−α M²); None under another prior."""
    frontier: Frontier | None
    """Bounds for other numbers of inducing points, if they were computed."""

    def to(self, device: torch.device) -> "Selection":
        """Return the selection on another device."""
        frontier = self.frontier
        if frontier is not None:
            frontier = Frontier(frontier.bounds.to(device), frontier.masks.to(device), frontier.N)
        inclusion, mask, trace = (
            self.inclusion.to(device),
            self.mask.to(device),
            self.trace.to(device),
        )
        return Selection(inclusion, mask, trace, self.alpha, frontier)

    @property
    def K(self) -> int:
        """Number of candidates."""
        return self.mask.shape[0]

    @property
    def M(self) -> int:
        """Number of selected inducing points."""
        return int(self.mask.sum())
