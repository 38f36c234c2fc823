"""The search with a fixed strength α of the prior: maximise L(Z) − α M², M included.

Backward elimination finds the number of points that suits the hyper-parameters, and the
hyper-parameters that are optimised with so many points suit this number in turn: with more noise
fewer points pay, and with fewer points the ELBO prefers more noise. Repeating the two therefore
stays near the number it began with, whatever other numbers would gain. So numbers above and below
are tried, each with its own optimised locations and hyper-parameters, from several starts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic

from winnowgp.models.base import Model
from winnowgp.selection import Frontier
from winnowgp.training.budget import selection_work
from winnowgp.training.fast_steps import FastSteps
from winnowgp.training.goals import FixedAlpha
from winnowgp.training.growth import refit_limit
from winnowgp.training.lbfgs import Stop

# Ratios of the numbers of points that are compared, in turn: from each start, and at the end.
_RATIOS, _LAST_RATIO = (1.25, 1.12), 1.06
# An optimisation of the search ends once twenty iterations together gain fewer nats per
# observation, and after so many.
_GAIN, _ITERATIONS = 1e-4, 150
# Rounds of elimination and optimisation at the end.
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class AlphaSearch(Generic[Model]):
    """The search for the highest L(Z) − α M², with the prior of the hyper-parameters if any."""

    steps: FastSteps[Model]
    goal: FixedAlpha
    most: int
    """Largest number of points."""
    frontiers: list[Frontier] = field(default_factory=list)
    """Frontiers at the hyper-parameters that were visited."""

    def score(self, fit: tuple[Model, float]) -> float:
        """Return the objective of a model and its ELBO, in nats."""
        return self.steps.objective(*fit) - self.goal.single_alpha * fit[0].K ** 2

    def eliminated(self, pool: Model) -> tuple[Model, float]:
        """Return the subset of a pool that maximises the objective, nothing else changed."""
        frontier = self.steps.frontier(pool.subset_statistics(self.steps.data))
        self.frontiers.append(frontier)
        self.steps.budget.spend(selection_work(pool, self.steps.data, pool.K))
        M = self.goal.size(frontier, reference=frontier.bounds.max().item())
        elbo = frontier.bounds[M].item()
        return self.steps.select(pool, frontier.masks[M], elbo), elbo

    def optimised(self, model: Model) -> tuple[Model, float]:
        """Return a model with optimised locations and hyper-parameters, and its ELBO."""
        stop = Stop(_GAIN * self.steps.data.observations, 20, _ITERATIONS)
        return self.steps.optimise(model, stop=stop)

    def from_pool(self, pool: Model) -> tuple[Model, float]:
        """Return the best fit that begins with a subset of a pool."""
        fit = self.eliminated(pool)
        return self.best_size(self.optimised(fit[0])) if fit[0].K else fit

    def from_starts(self, starts: list[Model]) -> tuple[Model, float]:
        """Return the best fit that begins with the best of several models of one size."""
        rows = max(2000, 4 * starts[0].K, self.steps.data.N // 8)
        whole = self.steps.precision(starts[0].K) is None
        on = self.steps.data if whole else self.steps.part(rows)
        (start,) = self.steps.successive_halving(starts, on=on, iterations=40)
        return self.best_size(self.optimised(start))

    def best_size(
        self, fit: tuple[Model, float], ratios: Sequence[float] = _RATIOS
    ) -> tuple[Model, float]:
        """Return the best fit among neighbouring numbers of points, each optimised."""
        for ratio in ratios:
            for factor in (ratio, 1 / ratio):
                begin = fit
                while (M := self._scaled(fit[0].K, factor)) != fit[0].K:
                    if refit_limit(self.steps, M) is not None:
                        return fit
                    resized = self.steps.resized(fit[0], M)
                    if resized.K == fit[0].K:
                        break  # There are no other candidates.
                    other = self.optimised(resized)
                    if self.score(other) <= self.score(fit):
                        break
                    fit = other
                if fit is not begin:
                    # The number on the other side is near that of the beginning.
                    break
        return fit

    def refined(self, fit: tuple[Model, float], stop: Stop) -> tuple[Model, float]:
        """Return a fit optimised to the end, after points were exchanged while that pays."""
        for _ in range(_ROUNDS):
            fit = self.steps.optimise(fit[0], stop=stop)
            fresh = min(max(32, fit[0].K // 4), self.most - fit[0].K)
            other = self.eliminated(self.steps.with_fresh(fit[0], max(fresh, 0)))
            if self.score(other) <= self.score(fit) + 1e-5 * self.steps.data.observations:
                break
            fit = other
        return fit

    def _scaled(self, M: int, factor: float) -> int:
        nearest = M + (1 if factor > 1 else -1)
        scaled = max(round(factor * M), nearest) if factor > 1 else min(round(factor * M), nearest)
        return min(max(scaled, 1), self.most)


def best_for_alpha(
    steps: FastSteps[Model],
    pool: Model,
    goal: FixedAlpha,
    *,
    constant: tuple[Model, float],
    most: int,
    stop: Stop,
) -> tuple[Model, float, list[Frontier]]:
    """Return the model of the highest L(Z) − α M² that was found, its ELBO, and frontiers.

    Args:
        steps: the steps of the fit; the model's own candidates, if it has any, are one of the
            starts, with the model's own hyper-parameters.
        pool: candidates with hyper-parameters that suit all of them.
        goal: the strength of the prior.
        constant: the model without points, and its ELBO.
        most: largest number of points.
        stop: stopping rule of the last optimisation.
    """
    search = AlphaSearch(steps, goal, most)
    fits = [constant, search.from_pool(pool)]
    M = fits[-1][0].K
    if M and refit_limit(steps, M) is None:
        fits.append(search.from_starts(steps.starts(M)))
    if steps.given and refit_limit(steps, steps.most) is None:
        fits.append(search.from_pool(search.optimised(steps.model)[0]))
    best = max(fits, key=search.score)
    if best[0].K:
        best = search.refined(search.best_size(best, (_LAST_RATIO,)), stop)
    return *best, search.frontiers
