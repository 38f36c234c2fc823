"""The fast schedule of models with one candidate set: `SparseGP` and `VariationalGP`."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from math import inf, nan
from typing import Generic, TypeVar, final

import torch
from gpytorch.kernels import Kernel, LinearKernel
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds.leave_one_out import PredictiveGap
from winnowgp.data import Dataset, Source
from winnowgp.data.dataset import sampled_rows
from winnowgp.data.distributed import ProcessGroup
from winnowgp.errors import TrainingError
from winnowgp.models import SparseGP, greedy_variance
from winnowgp.models.base import InducingModel, Model
from winnowgp.models.likelihoods import observation_model
from winnowgp.models.sgpr import LEAST_NOISE
from winnowgp.selection import Frontier, SizeFrontier, SubsetStatistics, elimination_frontier
from winnowgp.training import initialization
from winnowgp.training.budget import Budget
from winnowgp.training.callbacks import Progress
from winnowgp.training.goals import Goal, MaxPoints, Tolerance, learn_inclusion
from winnowgp.training.growth import (
    FIRST,
    Pool,
    grow,
    grow_refitted,
    measure_last_doubling,
    refit,
    refit_limit,
    selection_work,
)
from winnowgp.training.hyperparameters import (
    STAGES,
    Initialization,
    maximise_evidence,
    maximise_local_evidence,
    starting_points,
)
from winnowgp.training.lbfgs import Stop, maximise_elbo
from winnowgp.training.schedules import (
    FitResult,
    Growth,
    SizedModel,
    TrainingContext,
    warn_not_sharded,
)
from winnowgp.typing import Mask

_Decision = TypeVar("_Decision")

# Largest number of rows that are sampled from a source which is not in memory. A wide table is
# limited to `NUMBERS` numbers, but to at least `_FEWEST` rows, which the schedule uses.
SAMPLE, NUMBERS, _FEWEST = 2**18, 2**25, 4096
# A source with at most this many rows, all of them in the sample, is not read again in each pass.
HELD = SAMPLE
# Fewest L-BFGS iterations of a run that the budget limits.
_LEAST = 10
# Share of the remaining work that one run may take.
_SHARE = 0.5
# Nats by which a model with points must exceed the constant one, and more per kernel parameter: the
# evidence of a kernel that fits pure noise exceeds the constant model's by about as much.
_SIGNIFICANT, _PER_PARAMETER = 3.0, 0.5
# Nats per observation that unexplained variance may cost before hyper-parameters are refitted to a
# pool that is too small.
_MODERATE = 0.5
# Numbers of inducing points that a fit may keep models of, besides its own.
_SIZES = (2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class SparseTraining:
    """Settings of the fast schedule for models with one candidate set; see `FastSchedule`."""

    goal: Goal
    n_candidates: int | None
    rounds: int
    iterations: int
    gain: float
    selection_rows: int
    inclusion_steps: int
    kernels: tuple[Kernel, ...] = ()
    linear_term: bool = False
    max_seconds: float | None = None
    kept_sizes: int = 3
    criterion: str = "elbo"


def fit_sparse(
    model: Model, data: Source, *, training: SparseTraining, context: TrainingContext
) -> FitResult[Model]:
    """Fit a model with one candidate set and observed inputs; see `FastSchedule`."""
    _warn_not_sharded(model, context)
    steps = FastSteps(
        model,
        data,
        rows=training.selection_rows,
        context=context,
        kernels=training.kernels,
        linear_term=training.linear_term,
        budget=Budget(model.candidates.device, seconds=training.max_seconds),
    )
    if isinstance(training.goal, MaxPoints):
        stop = Stop(training.gain * steps.data.observations, 20, training.iterations)
        chosen = _select_count(steps, training.goal.points, training.rounds, stop)
    else:
        chosen = _select_by_goal(steps, training)
    data, fitted, goal = steps.data, chosen.model, training.goal
    pool = steps.with_fresh(fitted, max(32, fitted.K // 4))
    statistics = pool.subset_statistics(data)
    affordable = int(0.1 * steps.budget.work_limit / (2.0 * pool.K**2 * max(fitted.K, 1)))
    selection = learn_inclusion(
        statistics,
        steps.frontier(statistics),
        torch.arange(pool.K, device=pool.candidates.device) < fitted.K,
        goal=goal,
        generator=context.generator,
        max_steps=max(3, min(training.inclusion_steps, affordable)),
    )
    elbo, final_model = fitted.fixed_bound(data), fitted.with_best_q(data)
    densities = steps.leave_one_out(final_model)
    frontier = SizeFrontier.of(*chosen.frontiers, selection.frontier, N=data.observations)
    frontier = frontier.with_model(0, elbo=chosen.constant)
    frontier = frontier.with_model(fitted.K, elbo=elbo, log_density=steps.mean_density(densities))
    sized = _sized_models(steps, fitted, training.kept_sizes)
    for other in sized:
        frontier = frontier.with_model(
            other.posterior.M, elbo=other.elbo, log_density=other.log_density
        )
    predictive_gap = None
    if densities is not None and chosen.largest is not None:
        largest = steps.leave_one_out(chosen.largest)
        predictive_gap = PredictiveGap.of(largest, densities, weights=steps.sample.weights)
        frontier = frontier.with_model(
            chosen.largest.K,
            elbo=chosen.largest.fixed_bound(data),
            log_density=steps.mean_density(largest),
        )
    initial = steps.initialization
    assert initial is not None
    if chosen.exact:
        frontier = replace(frontier, evidence=chosen.reference)
    return FitResult(
        model=final_model,
        posterior=final_model.posterior(data),
        selections=(selection,),
        candidates=(pool.candidates.detach(),),
        elbo=elbo,
        elbo_gap=max(chosen.reference - elbo, 0.0),
        evidence=final_model.evidence(data),
        growth=chosen.growth,
        kernel_evidence=initial.kernels,
        frontier=frontier,
        sized=sized,
        predictive_gap=predictive_gap,
    )


def _sized_models(steps: "FastSteps[Model]", fitted: Model, count: int) -> tuple[SizedModel, ...]:
    """Return models with fewer inducing points than the fitted one, refitted at their size."""
    sized = []
    for M in [size for size in _SIZES if size < fitted.K][-count:]:
        try:
            model, elbo = steps.shrunk(fitted, M)
        except TrainingError:
            continue
        model = model.with_best_q(steps.data)
        density = steps.mean_density(steps.leave_one_out(model))
        sized.append(SizedModel(model.posterior(steps.data), elbo, density))
    return tuple(sized)


@dataclass(frozen=True, slots=True)
class _Choice(Generic[Model]):
    """The selected model, and the largest model it is compared with."""

    model: Model
    reference: float
    """Highest ELBO known, or the exact evidence where it was maximised."""
    growth: Growth | None
    exact: bool = False
    """Whether the reference is the exact evidence."""
    frontiers: tuple[Frontier, ...] = ()
    """Frontiers at the hyper-parameters that were visited."""
    largest: Model | None = None
    """The largest model that was fitted."""
    constant: float = -inf
    """ELBO of the constant model."""


def _warn_not_sharded(model: InducingModel, context: TrainingContext) -> None:
    if not isinstance(model, SparseGP):
        # Sites are kept for each row, and found by sweeps in which rows see those before them.
        warn_not_sharded(
            context.process_group, "the fast schedule shares rows for Gaussian noise only"
        )


def _select_by_goal(steps: "FastSteps[Model]", training: SparseTraining) -> _Choice[Model]:
    """Select as few points as the goal allows: grow a pool, eliminate, move, and again."""
    initial, data, goal = steps.initialise(), steps.data, training.goal
    constant = steps.constant_model(initial.best)
    most = min(training.n_candidates or steps.most, steps.most)
    tolerance = goal.nats if isinstance(goal, Tolerance) else Tolerance().nats
    pool, reference = _grown(steps, initial, tolerance=tolerance, most=most, constant=constant[1])
    parameters = sum(p.numel() for p in initial.best.kernel.parameters() if p.requires_grad)
    significant = constant[1] + _SIGNIFICANT + _PER_PARAMETER * parameters
    if reference < significant:
        tried, elbo = steps.best_start(min(16, steps.most))
        if elbo < significant:
            return _Choice(constant[0], constant[1], pool.growth, constant=constant[1])
        pool, reference = Pool(tried, elbo, pool.growth), elbo
    if isinstance(goal, Tolerance):
        goal = goal.within((reference - constant[1]) / data.observations)
    criterion = _Criterion(steps, goal, reference, None)
    if training.criterion == "predictive":
        criterion = _Criterion(steps, goal, reference, steps.leave_one_out(pool.model))
    fits: list[tuple[Model, float]] = []
    frontiers: list[Frontier] = []
    candidates, size = pool.model, -1
    for index in range(training.rounds):
        frontier = steps.frontier(candidates.subset_statistics(data))
        frontiers.append(frontier)
        reference = max(reference, frontier.bounds.max().item())
        M = criterion.size(candidates, frontier)
        current = steps.select(candidates, frontier.masks[M], frontier.bounds[M].item())
        steps.budget.spend(selection_work(data.N, candidates.K))
        fits.append((current, criterion.score(current, frontier.bounds[M].item())))
        settled = index > 0 and abs(M - size) <= 0.03 * size
        last, size = settled or index == training.rounds - 1, M
        if not current.K or pool.limited:
            break
        gain, iterations = (3e-4, 200) if last else (1e-3, 100)
        current, elbo = steps.optimise(current, stop=Stop(gain * data.observations, 20, iterations))
        fits.append((current, criterion.score(current, elbo)))
        reference = max(reference, elbo)
        if last:
            break
        candidates = steps.with_fresh(current, max(32, current.K // 4))
    return _Choice(
        criterion.best(fits),
        reference,
        pool.growth,
        exact=initial.complete,
        frontiers=tuple(frontiers),
        largest=pool.model,
        constant=constant[1],
    )


@dataclass(frozen=True, slots=True)
class _Criterion(Generic[Model]):
    """Decides the number of points by the ELBO, or by leave-one-out densities if they are given."""

    steps: "FastSteps[Model]"
    goal: Goal
    reference: float
    """Highest ELBO known, in nats."""
    densities: Float[Tensor, " N"] | None
    """Leave-one-out log densities of the largest model."""

    @property
    def _observations(self) -> float:
        return float(self.steps.data.observations)

    def score(self, model: Model, elbo: float) -> float:
        """Return the ELBO, or the leave-one-out log density of all rows, in nats."""
        if self.densities is None:
            return elbo
        return self._observations * self.steps.mean_density(self.steps.leave_one_out(model))

    def size(self, candidates: Model, frontier: Frontier) -> int:
        """Return the number of points to select on a frontier.

        Leave-one-out densities are computed along the path of the elimination, by bisection: they
        hardly ever fall when a point is added.
        """
        reference = max(self.reference, frontier.bounds.max().item())
        M = self.goal.size(frontier, reference=reference)
        if self.densities is None or not isinstance(self.goal, Tolerance):
            return M
        target = self._observations * (self.steps.mean_density(self.densities) - self.goal.nats)
        low, high = -1, M
        if self.score(candidates.prune(frontier.masks[M]), 0.0) < target:
            high = candidates.K
        while high - low > max(1, high // 50):
            middle = (low + high) // 2
            enough = self.score(candidates.prune(frontier.masks[middle]), 0.0) >= target
            low, high = (low, middle) if enough else (middle, high)
        return high

    def best(self, fits: Sequence[tuple[Model, float]]) -> Model:
        """Return the best of some models, given the score of each."""
        reference = self.reference
        if self.densities is not None:
            reference = self._observations * self.steps.mean_density(self.densities)
        # The largest model counts as a reference that cannot be selected.
        known = [*((model.K, score) for model, score in fits), (self.steps.data.N + 1, reference)]
        index = self.goal.best(known, N=self._observations)
        if index == len(fits):
            index = max(range(len(fits)), key=lambda i: fits[i][1])
        return fits[index][0]


def _grown(
    steps: "FastSteps[Model]",
    initial: Initialization[Model],
    *,
    tolerance: float,
    most: int,
    constant: float,
) -> tuple[Pool[Model], float]:
    """Return a pool of candidates, and the ELBO or exact evidence to compare with."""
    if initial.complete:
        reference = steps.dense_evidence(initial)
        pool = grow(steps, initial.best, tolerance=tolerance, most=most, reference=reference)
        if pool.limited:
            pool = _limited_pool(steps, pool)
        return pool, max(reference, pool.elbo)
    starts = [initial.best, *steps.other_regimes(initial)]
    if isinstance(steps.model, SparseGP):
        pools = [
            grow(steps, start, tolerance=tolerance, most=most, reference=None) for start in starts
        ]
        if len(pools) > 1:
            pools = [refit(steps, pool, iterations=10) for pool in pools]
    else:
        pools = [
            refit(steps, grow(steps, start, tolerance=tolerance, most=FIRST, reference=None))
            for start in starts
        ]
    pool = max(pools, key=lambda pool: pool.elbo)
    if not isinstance(steps.model, SparseGP):
        pool = replace(pool, growth=replace(pool.growth, limit=None))
    if not pool.limited:
        pool = grow_refitted(steps, pool, tolerance=tolerance, most=most, constant=constant)
    if pool.limited:
        pool = _limited_pool(steps, pool)
    return pool, max(pool.elbo, *(other.elbo for other in pools))


def _limited_pool(steps: "FastSteps[Model]", pool: Pool[Model]) -> Pool[Model]:
    """Return a pool that is too small, with the hyper-parameters that predict best.

    Refitted with too few points, hyper-parameters explain more as noise: the ELBO rises, and
    predictions may get worse. So they are refitted only if much variance is left unexplained, and
    leave-one-out densities decide. The refitted pool is as large as its refit can be afforded.
    """
    if pool.unexplained is not None and pool.unexplained < _MODERATE:
        return pool
    smaller, K = pool, pool.model.K
    while K > FIRST and refit_limit(steps, K) is not None:
        K //= 2
    if pool.model.K > K:
        bare = pool.model.with_candidates(pool.model.candidates[:0])
        model = steps.with_fresh(bare, K)
        smaller = Pool(model, -inf, pool.growth, None)
    refitted = measure_last_doubling(steps, refit(steps, smaller))
    before, after = (steps.mean_density(steps.leave_one_out(p.model)) for p in (pool, refitted))
    return pool if before > after else refitted


def _select_count(steps: "FastSteps[Model]", M: int, rounds: int, stop: Stop) -> _Choice[Model]:
    """Select M points: compare starts, optimise the best, exchange idle points."""
    data, M = steps.data, min(M, steps.most)
    shorter = Stop(stop.gain, stop.window, int(0.2 * stop.iterations))
    whole = data.N * M <= 250_000
    part = data if whole else steps.part(max(2000, 4 * M, data.N // 8))
    start = steps.successive_halving(steps.starts(M), on=part, iterations=50)
    best, elbo = steps.optimise(start, stop=stop)
    for _ in range(1, rounds):
        pool = steps.with_fresh(best, max(50, M // 2))
        frontier = steps.frontier(pool.subset_statistics(data))
        size = frontier.at_most(M)
        if frontier.bounds[size].item() < elbo + 1e-5 * data.observations:
            break
        exchanged = steps.select(pool, frontier.masks[size], frontier.bounds[size].item())
        better, new_elbo = steps.optimise(exchanged, stop=shorter)
        if new_elbo < elbo + 1e-4 * data.observations:
            break
        best, elbo = better, new_elbo
    bare = best.with_candidates(best.candidates[:0])
    larger = steps.with_fresh(bare, min(2 * M, steps.most))
    larger_elbo = steps.shared(larger.fixed_bound(data))
    gain = max(larger_elbo - elbo, 0.0) / data.observations
    growth = Growth((M, larger.K), (elbo, larger_elbo), "max_points", gain)
    return _Choice(best, max(elbo, larger_elbo), growth, largest=larger)


@final
class FastSteps(Generic[Model]):
    """The steps of the fast schedule on a fixed random order of the rows.

    Steps that need few rows use rows in memory: all of them, or a random sample of a source that is
    not in memory. A source that is no larger than the sample is read once.

    Args:
        model: its own candidates, if it has any, are the pool that fresh candidates are drawn from;
            otherwise the rows are.
        rows: number of rows that candidates are drawn from and starts compared on.
    """

    def __init__(
        self,
        model: Model,
        data: Source,
        *,
        rows: int,
        context: TrainingContext,
        kernels: tuple[Kernel, ...] = (),
        linear_term: bool = False,
        budget: Budget | None = None,
    ) -> None:
        self.model = model
        self.budget = budget or Budget(model.candidates.device)
        self.initialization: Initialization[Model] | None = None
        self._kernels, self._linear_term = kernels, linear_term
        self._rows, self._context = rows, context
        self.sample, self._order = _sampled(data, context.generator)
        self.data = self.sample if _is_complete(data, self.sample) else data
        self._given = model.candidates.detach().clone()
        self._latents = observation_model(model.likelihood).num_latents(data.P)

    @property
    def _process_group(self) -> ProcessGroup:
        return self._context.process_group

    @property
    def given(self) -> bool:
        """Whether the user gave the candidates."""
        return len(self._given) > 0

    @property
    def most(self) -> int:
        """Largest number of points: the number of given candidates, or of rows."""
        return len(self._given) or self.data.N

    def part(self, count: int) -> Dataset:
        """Return a random subset of the rows, the same one for every call."""
        return self.sample.part(self._order[:count])

    def initialise(self, rows: int | None = None) -> Initialization[Model]:
        """Return hyper-parameters and kernel from the exact evidence of as many rows as affordable.

        Args:
            rows: number of rows at most, if fewer suffice.
        """
        cost = 1.0
        if not isinstance(self.model, SparseGP):
            # Each value takes several factorisations for each latent function.
            cost = 300.0 * self._latents
        affordable = self._decided(lambda: self.budget.dense_rows(cost))
        models = [self.model]
        for kernel in self._kernels:
            other = deepcopy(self.model)
            other.kernel = deepcopy(kernel).to(self.sample.X)
            models.append(other)
        self.initialization = maximise_evidence(
            models,
            self.sample,
            order=self._order,
            rows=affordable if rows is None else min(rows, affordable),
            linear_term=self._linear_term,
            budget=self.budget,
            checkpoint_log=self._context.checkpoint_log,
        )
        best = self.initialization.best
        self._context.notify_once(Progress.of(best, "initialisation", 1, 1, -inf))
        return self.initialization

    def dense_evidence(self, initial: Initialization[Model]) -> float:
        """Return the exact evidence of all rows at the best optimum, with their own weights."""
        if self.data.observations == initial.optima[0].observations:
            return initial.optima[0].evidence
        with torch.no_grad():
            return self.shared(initial.best.dense_bound(self.sample)().item())

    def other_regimes(self, initial: Initialization[Model]) -> list[Model]:
        """Return other hyper-parameters to compare with the best optimum at the size that matters.

        For Gaussian noise, those of dense local blocks of rows, if they differ. For other
        likelihoods, whose exact bound is affordable for fewer rows, those of a few points that were
        fitted to all rows: rare events are in no small sample.
        """
        if not isinstance(self.model, SparseGP):
            model, _ = self.best_start(min(32, self.most))
            return [model.with_candidates(model.candidates[:0])]
        optimum = maximise_local_evidence(
            initial.optima[0],
            self.sample,
            generator=self._context.generator,
            budget=self.budget,
            checkpoint_log=self._context.checkpoint_log,
        )
        return [] if optimum is None else [optimum.model]

    def constant_model(self, model: Model) -> tuple[Model, float]:
        """Return the model without inducing points and with hardly any variance, and its ELBO."""
        bare = _scaled(model, variance=1e-6, lengthscale=1.0, noise=1.0)
        for kernel in initialization.trainable_variances(bare.kernel):
            initialization.set_within(kernel, "outputscale", self.sample.X.new_tensor(1e-6))
        for kernel in bare.kernel.modules():
            if isinstance(kernel, LinearKernel):
                initialization.set_within(kernel, "variance", 0 * kernel.variance + 1e-8)
        square = self.sample.Y.square().mean()
        initialization.set_noise(bare.likelihood, square.clamp_min(10 * LEAST_NOISE))
        bare = bare.with_candidates(self.sample.X[:0])
        frozen = [p for p in bare.kernel.parameters() if p.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(False)
        fitted, elbo = self.optimise(bare, stop=Stop(1e-5 * self.data.observations, 5, 50))
        for parameter in fitted.kernel.parameters():
            parameter.requires_grad_(True)
        return fitted, elbo

    def best_start(self, M: int) -> tuple[Model, float]:
        """Return the best of several starts with M points, optimised on all rows."""
        start = self.successive_halving(self.starts(M), on=self.data, iterations=50)
        return self.optimise(start, stop=Stop(3e-4 * self.data.observations, 20, 100))

    def shrunk(self, fitted: Model, M: int) -> tuple[Model, float]:
        """Return a model with M points, started from the hyper-parameters of a larger one.

        M points cannot represent the exact posterior: their optimum is closer to a smoother
        function with more noise.
        """
        soft = _scaled(fitted, variance=2.0, lengthscale=1.5, noise=2.0)
        start = self._eliminated(soft.with_candidates(fitted.candidates[:0]), M)
        part = self.part(max(2000, 16 * M))
        if part.N < self.data.N:
            start, _ = self._shortly(start, part, 100)
        return self.optimise(start, stop=Stop(2e-4 * self.data.observations, 20, 200))

    def leave_one_out(self, model: Model) -> Float[Tensor, " N"] | None:
        """Return leave-one-out log densities; None if the rows are not all in memory here."""
        if not isinstance(self.data, Dataset) or self._process_group.world_size > 1:
            return None
        return model.leave_one_out(self.data)

    def mean_density(self, densities: Float[Tensor, " N"] | None) -> float:
        """Return the mean log density per observation; NaN if none is known."""
        if densities is None:
            return nan
        if self.sample.weights is None:
            return densities.mean().item()
        return float(self.sample.weights @ densities / self.sample.weights.sum())

    def shared(self, value: float) -> float:
        """Return the value of the first process to all that share the fit."""
        return self._process_group.broadcast_object(value)

    def limit_of(self, operations: float, *, candidates: int = 0) -> str | None:
        """Return the name of the limit that prevents so many operations, or None."""
        return self._decided(lambda: self.budget.limit_of(operations, candidates=candidates))

    def _decided(self, decision: Callable[[], _Decision]) -> _Decision:
        """Return a decision; one that depends on a clock is taken by the first process, once."""
        if self.budget.seconds is None:
            return decision()
        return self._context.checkpoint_log.once(decision)

    def pool_work(self, K: int) -> float:
        """Return the operations that a pool of K candidates takes."""
        N = self.data.N
        work = selection_work(N, K)
        if not isinstance(self.model, SparseGP):
            work += 15 * self.model.chunked_cost_of(self.data, K)
        return work

    def with_fresh(self, model: Model, count: int) -> Model:
        """Return the model with up to `count` more candidates of greatest conditional variance."""
        rows = max(self._rows, 4 * (count + model.K))
        source = self._given if len(self._given) else self.part(rows).X
        greedy = greedy_variance(model.kernel, source, count, given=model.candidates.detach())
        indices = torch.tensor(
            self._process_group.broadcast_object(greedy.tolist()), dtype=torch.long
        ).to(greedy.device)
        return model.with_candidates(torch.cat([model.candidates.detach(), source[indices]]))

    def frontier(self, statistics: SubsetStatistics) -> Frontier:
        """Return the frontier of one backward elimination, that of the first process.

        Among points of nearly equal gain another machine may remove another one.
        """
        frontier = elimination_frontier(statistics)
        shared = self._process_group.broadcast(frontier.bounds, frontier.masks)
        return Frontier(*shared, N=frontier.N)

    def select(self, pool: Model, mask: Mask, elbo: float) -> Model:
        """Return the pruned pool, whose ELBO is known from the statistics."""
        pruned = pool.prune(mask)
        self._context.notify_once(Progress.of(pruned, "selection", 1, 1, elbo))
        return pruned

    def optimise(
        self, model: Model, *, stop: Stop, on: Source | None = None
    ) -> tuple[Model, float]:
        """Return a copy optimised by L-BFGS, and its ELBO in nats on the rows it was optimised on.

        The objective includes the jitter of `bounds.chunked`; the ELBO returned does not. The
        model itself is returned if the copy is no better.
        """
        moved, rows = deepcopy(model), self.data if on is None else on
        dataset = rows.as_dataset()
        dataset = self.sample if dataset is None else dataset
        _lift_noise(moved, dataset)
        cost = max(model.chunked_cost(rows), 1.0)
        affordable = self._decided(lambda: int(_SHARE * self.budget.remaining / cost))
        stop = Stop(stop.gain, stop.window, min(stop.iterations, max(_LEAST, affordable)))
        maximum = maximise_elbo(
            moved,
            dataset.X,
            objective=moved.chunked_bound(rows),
            stop=stop,
            on_step=lambda step, value: self._context.notify(
                Progress.of(moved, "optimisation", step, stop.iterations, value)
            ),
            checkpoint_log=self._context.checkpoint_log,
        )
        self.budget.spend(1.15 * maximum.iterations * cost)
        after, before = self.shared(moved.fixed_bound(rows)), self.shared(model.fixed_bound(rows))
        return (moved, after) if after > before else (model, before)

    def starts(self, M: int) -> list[Model]:
        """Return initial models with M points, the most reliable first; more where M is small.

        M points cannot represent the exact posterior: their optimum is closer to a smoother
        function with more noise.
        """
        if self.initialization is None:
            self.initialise(STAGES[-1] if M > 64 else STAGES[1])
        assert self.initialization is not None
        initial = self.initialization.best
        smooth = starting_points(initial, self.sample)[1]
        soft = _scaled(initial, variance=2.0, lengthscale=1.5, noise=2.0)
        starts = [self._eliminated(soft, M)]
        if M > 32:
            starts.append(self._eliminated(self._with_fixed_locations(initial, M), M))
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

    def successive_halving(self, starts: list[Model], *, on: Source, iterations: int) -> Model:
        """Return the best start after rounds that each drop the worse half."""
        while len(starts) > 1:
            results = [self._shortly(start, on, iterations) for start in starts]
            results.sort(key=lambda result: -result[1])
            count = (len(starts) + 1) // 2 if len(starts) > 2 else 1
            starts, iterations = [model for model, _ in results[:count]], 2 * iterations
        return starts[0]

    def _shortly(self, start: Model, on: Source, iterations: int) -> tuple[Model, float]:
        try:
            return self.optimise(start, stop=Stop(3e-4 * on.observations, 20, iterations), on=on)
        except TrainingError:
            return start, -inf

    def _eliminated(self, model: Model, M: int) -> Model:
        """Return M of the greedy candidates, by backward elimination on a subset of the rows."""
        pool = self.with_fresh(model, max(200, 2 * M))
        if pool.K <= M:
            return pool
        frontier = self.frontier(pool.subset_statistics(self.part(self._rows)))
        return pool.prune(frontier.masks[M])

    def _with_fixed_locations(self, model: Model, M: int) -> Model:
        """Return a model without points, its hyper-parameters optimised with M fixed points."""
        pool, part = self.with_fresh(model, M), self.part(self._rows)
        learnt = pool.candidates.requires_grad
        pool.candidates.requires_grad_(False)
        optimised, _ = self.optimise(pool, stop=Stop(1e-3 * part.observations, 10, 40), on=part)
        optimised.candidates.requires_grad_(learnt)
        return optimised.with_candidates(self.sample.X[:0])

    def _centres(self, model: Model, M: int) -> Model:
        """Return the model with points at M cluster centres, if locations may be anywhere."""
        if not model.candidates.requires_grad:
            return self._random(model, M, first=True)
        source = self._given if len(self._given) else self.part(self._rows).X
        if len(source.unique(dim=0)) <= M:
            return model.with_candidates(source[:M])
        (centres,) = self._process_group.broadcast(
            initialization.cluster_centres(
                source, M, generator=self._context.generator, init="random", max_iter=20
            )
        )
        return model.with_candidates(centres)

    def _random(self, model: Model, M: int, *, first: bool) -> Model:
        """Return the model with points at random rows, from either end of the fixed order."""
        source = self._given if len(self._given) else self.sample.X[self._order]
        return model.with_candidates(source[:M] if first else source[-M:])


def _sampled(data: Source, generator: torch.Generator) -> tuple[Dataset, Tensor]:
    """Return rows in memory, and a random order of them."""
    device = generator.device
    dataset = data.as_dataset()
    if dataset is not None:
        return dataset, torch.randperm(data.N, generator=generator, device=device)
    most = min(SAMPLE, max(_FEWEST, NUMBERS // (data.D + data.P)))
    if most >= data.N:
        sample = data.part(torch.arange(data.N)).to(device)
        return sample, torch.randperm(data.N, generator=generator, device=device)
    rows = sampled_rows(data.N, most, generator)
    sample = data.part(rows.cpu()).to(device)
    return sample, torch.arange(sample.N, device=device)


def _is_complete(data: Source, sample: Dataset) -> bool:
    """Return whether the sample contains all rows, and no other process has any."""
    return sample.N == data.N <= HELD and len(data.shards()) == data.process_group.world_size == 1


def _lift_noise(model: InducingModel, rows: Dataset) -> None:
    """Reset noise that has reached its lower constraint, where its gradient vanishes."""
    least = max(1e-4 * float(rows.Y.square().mean()), 10 * LEAST_NOISE)
    noise = initialization.noise_of(model.likelihood)
    if noise is not None and noise.value.item() < least:
        initialization.set_noise(model.likelihood, rows.X.new_tensor(least))


def _scaled(model: Model, *, variance: float, lengthscale: float, noise: float) -> Model:
    """Return a copy with trainable kernel variances, lengthscales and noise multiplied."""
    scaled = deepcopy(model)
    for kernel in initialization.trainable_variances(scaled.kernel):
        initialization.set_within(kernel, "outputscale", variance * kernel.outputscale.detach())
    for kernel in initialization.trainable_lengthscales(scaled.kernel):
        initialization.set_within(kernel, "lengthscale", lengthscale * kernel.lengthscale.detach())
    learnt = initialization.noise_of(scaled.likelihood)
    if learnt is not None:
        initialization.set_noise(scaled.likelihood, noise * learnt.value)
    return scaled
