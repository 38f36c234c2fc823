"""The steps of the fast schedule of models with one candidate set."""

import warnings
from collections.abc import Callable
from math import inf
from typing import Generic, TypeVar, final

import torch
from gpytorch.kernels import Kernel

from winnowgp.data import Dataset, Source
from winnowgp.data.distributed import ProcessGroup
from winnowgp.errors import ConvergenceWarning, TrainingError
from winnowgp.linalg import threads_for
from winnowgp.models import SparseGP, greedy_variance
from winnowgp.models.base import Model
from winnowgp.models.kernels import copy_module
from winnowgp.models.likelihoods import observation_model
from winnowgp.models.priors import log_prior
from winnowgp.selection import Frontier, SubsetStatistics, elimination_frontier
from winnowgp.training import initialization
from winnowgp.training.budget import Budget, dense_work, selection_work
from winnowgp.training.callbacks import Progress
from winnowgp.training.cross_validation import FOLDS, CrossValidation
from winnowgp.training.hyperparameters import (
    STAGES,
    Initialization,
    affordable,
    maximise_evidence,
)
from winnowgp.training.initialization import (
    is_complete,
    representative_rows,
    rows_in_memory,
    with_unit_weights,
)
from winnowgp.training.lbfgs import Curvature, Stop, maximise_elbo
from winnowgp.training.local_evidence import maximise_local_evidence
from winnowgp.training.optima import Optimum
from winnowgp.training.schedules import TrainingContext
from winnowgp.training.scoring import optimise_evidence
from winnowgp.typing import Mask

_Decision = TypeVar("_Decision")

# Fewest L-BFGS iterations of a run that the budget limits.
_LEAST = 10
# Nats per observation gained by the last iterations from which an optimisation has not settled.
_UNSETTLED = 1e-3
# A sample of so many rows resolves the structure that inducing points could represent.
_MANY_ROWS = 10_000
# Elements of K_uf from which float32 saves time: half of it on a CPU, 128 points and 7,000 rows.
# Where Python and small factors take most of the time, its rounding costs iterations instead.
_LARGE = 200_000
# Folds of held-out rows for other likelihoods, whose sites are inferred for each model anew.
_SITE_FOLDS = 2
# Nats per observation by which a fresh start must beat the parameters of an earlier fit.
_DISTINCT = 2e-3
# L-BFGS iterations of the evidence without held-out rows.
_REFIT = 30
# Share of a wall-clock limit after which other regimes are not looked for.
_LATE = 0.5
# Share of the remaining work that one run may take.
_SHARE = 0.5


