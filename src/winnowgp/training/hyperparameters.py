"""Hyper-parameters and kernel from the exact evidence, at the resolution of the data.

Few rows cannot resolve fine structure: their evidence explains it as noise, and then few inducing
points suffice. So the evidence is maximised on as many rows as the budget affords, in stages:

1. A few rows: many starts of the first kernel.
2. More rows: the best modes, starts in which the function varies along one column only, the other
   kernels from the best mode, and each kernel with hardly any noise.
3. All affordable rows: the best few optima (of up to 1,000 rows two of each kernel), the best
   kernel from the start, and a linear term once more, if rows that are left out are not predicted
   worse with it. Where a bound with few inducing points is close to the evidence, it is maximised
   first.

Optima that differ are all returned. If they are not those of all rows, `local_evidence` looks for
finer structure, and the collapsed bound of all rows decides later.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf, sqrt
from typing import Generic

import torch
from jaxtyping import Int
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.errors import NotPositiveDefiniteError, TrainingError
from winnowgp.models import SparseGP
from winnowgp.models.base import InducingModel, Model
from winnowgp.models.greedy import pivoted_cholesky
from winnowgp.models.kernels import copy_module
from winnowgp.models.priors import log_prior
from winnowgp.training.budget import Budget, dense_work
from winnowgp.training.checkpoint import NO_CHECKPOINT_LOG, CheckpointLog
from winnowgp.training.initialization import (
    column_spread,
    noise_of,
    representative_rows,
    scaled,
    set_within,
    shorten_lengthscales,
    starting_points,
    trainable_lengthscales,
    transferred,
    with_linear_term,
    with_unit_weights,
)
from winnowgp.training.lbfgs import Curvature, Stop, maximise_elbo
from winnowgp.training.optima import (
    Optimum,
    Start,
    approaches,
    best_objectives,
    best_optima,
    descending,
    distinct_optima,
    has_lost,
    predicts_worse,
)
from winnowgp.training.scoring import optimise_evidence

# Rows of the first stages; further stages have four times as many.
STAGES = (250, 500, 1000)
# Lengthscales of starts that vary along one column, in standard deviations of the column.
_SHORT = (0.3, 0.1, 0.03, 0.01)
# Factor of the noise of an optimum, in starts with hardly any.
_LITTLE = 1e-3
# Starts that are all optimised to the end, and iterations after which others are compared.
_FEW, _SHORTLY = 3, 12
# A bound stands for the evidence: rows per inducing point (of many rows, half of them are points);
# largest gap to the evidence at the start, in nats per observation; unexplained variance, in nats,
# at which fewer points suffice; multiple of the gap from which the gap is not computed; and the gap
# that may be left at the end.
_ROWS_PER_POINT, _CLOSE, _SELECTED, _FAR, _LEFT = 4, 2e-3, 1e-5, 10.0, 1e-3
# Share of the remaining time that one start may take, and the iterations that each has at least.
_SHARE, _LEAST = 0.2, 5


@dataclass(frozen=True, slots=True)
class Initialization(Generic[Model]):
    """The optima of the exact evidence, and the comparison of the kernels."""

    optima: tuple[Optimum[Model], ...]
    """Distinct optima, the best first."""
    rows: int
    """Number of rows of their evidence."""
    complete: bool
    """Whether these are all rows, so that the evidence limits every ELBO."""
    kernels: tuple[float, ...]
    """Best evidence of each kernel, with priors, in nats per observation, on the rows on which they
    were compared; −∞ for a kernel that failed."""
    linear_gain: float | None = None
    """Nats per observation by which a linear term raised the evidence, if one was added."""
    linear_kernel: int = 0
    """Position of the kernel that the linear term was added to."""
    held: tuple[str, ...] = ()
    """Names of kernel parameters that stay as they are during the fit, and are free after it."""
    constant_weight: float = 0.0
    """Expected share of observations that a constant describes and not the best optimum."""
    constant_gain: float = 0.0
    """Nats per held-out row that the average with a constant of this weight gains."""

    @property
    def best(self) -> Model:
        """The model without candidates at the best optimum."""
        return self.optima[0].model


def maximise_evidence(
    models: Sequence[Model],
    data: Dataset,
    *,
    order: Int[Tensor, " N"],
    rows: int,
    linear_term: bool = False,
    max_starts: int | None = None,
    budget: Budget,
    checkpoint_log: CheckpointLog = NO_CHECKPOINT_LOG,
) -> Initialization[Model]:
    """Return the optima of the exact evidence of up to `rows` rows.

    A wall-clock limit ends the search early, after one start at least. The optima are those of the
    rows of the last stage that was reached.

    Args:
        models: one model per kernel that is compared; the starts of the first are searched widely.
        data: rows in memory.
        order: random order of the rows.
        rows: number of rows of the last stage, if there are as many.
        linear_term: whether to try a linear term in addition.
        max_starts: largest number of starts if all rows are in the first stage; see
            `FastSchedule`.
    """
    search = _Search(models, data, order, budget, checkpoint_log)
    rows = min(rows, data.N)
    first, *others = _stages(rows)
    points, few_starts = starting_points(models[0], data), not others and max_starts is not None
    if few_starts:
        # The longest lengthscales with most noise, the shortest with least, and the model as given.
        points = [points[1], points[-1], points[0], *points[2:-1]][:max_starts]
    ranked = search.optimise([Start(m, 0) for m in points], first)
    if search.is_late():
        return search.initialization(ranked, first)
    comparison = others[0] if others else first
    starts = [] if few_starts else search.single_columns(comparison)
    if others:
        ranked = search.optimise([*search.continued(ranked), *starts], comparison)
    elif not few_starts and not search.is_late():
        # The first of those that continue is an optimum of these rows already.
        ranked += search.optimise([*search.continued(ranked)[1:], *starts], comparison)
        ranked.sort(key=descending)
    if len(models) > 1 and not search.is_late():
        ranked += search.optimise(search.other_kernels(ranked, first), comparison)
        ranked.sort(key=descending)
    if others and not search.is_late():
        ranked += search.optimise(search.little_noise(ranked), comparison)
        ranked.sort(key=descending)
    result, linear_gain, linear_kernel = search.initialization(ranked, comparison), None, 0
    if linear_term and not comparison < rows <= STAGES[-1] and not search.is_late():
        ranked, linear_gain = search.linear_term(ranked, best_optima(ranked)[:2], comparison)
        linear_kernel = ranked[0].kernel
    reached = comparison
    for count in others[1:]:
        if search.is_late():
            break
        reached = count
        if count <= STAGES[-1] and linear_gain is None:
            # With more rows a second optimum of a kernel may become its best, one of less noise
            # usually; and fewer rows may have no optimum near the best one of these.
            starts = search.continued(ranked, of_each_kernel=True)
            ranked = search.optimise(starts, count, continued=True)
            ranked += search.optimise([search.fresh(ranked[0].kernel)], count)
            ranked.sort(key=descending)
            result = search.initialization(ranked, count)
        else:
            # The exact evidence of many rows is expensive, and its best mode is known by then.
            most = 1 if count > 4 * STAGES[-1] else 3
            ranked = search.optimise(search.continued(ranked)[:most], count, continued=True)
    late = linear_term and search.is_late()
    if linear_term and linear_gain is None and comparison < rows <= 4 * STAGES[-1] and not late:
        # A slope that pays with all rows may not pay with a part of them.
        bases = best_optima(ranked)[: 2 if reached <= STAGES[-1] else 1]
        ranked, linear_gain = search.linear_term(ranked, bases, reached)
        linear_kernel = ranked[0].kernel
    return replace(
        result,
        optima=tuple(distinct_optima(ranked)),
        rows=reached,
        complete=reached == data.N,
        linear_gain=linear_gain,
        linear_kernel=linear_kernel,
    )


def _stages(rows: int) -> list[int]:
    """Return the numbers of rows of all stages, the last one `rows`.

    >>> _stages(300), _stages(3000), _stages(18000)
    ([250, 300], [250, 500, 1000, 3000], [250, 500, 1000, 4000, 18000])
    """
    stages = [count for count in STAGES if count < rows]
    while stages and 8 * stages[-1] < rows:
        stages.append(4 * stages[-1])
    return [*stages, rows]


@dataclass(frozen=True, slots=True)
class _Search(Generic[Model]):
    """The steps of `maximise_evidence`."""

    models: Sequence[Model]
    data: Dataset
    order: Tensor
    budget: Budget
    checkpoint_log: CheckpointLog

    def is_late(self) -> bool:
        """Return whether a wall-clock limit leaves no time for further starts."""
        if self.budget.seconds is None:
            return False
        return self.checkpoint_log.once(lambda: self.budget.search_expired)

    def initialization(self, ranked: list[Optimum[Model]], count: int) -> Initialization[Model]:
        """Return the optima on `count` rows, the best first, and the best of each kernel."""
        kernels = best_objectives(ranked, len(self.models))
        optima = tuple(distinct_optima(ranked))
        return Initialization(optima, count, count == self.data.N, kernels)

    def rows(self, count: int) -> Dataset:
        rows = representative_rows(self.models[0], self.data, self.order, count)
        return with_unit_weights(self.models[0], rows)

    def optimise(
        self, starts: Sequence[Start[Model]], count: int, *, continued: bool = False
    ) -> list[Optimum[Model]]:
        """Return the optimum of each start on `count` rows, the best first.

        All are compared after a few iterations. Those that approach an optimum which another start
        has reached are left out. Of many starts, the worse half is not continued, except for the
        best of each kernel; of starts on many rows, all but the best.

        Args:
            continued: whether the starts are optima of fewer rows; those far below the best have
                lost then, unless they rise.
        """
        rows, expensive = self.rows(count), count > STAGES[-1]
        gain = 3e-4 if expensive or rows.N == self.data.N else 1e-3
        last = continued and rows.N == self.data.N and not expensive
        # A linear term takes over slowly.
        stop = Stop((1e-4 if last else gain) * rows.observations, 10, 120 if last else 60)
        few = len(starts) <= (1 if expensive else _FEW)
        # The first of few starts is the most promising one.
        ranked = self._ranked(starts[:1], rows, stop) if few else []
        first = self._ranked(starts[len(ranked) :], rows, Stop(stop.gain, stop.window, _SHORTLY))
        half = first if few else first[: 1 if expensive else (len(first) + 1) // 2]
        best = [] if expensive else best_optima(first)
        highest = max([o.objective for o in (*ranked, *first)], default=-inf)
        for optimum in first:
            if any(approaches(optimum, other, rows) for other in ranked):
                continue
            lost = continued and has_lost(optimum, highest)
            settled = optimum.converged and optimum.objective == highest
            if lost or settled or (optimum not in half and optimum not in best):
                ranked.append(optimum)
            else:
                start = Start(optimum.model, optimum.kernel, optimum.curvature)
                if optimum.converged:
                    # Perhaps at a saddle point, which a fresh start leaves.
                    start = replace(start, curvature=Curvature())
                ranked += self._ranked([start], rows, stop)
        return sorted(ranked, key=descending)

    def _ranked(
        self, starts: Sequence[Start[Model]], rows: Dataset, stop: Stop
    ) -> list[Optimum[Model]]:
        """Return the optimum of each start, the best first.

        Starts that few inducing points represent are optimised with these first. Where their bound
        does not end at the evidence, the best of them is optimised by the evidence then. If that
        hardly gains, it would not for the others. With many rows, all starts but the first are
        optimised with few points in any case.
        """
        optima, approximate = [], []
        for index, start in enumerate(starts):
            if index and self.is_late():
                break
            start = replace(start, model=copy_module(start.model))
            close = inf if index and STAGES[-1] < rows.N else _CLOSE
            sparse = self._optimise_sparse(start, rows, stop, close=close)
            if sparse is None:
                optima.append(self._optimise(start, rows, stop))
            else:
                optimum, ended = sparse
                (optima if ended else approximate).append(optimum)
        approximate.sort(key=descending)
        settled = stop.iterations <= _SHORTLY
        for optimum in approximate:
            if settled or self.is_late():
                optima.append(optimum)
                continue
            start = Start(copy_module(optimum.model), optimum.kernel, optimum.curvature)
            after = self._optimise(start, rows, Stop(0.3 * stop.gain, 3, stop.iterations))
            settled = after.objective - optimum.objective < _CLOSE * rows.observations
            optima.append(after)
        return sorted(optima, key=descending)

    def _optimise(self, start: Start[Model], rows: Dataset, stop: Stop) -> Optimum[Model]:
        """Maximise the evidence of the rows in place; −∞ where it cannot be computed."""
        model = start.model
        stop = affordable(stop, 1.15 * dense_work(model, rows), self.budget, self.checkpoint_log)
        maximum = optimise_evidence(model, rows, stop, self.checkpoint_log, start.curvature)
        self.budget.spend(1.15 * maximum.iterations * dense_work(model, rows))
        return start.optimum(maximum, rows)

    def _optimise_sparse(
        self, start: Start[Model], rows: Dataset, stop: Stop, *, close: float = _CLOSE
    ) -> tuple[Optimum[Model], bool] | None:
        """Maximise the bound of inducing points at rows, in place, where it is close and quicker.

        Args:
            close: nats per observation that the bound may be below the evidence at the start.

        Returns: the optimum with its evidence, and whether the bound is as high there, so that
            maximising the evidence itself would gain little; None if the model is as it was,
            because the bound of so few points is below the evidence.
        """
        model = start.model
        if STAGES[1] >= rows.N or not isinstance(model, SparseGP):
            return None
        # The unexplained variance costs ½ Σ_i (k_ii − q_ii)/σ² nats.
        unit = 2 * model.noise.detach().min().item() * rows.N
        few = STAGES[-1] < rows.N and close < inf
        most = rows.N // (2 * _ROWS_PER_POINT if few else _ROWS_PER_POINT)
        none = rows.X[:0]
        points = pivoted_cholesky(model.kernel, rows.X, most, given=none, stop=_SELECTED * unit)
        if not len(points.traces) or points.traces[-1].item() > _FAR * close * unit:
            return None
        sparse = model.with_candidates(rows.X[points.indices])
        sparse.candidates.requires_grad_(False)
        cost = 1.15 * sparse.chunked_cost(rows)
        stop = affordable(stop, cost, self.budget, self.checkpoint_log)
        try:
            gap = _value(model, rows) - sparse.fixed_bound(rows)
            if not gap <= close * rows.observations:
                return None
            maximum = maximise_elbo(
                sparse,
                rows.X,
                objective=sparse.chunked_bound(rows),
                stop=stop,
                checkpoint_log=self.checkpoint_log,
                curvature=start.curvature,
            )
            bound = sparse.fixed_bound(rows)
        except (NotPositiveDefiniteError, TrainingError):
            start.curvature.clear()  # of a bound whose optimum is not used
            return None
        self.budget.spend(maximum.iterations * cost)
        model.load_state_dict({**sparse.state_dict(), "candidates": model.candidates.detach()})
        maximum = replace(maximum, value=_value(model, rows))
        optimum = start.optimum(maximum, rows)
        return optimum, optimum.evidence - bound <= _LEFT * rows.observations

    def continued(
        self, ranked: Sequence[Optimum[Model]], *, of_each_kernel: bool = False
    ) -> list[Start[Model]]:
        """Return the best optimum as it is, and two distinct ones with lengthscales within range.

        Those two are the best of all, or the best of each kernel.

        The best one unchanged as well: bringing back the lengthscale of a column that is irrelevant
        with more rows, too, can end in a worse mode.
        """
        distinct, starts = distinct_optima(ranked), [Start(ranked[0].model, ranked[0].kernel)]
        chosen = distinct[:2]
        if of_each_kernel:
            own = ([o for o in distinct if o.kernel == k][:2] for k in range(len(self.models)))
            chosen = sorted(chain.from_iterable(own), key=descending)
        for optimum in chosen:
            model = copy_module(optimum.model)
            if shorten_lengthscales(model.kernel, self.data) or optimum is not ranked[0]:
                starts.append(Start(model, optimum.kernel))
        return starts

    def fresh(self, kernel: int) -> Start[Model]:
        """Return the first start of a kernel, with lengthscales of √D standard deviations."""
        return Start(starting_points(self.models[kernel], self.data, 2)[1], kernel)

    def single_columns(self, count: int, most: int = 2) -> list[Start[Model]]:
        """Return the most probable starts of functions that vary rapidly along one column only."""
        rows = self.rows(count)
        template = starting_points(self.models[0], self.data)[-1]
        tried, values = copy_module(template), []
        for part, kernel in enumerate(trainable_lengthscales(tried.kernel)):
            spread = column_spread(kernel, self.data)
            if spread.dim() == 0 or (len(spread) == 1 and self.data.D == 1):
                continue
            before = kernel.lengthscale.detach().clone()
            for column in range(len(spread)):
                for short in _SHORT:
                    lengthscale = 2 * sqrt(len(spread)) * spread
                    lengthscale[column] = short * spread[column]
                    set_within(kernel, "lengthscale", lengthscale)
                    values.append((_objective(tried, rows), part, lengthscale))
            set_within(kernel, "lengthscale", before)
        self.budget.spend(0.4 * len(values) * dense_work(template, rows))
        values.sort(key=lambda value: -value[0])
        starts = []
        for _, part, lengthscale in (value for value in values[:most] if value[0] > -inf):
            start = copy_module(template)
            set_within(trainable_lengthscales(start.kernel)[part], "lengthscale", lengthscale)
            starts.append(Start(start, 0))
        return starts

    def little_noise(self, ranked: Sequence[Optimum[Model]]) -> list[Start[Model]]:
        """Return the best optimum of each kernel with hardly any noise.

        The evidence often has two optima, of a smooth function with noise and of a rougher one with
        nearly none, and all other starts may end at the first.
        """
        if noise_of(self.models[0].likelihood) is None:
            return []
        best = best_optima([o for o in ranked if o.objective > -inf])
        return [Start(scaled(o.model, noise=_LITTLE), o.kernel) for o in best]

    def linear_term(
        self, ranked: list[Optimum[Model]], bases: Sequence[Optimum[Model]], count: int
    ) -> tuple[list[Optimum[Model]], float | None]:
        """Return the optima, with one that has a linear term first if that pays, and its gain.

        Args:
            ranked: optima on `count` rows, the best first.
            bases: those to which the term is added.

        Returns: the gain is in nats per observation, None if the term does not pay: neither if the
            evidence gains little nor if rows that are left out are predicted clearly worse.
        """
        starts = [Start(with_linear_term(base.model, self.data), base.kernel) for base in bases]
        needed = max(0.01 * ranked[0].observations, 3 + 0.5 * self.data.D)
        best = self.optimise(starts, count, continued=True)[0]
        gain = best.objective - ranked[0].objective
        if gain <= needed or predicts_worse(best.model, ranked[0].model, self.rows(count)):
            return ranked, None
        return [best, *ranked], gain / best.observations

    def other_kernels(self, ranked: Sequence[Optimum[Model]], count: int) -> list[Start[Model]]:
        """Return starts of the other kernels: the best modes of the first, and one of their own.

        Args:
            count: number of rows on which their own starts are compared, without optimising them.
        """
        rows, starts = self.rows(count), []
        for kernel, model in enumerate(self.models[1:], start=1):
            modes = [transferred(optimum.model, model) for optimum in distinct_optima(ranked)[:2]]
            own = max(starting_points(model, self.data)[1:], key=lambda m: _objective(m, rows))
            starts += [Start(start, kernel) for start in (*modes, own)]
        return starts


def affordable(stop: Stop, cost: float, budget: Budget, checkpoint_log: CheckpointLog) -> Stop:
    """Return a stopping rule with the iterations for which a wall-clock limit has time.

    Args:
        cost: operations of one iteration.
    """
    if budget.seconds is None:
        return stop
    iterations = checkpoint_log.once(lambda: int(_SHARE * budget.remaining / cost))
    return replace(stop, iterations=min(stop.iterations, max(_LEAST, iterations)))


@torch.no_grad()
def _value(model: InducingModel, rows: Dataset) -> float:
    """Return the evidence of the rows without its gradient; −∞ where it cannot be computed."""
    try:
        if isinstance(model, SparseGP):
            # One Cholesky factor, a third of the work of the gradient.
            return model.evidence(rows, max_rows=rows.N).lower
        value = model.dense_bound(rows)().item()
    except (NotPositiveDefiniteError, TrainingError):
        return -inf
    return value if value == value else -inf


def _objective(model: InducingModel, rows: Dataset) -> float:
    """Return the evidence of the rows and the priors, without their gradients."""
    with torch.no_grad():
        return _value(model, rows) + log_prior(model).item()
