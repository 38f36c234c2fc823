"""The default schedule: warm up, choose, move, choose again."""

from dataclasses import dataclass, field
from math import inf
from typing import final

import torch

from winnowgp.data import Source
from winnowgp.errors import InputError
from winnowgp.models import Model, SparseGP
from winnowgp.point_processes import SquaredCardinality
from winnowgp.selection import (
    Frontier,
    Selection,
    SubsetStatistics,
    alpha_at,
    select_naturally,
)
from winnowgp.training.course import Course
from winnowgp.training.fast_steps import FastSteps
from winnowgp.training.goal import FixedAlpha, Goal, MaxPoints, Tolerance
from winnowgp.training.lbfgs import Stop
from winnowgp.training.progress import Progress
from winnowgp.training.schedule import Fit, Schedule
from winnowgp.training.unshared import warn_unshared


@final
@dataclass(frozen=True, slots=True)
class Fast(Schedule):
    """Choose points by exact flips and move them by L-BFGS, in a few rounds.

    1. Hyper-parameters from the exact evidence of a few rows, the best of several starts.
    2. Candidates: the model's own if it has any, else rows of greatest conditional variance.
    3. Backward elimination on the statistics down to what the goal asks for.
    4. L-BFGS on hyper-parameters, noise and locations of the chosen points.
    5. The moved points and fresh candidates: 3 and 4 again, until the set settles.

    With `MaxPoints` several starts race first, and afterwards points that became idle are traded.
    Last, the probability of inclusion of each final point and fresh candidate is learnt by natural
    all-flip updates, at the α that the frontier gives the chosen number of points.
    """

    goal: Goal = field(default_factory=Tolerance)
    n_candidates: int = 512
    rounds: int = 3
    selection_rows: int = 4000
    """Rows that candidates are drawn from, and that starts are compared on."""
    gain: float = 5e-5
    """The last climb ends once twenty iterations together gain fewer nats an observation."""
    iterations: int = 1000
    """At most, in one climb."""
    tighter: bool = False
    """Whether the last climb is on the tighter bound."""
    inclusion_steps: int = 60
    """Subsets drawn at most to learn the probabilities of inclusion."""

    def __post_init__(self) -> None:
        if self.n_candidates < 1 or self.rounds < 1:
            raise InputError(
                "`n_candidates` and `rounds` must be at least 1; "
                f"got {self.n_candidates} and {self.rounds}."
            )

    def run(self, model: Model, data: Source, *, course: Course[Progress]) -> Fit[Model]:
        if not isinstance(model, SparseGP):
            # Sites are kept for each row, and found by sweeps in which rows see those before them.
            warn_unshared(course.ranks, "the fast schedule shares rows for Gaussian noise only")
        steps = FastSteps(model, data, rows=self.selection_rows, course=course)
        if isinstance(self.goal, MaxPoints):
            fitted, reference = self._to_count(steps, self.goal.points)
        else:
            fitted, reference = self._to_goal(steps)
        if self.tighter:
            fitted, _ = steps.climb(fitted, stop=self._stop(data, 0.1), tighter=True)
        return self._finished(steps, fitted, reference, course.generator)

    def _to_goal(self, steps: FastSteps[Model]) -> tuple[Model, float]:
        """As few points as the goal allows, in rounds of choosing and moving."""
        data, size = steps.data, -1
        current = steps.warmed_up()
        pool = steps.with_fresh(current, self.n_candidates)
        reference, fits = -inf, []
        for index in range(self.rounds):
            frontier = steps.frontier(pool.subset_statistics(data))
            reference = max(reference, frontier.bounds.max().item())
            M = min(self.goal.size(frontier, reference=reference), steps.most)
            settled = index > 0 and abs(M - size) <= 0.03 * size
            last, size = settled or index == self.rounds - 1, M
            current = steps.chosen(pool, frontier.masks[M], frontier.bounds[M].item())
            if index == 0 and 4 * self.n_candidates < data.N:
                part = steps.part(data.N // 4)
                current, _ = steps.climb(
                    current, stop=Stop(1e-3 * part.observations, 20, 60), on=part
                )
            gain, most = (3e-4, 200) if last else (1e-3, 100)
            current, bound = steps.climb(current, stop=Stop(gain * data.observations, 20, most))
            fits.append((current, bound))
            reference = max(reference, bound)
            if last:
                break
            pool = steps.with_fresh(current, max(32, current.K // 4))
        # The bound of all candidates counts too, as a fit that nobody would choose.
        known = [(model.K, bound) for model, bound in fits]
        chosen = self.goal.best([*known, (data.N + 1, reference)], N=data.observations)
        best = fits[chosen] if chosen < len(fits) else max(fits, key=lambda f: f[1])
        return best[0], reference

    def _to_count(self, steps: FastSteps[Model], M: int) -> tuple[Model, float]:
        """M points: starts race, the leader climbs, then idle points are traded for fresh ones."""
        data, M = steps.data, min(M, steps.most)
        whole = data.N * M <= 250_000
        part = data if whole else steps.part(max(2000, 4 * M, data.N // 8))
        leader = steps.race(steps.starts(M), on=part, iterations=50)
        best, bound = steps.climb(leader, stop=self._stop(data, 1.0))
        for _ in range(1, self.rounds):
            pool = steps.with_fresh(best, max(50, M // 2))
            frontier = steps.frontier(pool.subset_statistics(data))
            size = frontier.at_most(M)
            if frontier.bounds[size].item() < bound + 1e-5 * data.observations:
                break
            traded = steps.chosen(pool, frontier.masks[size], frontier.bounds[size].item())
            better, new_bound = steps.climb(traded, stop=self._stop(data, 0.2))
            if new_bound < bound + 1e-4 * data.observations:
                break
            best, bound = better, new_bound
        return best, bound

    def _stop(self, data: Source, share: float) -> Stop:
        return Stop(self.gain * data.observations, 20, int(share * self.iterations))

    def _finished(
        self, steps: FastSteps[Model], fitted: Model, reference: float, generator: torch.Generator
    ) -> Fit[Model]:
        """Look once more at the final points among fresh candidates, and report."""
        data = steps.data
        pool = steps.with_fresh(fitted, max(32, fitted.K // 4))
        statistics = pool.subset_statistics(data)
        mask = torch.arange(pool.K, device=pool.candidates.device) < fitted.K
        selection = self._selection(statistics, steps.frontier(statistics), mask, generator)
        bound, kept = fitted.fixed_bound(data), fitted.with_best_q(data)
        return Fit(
            model=kept,
            posterior=kept.posterior(data),
            selection=selection,
            candidates=pool.candidates.detach(),
            bound=bound,
            upper_bound=fitted.upper_bound(data),
            given_up=max(reference - bound, 0.0),
        )

    def _selection(
        self,
        statistics: SubsetStatistics,
        frontier: Frontier,
        mask: torch.Tensor,
        generator: torch.Generator,
    ) -> Selection:
        goal, M = self.goal, int(mask.sum())
        alpha = goal.alpha if isinstance(goal, FixedAlpha) else alpha_at(frontier, M)
        learnt = select_naturally(
            statistics,
            prior=SquaredCardinality(statistics.K, alpha),
            generator=generator,
            start=mask,
            max_steps=self.inclusion_steps,
        )
        return Selection(learnt.q.inclusion, mask, learnt.trace, alpha, frontier)