@final
class FastSteps(Generic[Model]):
    """The steps of the fast schedule on a fixed random order of the rows.

    Steps that need few rows use rows in memory: all of them, or a random sample of a source that is
    not in memory. A source that is no larger than the sample is read once.

    Args:
        model: its own candidates, if it has any, are the pool that fresh candidates are drawn from;
            otherwise the rows are.
        rows: number of rows that candidates are drawn from and starts compared on.
        warm_start: whether parameters and candidates of the model are those of an earlier fit, in
            place of the search for starts.
        max_starts: largest number of starts if rows are few; see `FastSchedule`.
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
        warm_start: bool = False,
        max_starts: int | None = None,
    ) -> None:
        self.model, self.warm_start, self._max_starts = model, warm_start, max_starts
        self.budget = budget or Budget(model.candidates.device)
        self.initialization: Initialization[Model] | None = None
        self.kernels, self.linear_term = kernels, linear_term
        self._rows, self._context = rows, context
        self.sample, self._order = rows_in_memory(data, context.generator)
        self.data = self.sample if is_complete(data, self.sample) else data
        self._given = model.candidates.detach().clone()
        # Points of an earlier fit are no limit on where candidates may be.
        self.earlier = self._given if warm_start and model.candidates.requires_grad else None
        if self.earlier is not None:
            self._given = self._given[:0]
        self._latents = observation_model(model.likelihood).num_latents(data.P)
        self._unsettled: list[tuple[Model, float]] = []

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
        most = self.affordable_rows()
        count = most if rows is None else min(rows, most)
        self.initialization = self._continued(min(count, self.sample.N))
        if self.initialization is None:
            self.initialization = self.evidence_optima(self.sample, count)
        best = self.initialization.best
        self._context.notify_once(Progress.of(best, "initialisation", 1, 1, -inf))
        return self.initialization

    def affordable_rows(self) -> int:
        """Return the number of rows whose exact evidence is affordable."""
        cost = float(self.model.noise_terms(self.data))
        if not isinstance(self.model, SparseGP):
            # Each value takes several factorisations for each latent function.
            cost = 1000.0 * self._latents
        return self._decided(lambda: max(self.budget.dense_rows(cost), STAGES[0]))

    def evidence_optima(self, data: Dataset, rows: int | None = None) -> Initialization[Model]:
        """Return the optima of the exact evidence of up to so many rows; of all by default."""
        models = [self.model]
        for kernel in self.kernels:
            other = copy_module(self.model)
            other.kernel = copy_module(kernel).to(self.sample.X)
            models.append(other)
        return maximise_evidence(
            models,
            data,
            order=self._order,
            rows=data.N if rows is None else rows,
            linear_term=self.linear_term,
            max_starts=self._max_starts,
            budget=self.budget,
            checkpoint_log=self._context.checkpoint_log,
        )

    def maximise_evidence_of(self, model: Model, rows: Dataset) -> tuple[Model, float]:
        """Return the optimum of the exact evidence of some rows next to a model, and its nats."""
        found = copy_module(model)
        work, log = 1.15 * dense_work(found, rows), self._context.checkpoint_log
        stop = affordable(Stop(1e-3 * rows.observations, 5, _REFIT), work, self.budget, log)
        maximum = optimise_evidence(found, rows, stop, log)
        self.budget.spend(maximum.iterations * work)
        return found, maximum.value

    def affordable_evaluations(self, model: Model, rows: Source) -> float:
        """Return the evaluations of a bound and its gradient that the work left suffices for."""
        cost = max(model.chunked_cost(rows), 1.0)
        return self._decided(lambda: self.budget.remaining / cost)

    def share_of_work(self, share: float) -> float:
        """Return a share of the operations of the fit, and no more than a clock leaves time for."""
        if self.budget.seconds is None:
            return share * self.budget.work_limit
        return self._decided(lambda: min(share * self.budget.work_limit, self.budget.remaining))

    def is_late(self, share: float = 1.0) -> bool:
        """Return whether a share of the wall-clock limit has passed; False without one."""
        return self.budget.seconds is not None and self._decided(lambda: self.budget.expired(share))

    def forget_earlier(self) -> None:
        """Search for starts as if there were no earlier fit."""
        self.warm_start, self.earlier = False, None

    def _continued(self, count: int) -> Initialization[Model] | None:
        """Return the optimum of the exact evidence of some rows next to that of an earlier fit.

        None if there is no earlier fit, or if one fresh start reaches a higher evidence: few rows
        may have been explained as noise, and parameters stay where they are then.
        """
        if not self.warm_start:
            return None
        bare = self.model.with_candidates(self.sample.X[:0])
        rows = representative_rows(bare, self.sample, self._order, count)
        rows = with_unit_weights(bare, rows)
        initialization.lift_noise(bare, rows)
        optima = []
        for model in (bare, initialization.starting_points(bare, self.sample, 2)[1]):
            stop = Stop(3e-4 * rows.observations, 10, 60)
            maximum = optimise_evidence(model, rows, stop, self._context.checkpoint_log)
            self.budget.spend(1.15 * maximum.iterations * dense_work(model, rows))
            optima.append(Optimum(model, maximum.value, rows.observations, 0))
        optimum, fresh = optima
        if self.shared(optimum.evidence - fresh.evidence) < -_DISTINCT * rows.observations:
            self.forget_earlier()
            return None
        evidence = optimum.evidence / rows.observations
        return Initialization((optimum,), count, count == self.data.N, (evidence,))

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
        fitted to all rows: rare events are in no small sample. None where an earlier fit has found
        its regime.
        """
        if self.warm_start:
            return []
        if not isinstance(self.model, SparseGP):
            model, _ = self.best_start(min(32, self.most))
            return [model.with_candidates(model.candidates[:0])]
        if self.is_late(_LATE):
            return []
        if initial.rows >= min(self.data.N / 2, _MANY_ROWS):
            return []
        optimum = maximise_local_evidence(
            initial.optima[0],
            self.sample,
            generator=self._context.generator,
            budget=self.budget,
            checkpoint_log=self._context.checkpoint_log,
        )
        return [] if optimum is None else [optimum.model]

    def best_start(self, M: int) -> tuple[Model, float]:
        """Return the best of several starts with M points, optimised on all rows."""
        (start,) = self.successive_halving(self.starts(M), on=self.data, iterations=50)
        return self.optimise(start, stop=Stop(3e-4 * self.data.observations, 20, 100))

    def precision(self, M: int) -> str | None:
        """Return "mixed"; None where an evaluation with M points is quick, and quicker without."""
        return None if self.data.N * M <= 250_000 else "mixed"

    @property
    def can_hold_out(self) -> bool:
        """Whether rows can be held out: all of them are in the memory of this process."""
        return isinstance(self.data, Dataset) and self._process_group.world_size == 1 < self.data.N

    def cross_validation(self, K: int, *, share: float) -> CrossValidation | None:
        """Return folds of held-out rows; None if rows cannot be held out.

        Args:
            K: number of candidates of the model.
            share: share of the work of a default fit; one fold is always affordable.
        """
        if not self.can_hold_out:
            return None
        folds = share * self.budget.work_limit / max(selection_work(self.model, self.data, K), 1.0)
        most = FOLDS if isinstance(self.model, SparseGP) else _SITE_FOLDS
        return CrossValidation.of(self.sample, self._order, folds=int(min(folds, most)))

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
        work = selection_work(self.model, self.data, K)
        if not isinstance(self.model, SparseGP):
            work += 15 * self.model.chunked_cost_of(self.data, K)
        return work

    def with_fresh(self, model: Model, count: int) -> Model:
        """Return the model with up to `count` more candidates of greatest conditional variance."""
        rows = max(self._rows, 4 * (count + model.K))
        source = self._given if len(self._given) else self.part(rows).X
        greedy = greedy_variance(model.kernel, source, count, given=model.candidates.detach())
        shared = self._process_group.broadcast_object(greedy.tolist())
        indices = torch.tensor(shared, dtype=torch.long, device=greedy.device)
        return model.with_candidates(torch.cat([model.candidates.detach(), source[indices]]))

    def frontier(self, statistics: SubsetStatistics) -> Frontier:
        """Return the frontier of one backward elimination, that of the first process.

        Among points of nearly equal gain another machine may remove another one.
        """
        with threads_for(12.0 * statistics.K**3):
            frontier = elimination_frontier(statistics)
        shared = self._process_group.broadcast(frontier.bounds, frontier.masks)
        return Frontier(*shared, N=frontier.N)

    def select(self, pool: Model, mask: Mask, elbo: float) -> Model:
        """Return the pruned pool, whose ELBO is known from the statistics."""
        pruned = pool.prune(mask)
        objective = self.objective(pruned, elbo)
        self._context.notify_once(Progress.of(pruned, "selection", 1, 1, objective))
        return pruned

    def optimise(
        self,
        model: Model,
        *,
        stop: Stop,
        on: Source | None = None,
        precision: str | None = None,
        phase: str = "optimisation",
        share: float = _SHARE,
        curvature: Curvature | None = None,
    ) -> tuple[Model, float]:
        """Return a copy optimised by L-BFGS, and its ELBO in nats on the rows it was optimised on.

        The objective includes the jitter of `bounds.row_blocks`; the ELBO returned does not. The
        model itself is returned if the copy is no better.

        Args:
            model: the model to start from.
            stop: stopping rule.
            on: the rows; all by default.
            precision: precision of the objective of a `SparseGP`, instead of the model's own, where
                K_uf is large. The ELBO is computed in double precision.
            phase: name of the phase, for callbacks.
            share: share of the work that is left which the iterations may take.
            curvature: as in `maximise`.
        """
        moved, rows = copy_module(model), self.data if on is None else on
        large = rows.N * model.K >= _LARGE
        if precision is not None and large and isinstance(moved, SparseGP):
            moved.precision = precision
        dataset = rows.as_dataset()
        dataset = self.sample if dataset is None else dataset
        initialization.lift_noise(moved, dataset)
        most = int(share * self.affordable_evaluations(model, rows))
        stop = Stop(stop.gain, stop.window, min(stop.iterations, max(_LEAST, most)))
        count = rows.N if rows.N < self.data.N else None
        # Steps and factors of K_uu are small; passes over the rows use all threads.
        with threads_for(10.0 * model.K**3):
            maximum = maximise_elbo(
                moved,
                dataset.X,
                objective=moved.chunked_bound(rows),
                stop=stop,
                on_step=lambda step, value: self._context.notify(
                    Progress.of(moved, phase, step, stop.iterations, value, rows=count)
                ),
                checkpoint_log=self._context.checkpoint_log,
                curvature=curvature,
            )
        if isinstance(moved, SparseGP) and isinstance(model, SparseGP):
            moved.precision = model.precision
        self.budget.spend(1.15 * maximum.iterations * model.chunked_cost(rows))
        after, before = self.shared(moved.fixed_bound(rows)), self.shared(model.fixed_bound(rows))
        better = self.objective(moved, after) > self.objective(model, before)
        best, elbo = (moved, after) if better else (model, before)
        self._unsettled = [each for each in self._unsettled if each[0] is not best]
        if maximum.last_gain > _UNSETTLED * rows.observations:
            self._unsettled.append((best, maximum.last_gain / rows.observations))
        return best, elbo

    def objective(self, model: Model, elbo: float) -> float:
        """Return an ELBO with the priors of the hyper-parameters, to compare models of one size."""
        with torch.no_grad():
            return elbo + self.shared(log_prior(model).item())

    def warn_unless_settled(self, model: Model) -> None:
        """Warn if the optimisation that led to a model ended while it still gained."""
        gains = [gain for other, gain in self._unsettled if other is model]
        if gains and self._process_group.is_first:
            warnings.warn(
                "the optimisation of the inducing points did not settle: its last iterations still "
                f"gained {gains[0]:.2g} nats per observation when their number reached its limit. "
                "Fit with fewer points (`max_points`), give it more time with `max_fit_seconds`, "
                "or use a GPU with `device='cuda'`.",
                ConvergenceWarning,
                stacklevel=2,
            )

    def starts(self, M: int) -> list[Model]:
        """Return initial models with M points, the most reliable first; more where M is small.

        The optimum of few points is closer to a smoother function with more noise than the exact.
        """
        # The optimisation moves hyper-parameters on; more rows took longer and ended no higher.
        initial = (self.initialization or self.initialise(STAGES[0])).best
        if self.earlier is not None:
            return [self.resized(self.model, M)]
        smooth = initialization.starting_points(initial, self.sample, 2)[1]
        soft = initialization.scaled(initial, variance=2.0, lengthscale=1.5, noise=2.0)
        starts = [self.eliminated(soft, M), self.eliminated(smooth, M)]
        if M > 32:
            starts.append(self.eliminated(self._with_fixed_locations(initial, M), M))
        if M <= 64:
            starts.append(self.centres(smooth, M))
        if M <= 16:
            starts.append(self.centres(soft, M))
            smoother = initialization.scaled(smooth, variance=1.0, lengthscale=2.0, noise=3.0)
            starts += [self.centres(smooth, M), self.centres(smoother, M)]
            starts += [self._random(smooth, M, first=True), self._random(soft, M, first=False)]
        return starts

    def successive_halving(
        self, starts: list[Model], *, on: Source, iterations: int, count: int = 1
    ) -> list[Model]:
        """Return the best starts after rounds that each drop the worse half, the best first.

        Args:
            iterations: L-BFGS iterations of the first round; twice as many in each further one.
            count: number of starts that remain.
        """
        while len(starts) > count:
            results = [self.shortly(start, on, iterations) for start in starts]
            results.sort(key=lambda result: -self.objective(*result))
            half = (len(starts) + 1) // 2 if len(starts) > 2 else 1
            starts = [model for model, _ in results[: max(half, count)]]
            iterations = 2 * iterations
        return starts

    def shortly(
        self, start: Model, on: Source, iterations: int, phase: str = "optimisation"
    ) -> tuple[Model, float]:
        """Return a start after some iterations, and its ELBO; −∞ where that cannot be computed."""
        stop, precision = Stop(3e-4 * on.observations, 20, iterations), self.precision(start.K)
        try:
            return self.optimise(start, stop=stop, on=on, precision=precision, phase=phase)
        except TrainingError:
            return start, -inf

    def eliminated(self, model: Model, M: int) -> Model:
        """Return M of the greedy candidates, by backward elimination on a subset of the rows."""
        pool = self.with_fresh(model, max(200, 2 * M))
        if pool.K <= M:
            return pool
        frontier = self.frontier(pool.subset_statistics(self.part(self._rows)))
        return pool.prune(frontier.masks[M])

    def resized(self, model: Model, M: int) -> Model:
        """Return the model with its own points, eliminated or extended to M of them."""
        if model.K < M:
            return self.with_fresh(model, M - model.K)
        if model.K == M:
            return model
        return model.prune(self.frontier(model.subset_statistics(self.data)).masks[M])

    def _with_fixed_locations(self, model: Model, M: int) -> Model:
        """Return a model without points, its hyper-parameters optimised with M fixed points."""
        pool, part = self.with_fresh(model, M), self.part(self._rows)
        learnt = pool.candidates.requires_grad
        pool.candidates.requires_grad_(False)
        optimised, _ = self.optimise(pool, stop=Stop(1e-3 * part.observations, 10, 40), on=part)
        optimised.candidates.requires_grad_(learnt)
        return optimised.with_candidates(self.sample.X[:0])

    def centres(self, model: Model, M: int) -> Model:
        """Return the model with points at M cluster centres, if locations may be anywhere."""
        if not model.candidates.requires_grad:
            return self._random(model, M, first=True)
        source = self._given if len(self._given) else self.part(self._rows).X
        if len(source.unique(dim=0)) <= M:
            return model.with_candidates(source[:M])
        (centres,) = self._process_group.broadcast(
            initialization.random_start_centres(
                source, M, generator=self._context.generator, max_iter=20
            )
        )
        return model.with_candidates(centres)

    def _random(self, model: Model, M: int, *, first: bool) -> Model:
        """Return the model with points at random rows, from either end of the fixed order."""
        source = self._given if len(self._given) else self.sample.X[self._order]
        return model.with_candidates(source[:M] if first else source[-M:])
