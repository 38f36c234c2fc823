"""The fast schedule."""

from copy import deepcopy
from dataclasses import dataclass, field
from math import inf
from typing import Generic, final

import torch
from torch import Tensor

from winnowgp.data import Dataset, ProcessGroup, Source, sampled_rows
from winnowgp.errors import InputError, TrainingError
from winnowgp.models import SparseGP, greedy_variance
from winnowgp.models.base import InducingModel, Model
from winnowgp.models.likelihoods import observation_model
from winnowgp.models.sgpr import LEAST_NOISE
from winnowgp.point_processes import SquaredCardinality
from winnowgp.selection import (
    Frontier,
    Selection,
    SubsetStatistics,
    alpha_at,
    path_frontier,
    select_naturally,
)
from winnowgp.training.callbacks import Progress
from winnowgp.training.context import TrainingContext, warn_not_sharded
from winnowgp.training.goals import FixedAlpha, Goal, MaxPoints, Tolerance
from winnowgp.training.initialization import (
    STAGES,
    noise_of,
    set_noise,
    set_within,
    starting_points,
    trainable_lengthscales,
    trainable_variances,
    warmed_up,
)
from winnowgp.training.lbfgs import Stop, climb
from winnowgp.training.schedules import Fit, Schedule
from winnowgp.typing import Mask

# The steps that the fast schedule is made of, each one call on a model.


# Rows that a source which is not in memory is sampled for; fewer of a wide table, of which so many
# numbers are enough, but not fewer than schedules look at.
SAMPLE, NUMBERS, _FEWEST = 2**18, 2**25, 4096
# Rows that are all in the sample are not read again for each pass, if they are no more than this.
HELD = SAMPLE
# Floating-point operations one climb may take before its iterations are cut, to no fewer than
# `_LEAST`: minutes, not hours, on a few cores and on a modest GPU.
_WORK = {"cpu": 2.5e12, "cuda": 1e14}

_LEAST = 20


@final
class FastSteps(Generic[Model]):
    """Data, a fixed order of their rows, and where fresh candidates come from.

    What few rows can tell is learnt from some in memory: all of them, or a random sample of those
    that are not. Of a source that is no larger than the sample, all rows are learnt from there.

    Args:
        model: its own candidates, if it has any, are what fresh candidates are drawn from; the rows
            otherwise.
        rows: how many rows candidates are drawn from and starts compared on.
    """

    def __init__(
        self,
        model: Model,
        data: Source,
        *,
        rows: int,
        context: TrainingContext[Progress],
    ) -> None:
        self.model = model
        self._rows, self._course = rows, context
        self.sample, self._order = _sampled(data, context.generator)
        self.data = self.sample if _is_held(data, self.sample) else data
        self._given = model.candidates.detach().clone()
        self._latents = observation_model(model.likelihood).num_latents(data.P)

    @property
    def _process_group(self) -> ProcessGroup:
        return self._course.process_group

    @property
    def most(self) -> int:
        """No more points than candidates that were given, nor than rows."""
        return len(self._given) or self.data.N

    def part(self, count: int) -> Dataset:
        """A random part of the rows, the same whenever it is asked for."""
        return self.sample.part(self._order[:count])

    def warmed_up(self, stages: tuple[int, ...] = STAGES) -> Model:
        """No points yet, and hyper-parameters from the exact evidence of a few rows."""
        if not isinstance(self.model, SparseGP):
            # Each value takes several factorisations for each latent function.
            dear = 0.4 * self._latents ** (-1 / 3)
            stages = tuple(round(dear * count) for count in stages)
        warm = warmed_up(
            self.model,
            self.sample,
            order=self._order,
            stages=stages,
            checkpoint_log=self._course.checkpoint_log,
        )
        self._course.notify_once(_progress("warm up", 1, 1, -inf, warm))
        return warm

    def with_fresh(self, model: Model, count: int) -> Model:
        """The model's points and up to `count` candidates of greatest conditional variance."""
        source = self._given if len(self._given) else self.part(max(self._rows, 2 * count)).X
        found = greedy_variance(model.kernel, source, count, given=model.candidates.detach())
        chosen = torch.tensor(
            self._process_group.broadcast_object(found.tolist()), dtype=torch.long
        ).to(found.device)
        return model.with_candidates(torch.cat([model.candidates.detach(), source[chosen]]))

    def frontier(self, statistics: SubsetStatistics) -> Frontier:
        """Of one backward path, as the first of several processes walks it.

        Of points that are worth nearly the same another machine may drop another one.
        """
        found = path_frontier(statistics)
        return Frontier(*self._process_group.broadcast(found.bounds, found.masks), N=found.N)

    def chosen(self, pool: Model, mask: Mask, bound: float) -> Model:
        """The pool pruned; its bound is known from the statistics."""
        kept = pool.prune(mask)
        self._course.notify_once(_progress("choose", 1, 1, bound, kept))
        return kept

    def climb(
        self, model: Model, *, stop: Stop, on: Source | None = None, tighter: bool = False
    ) -> tuple[Model, float]:
        """A copy moved uphill by L-BFGS, and its bound in nats on the rows it climbed on.

        The climb's own bound carries the jitter of `bounds.two_pass`; the one returned is the one
        that statistics and reports speak of. The model itself is returned if it was no lower.
        """
        moved, rows = deepcopy(model), self.data if on is None else on
        seen = rows.held()
        seen = self.sample if seen is None else seen
        _lift_noise(moved, seen)
        work = _WORK.get(moved.candidates.device.type, _WORK["cpu"])
        affordable = int(work / max(model.chunked_cost(rows), 1.0))
        stop = Stop(stop.gain, stop.window, min(stop.iterations, max(_LEAST, affordable)))
        climb(
            moved,
            seen.X,
            objective=moved.chunked_bound(rows, tighter=tighter),
            stop=stop,
            on_step=lambda step, value: self._course.on_progress(
                _progress("move", step, stop.iterations, value, moved)
            ),
            checkpoint_log=self._course.checkpoint_log,
        )
        after = self._process_group.broadcast_object(moved.fixed_bound(rows))
        if tighter:
            return moved, after
        before = self._process_group.broadcast_object(model.fixed_bound(rows))
        return (moved, after) if after > before else (model, before)

    def starts(self, M: int) -> list[Model]:
        """Where M points may start, the steadiest first; more of them where they are cheap.

        M points cannot follow what the exact process follows: a smoother function with more noise
        than it finds is nearer to their optimum.
        """
        warm = self.warmed_up(STAGES if M > 64 else STAGES[:2])
        smooth = starting_points(self.model, self.sample)[1]
        soft = _scaled(warm, variance=2.0, lengthscale=1.5, noise=2.0)
        starts = [self._eliminated(soft, M)]
        if M > 32:
            starts.append(self._eliminated(self._held(warm, M), M))
        if M <= 64:
            starts += [
                self._eliminated(smooth, M),
                self._centres(smooth, M),
                self._centres(soft, M),
            ]
        if M <= 16:
            smoother = _scaled(smooth, variance=1.0, lengthscale=2.0, noise=3.0)
            starts += [self._centres(smooth, M), self._centres(smoother, M)]
            starts += [self._random(smooth, M, first=True), self._random(soft, M, first=False)]
        return starts

    def race(self, starts: list[Model], *, on: Source, iterations: int) -> Model:
        """The start that leads after a few rounds in which the slower half drops out."""
        while len(starts) > 1:
            results = [self._raced(start, on, iterations) for start in starts]
            results.sort(key=lambda result: -result[1])
            keep = (len(starts) + 1) // 2 if len(starts) > 2 else 1
            starts, iterations = [model for model, _ in results[:keep]], 2 * iterations
        return starts[0]

    def _raced(self, start: Model, on: Source, iterations: int) -> tuple[Model, float]:
        try:
            return self.climb(start, stop=Stop(3e-4 * on.observations, 20, iterations), on=on)
        except TrainingError:
            return start, -inf

    def _eliminated(self, model: Model, M: int) -> Model:
        """M points left of greedy candidates by backward elimination on a part of the rows."""
        pool = self.with_fresh(model, max(200, 2 * M))
        if pool.K <= M:
            return pool
        frontier = self.frontier(pool.subset_statistics(self.part(self._rows)))
        return pool.prune(frontier.masks[M])

    def _held(self, model: Model, M: int) -> Model:
        """Hyper-parameters that suit M greedy points held in place; no points."""
        pool, part = self.with_fresh(model, M), self.part(self._rows)
        learnt = pool.candidates.requires_grad
        pool.candidates.requires_grad_(False)
        held, _ = self.climb(pool, stop=Stop(1e-3 * part.observations, 10, 40), on=part)
        held.candidates.requires_grad_(learnt)
        return held.with_candidates(self.sample.X[:0])

    def _centres(self, model: Model, M: int) -> Model:
        """Points at the centres of M clusters of a part of the rows, if points may be anywhere."""
        if not model.candidates.requires_grad:
            return self._random(model, M, first=True)
        source = self._given if len(self._given) else self.part(self._rows).X
        if len(source.unique(dim=0)) <= M:
            return model.with_candidates(source[:M])
        g = self._course.generator
        seed = int(torch.randint(2**31, (1,), generator=g, device=g.device))
        from sklearn.cluster import KMeans  # half a second that not all fits need

        found = KMeans(M, init="random", n_init="auto", max_iter=20, random_state=seed).fit(
            source.cpu().numpy()
        )
        (centres,) = self._process_group.broadcast(
            torch.as_tensor(found.cluster_centers_).to(source)
        )
        return model.with_candidates(centres)

    def _random(self, model: Model, M: int, *, first: bool) -> Model:
        """Points at random rows, from either end of the fixed order."""
        source = self._given if len(self._given) else self.sample.X[self._order]
        return model.with_candidates(source[:M] if first else source[-M:])


def _sampled(data: Source, generator: torch.Generator) -> tuple[Dataset, Tensor]:
    """Rows in memory, and a random order of them."""
    device = generator.device
    held = data.held()
    if held is not None:
        return held, torch.randperm(data.N, generator=generator, device=device)
    most = min(SAMPLE, max(_FEWEST, NUMBERS // (data.D + data.P)))
    if most >= data.N:
        sample = data.part(torch.arange(data.N)).to(device)
        return sample, torch.randperm(data.N, generator=generator, device=device)
    rows = sampled_rows(data.N, most, generator)
    sample = data.part(rows.cpu()).to(device)
    return sample, torch.arange(sample.N, device=device)


def _is_held(data: Source, sample: Dataset) -> bool:
    """Whether the sample is all rows; several processes sum their own rows, wherever they are."""
    return sample.N == data.N <= HELD and len(data.shards()) == data.process_group.world_size == 1


def _progress(phase: str, step: int, steps: int, value: float, model: InducingModel) -> Progress:
    return Progress(phase, step, steps, value, None, model.candidates.detach().clone())


def _lift_noise(model: InducingModel, rows: Dataset) -> None:
    """Off its floor, where it would have no gradient left to rise with."""
    least = max(1e-4 * float(rows.Y.square().mean()), 10 * LEAST_NOISE)
    noise = noise_of(model.likelihood)
    if noise is not None and noise.value.item() < least:
        set_noise(model.likelihood, rows.X.new_tensor(least))


def _scaled(model: Model, *, variance: float, lengthscale: float, noise: float) -> Model:
    """A copy with kernel variances, lengthscales and noise multiplied, where they are learnt."""
    copied = deepcopy(model)
    for part in trainable_variances(copied.kernel):
        set_within(part, "outputscale", variance * part.outputscale.detach())
    for part in trainable_lengthscales(copied.kernel):
        set_within(part, "lengthscale", lengthscale * part.lengthscale.detach())
    learnt = noise_of(copied.likelihood)
    if learnt is not None:
        set_noise(copied.likelihood, noise * learnt.value)
    return copied


# The default schedule: warm up, choose, move, choose again.


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

    def run(self, model: Model, data: Source, *, context: TrainingContext[Progress]) -> Fit[Model]:
        if not isinstance(model, SparseGP):
            # Sites are kept for each row, and found by sweeps in which rows see those before them.
            warn_not_sharded(
                context.process_group, "the fast schedule shares rows for Gaussian noise only"
            )
        steps = FastSteps(model, data, rows=self.selection_rows, context=context)
        if isinstance(self.goal, MaxPoints):
            fitted, reference = self._to_count(steps, self.goal.points)
        else:
            fitted, reference = self._to_goal(steps)
        if self.tighter:
            fitted, _ = steps.climb(fitted, stop=self._stop(data, 0.1), tighter=True)
        return self._finished(steps, fitted, reference, context.generator)

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
            elbo_gap=max(reference - bound, 0.0),
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
