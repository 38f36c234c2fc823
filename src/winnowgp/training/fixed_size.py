"""The search with a fixed number of points M: the highest ELBO that M points reach.

A smooth function with points at cluster centres is known without a search, and is optimised on all
rows at once. Then the exact evidence of some rows is maximised, for starts of another kind: the
bound of few points has several optima, and where the data have another regime, such as a function
that varies rapidly along one column, the first start misses it. The best of these is optimised too,
unless it falls behind, and idle points are exchanged. Where the work of a fit does not suffice for
one whole optimisation, all starts are compared on some rows, and the best has nearly all of it.

The kernel is that of the highest evidence of some rows, unless another optimum of the evidence
suits so few points better: a smoother function, or another kernel. The one whose bound is highest
after elimination is one of the starts. On five splits of three tables, with 32 to 128 points, it
raised the ELBO by 0.008 to 0.015 nats per observation in four, and changed nothing in one.

Where rows are few times as many as points, the exact evidence of all rows comes first: its maximum
takes less time than one optimisation, and points selected there are next to the optimum.
"""

from dataclasses import dataclass
from typing import Generic

from winnowgp.models import SparseGP
from winnowgp.models.base import Model
from winnowgp.training.fast_steps import FastSteps
from winnowgp.training.hyperparameters import STAGES
from winnowgp.training.initialization import starting_points
from winnowgp.training.lbfgs import Curvature, Stop

# Rows per point up to which the search has all rows, and those up to which it comes first. With r
# of them its 60 evaluations take 120 (r M)³ operations, and a thousand of the bound 8,000 r M³.
_ROWS_PER_POINT, _FEWER_ROWS_PER_POINT = 8, 5
# Where rows are many, the other start has lost if after so many iterations it is so many nats per
# observation below the optimum of the first; and the same for a simple start after the evidence.
_TRIED, _BEHIND = 200, 6e-3
_TRIED_SIMPLE, _BEHIND_EVIDENCE = 50, 2e-3
# Nats per observation by which exchanged points must raise the bound, before and after they move.
_EXCHANGED, _MOVED = 1e-5, 1e-4
# Share of the work that is left which the only start may take.
_ALONE = 0.95
# Points at the hyper-parameters of the search, with which fewer points are compared.
_COMPARED = 256
# Rows by which starts at other optima of the evidence are compared.
_COMPARED_ROWS = 2000
# Share of the iterations that an optimisation of exchanged points may take.
_SHORTER = 0.2
# The best optimum is continued in double precision, with its curvature, until iterations gain a
# fifth as much: with 64 points up to 0.0007 nats per observation more.
_FINER, _FINER_ITERATIONS = 0.2, 0.3


@dataclass(frozen=True, slots=True, eq=False)
class _Optimum(Generic[Model]):
    """Where an optimisation with M points has ended."""

    model: Model
    elbo: float
    """ELBO in nats."""
    curvature: Curvature | None
    """Curvature there, with which an optimisation continues; None if it is not known."""


def best_of_size(
    steps: FastSteps[Model], M: int, *, rounds: int, stop: Stop
) -> tuple[Model, float]:
    """Return the best model with M points, and its ELBO in nats.

    Args:
        rounds: number of optimisations of all points; all but the first follow an exchange.
        stop: stopping rule of the optimisations.
    """
    data, precision = steps.data, steps.precision(M)
    simple = _simple_start(steps, M)
    dense = simple is not None and _search_rows(steps, M) == data.N <= _FEWER_ROWS_PER_POINT * M
    if simple is None:
        optima = _searched(steps, M, stop)
    elif steps.affordable_evaluations(simple, data) < stop.iterations:
        optima = [_of_best(steps, simple, stop)]
    elif dense:
        optima = _of_evidence(steps, simple, stop)
    else:
        optima = _of_two_kinds(steps, simple, stop)
    optimum = max(optima, key=lambda optimum: steps.objective(optimum.model, optimum.elbo))
    # Blocks of rows in float32 took half the time; some steps in double precision follow.
    finer = Stop(_FINER * stop.gain, stop.window, int(_FINER_ITERATIONS * stop.iterations))
    continued = not dense and (precision is not None or isinstance(steps.model, SparseGP))
    if continued and finer.iterations:
        optimum = _optimised(steps, optimum.model, finer, None, curvature=optimum.curvature)
    best, elbo = optimum.model, optimum.elbo
    shorter = Stop(stop.gain, stop.window, int(_SHORTER * stop.iterations))
    for _ in range(1, rounds):
        pool = steps.with_fresh(best, max(50, M // 2))
        frontier = steps.frontier(pool.subset_statistics(data))
        size = frontier.at_most(M)
        if frontier.bounds[size].item() < elbo + _EXCHANGED * data.observations:
            break
        exchanged = steps.select(pool, frontier.masks[size], frontier.bounds[size].item())
        better, new_elbo = steps.optimise(exchanged, stop=shorter)
        if new_elbo < elbo + _MOVED * data.observations:
            break
        best, elbo = better, new_elbo
    return best, elbo


def _optimised(
    steps: FastSteps[Model],
    start: Model,
    stop: Stop,
    precision: str | None,
    *,
    curvature: Curvature | None = None,
) -> _Optimum[Model]:
    """Return the optimum next to a start.

    Args:
        curvature: that of the optimisation which ended at the start, if it is known.
    """
    curvature = Curvature() if curvature is None else curvature
    model, elbo = steps.optimise(start, stop=stop, precision=precision, curvature=curvature)
    return _Optimum(model, elbo, None if model is start else curvature)


def _simple_start(steps: FastSteps[Model], M: int) -> Model | None:
    """Return a smooth start with points at M cluster centres, which needs no search.

    None for other likelihoods, whose evaluations take longer; where kernels are to be compared
    first, or the search was made for a tolerance; and where the user or an earlier fit gave
    candidates.
    """
    compared = steps.kernels or steps.linear_term or steps.initialization is not None
    if steps.given or steps.warm_start or compared or not isinstance(steps.model, SparseGP):
        return None
    return steps.centres(starting_points(steps.model, steps.sample, 2)[1], M)


def _search_rows(steps: FastSteps[Model], M: int) -> int:
    """Return the number of rows of the search: all if they are few times as many as points."""
    N = steps.data.N
    few = isinstance(steps.model, SparseGP) and N <= _ROWS_PER_POINT * M
    return N if few and steps.sample.N == N <= steps.affordable_rows() else STAGES[0]


def _searched(steps: FastSteps[Model], M: int, stop: Stop) -> list[_Optimum[Model]]:
    """Return the optima of the best starts of a search; of two where that is quick.

    Local optima differ by thousandths of nats per observation.
    """
    precision = steps.precision(M)
    starts = _compared(steps, M)[: 2 if precision is None else 1]
    return [_optimised(steps, start, stop, precision) for start in starts]


def _compared(steps: FastSteps[Model], M: int, *others: Model) -> list[Model]:
    """Return the starts that were the best after some iterations, the best first.

    Args:
        others: starts besides those of a search.
    """
    if steps.initialization is None:
        steps.initialise(_search_rows(steps, M))
    starts = [*others, *steps.starts(M), *_at_other_optimum(steps, M)]
    if steps.precision(M) is None:
        return steps.successive_halving(starts, on=steps.data, iterations=40, count=2)
    part = steps.part(max(2000, 4 * M, steps.data.N // 8))
    return steps.successive_halving(starts, on=part, iterations=20)


def _at_other_optimum(steps: FastSteps[Model], M: int) -> list[Model]:
    """Return a start at the other optimum of the evidence with the highest bound of M points.

    The list is empty if there is no other optimum.

    Few points cannot represent a rough function with hardly any noise, whose evidence may be the
    highest, and may represent a smoother one, or another kernel, whose evidence is hardly lower.
    """
    initial, part = steps.initialization, steps.part(_COMPARED_ROWS)
    if initial is None or steps.earlier is not None or not isinstance(steps.model, SparseGP):
        return []
    starts = [steps.eliminated(optimum.model, M) for optimum in initial.optima[1:]]
    return sorted(starts, key=lambda model: -steps.shared(model.fixed_bound(part)))[:1]


def _of_best(steps: FastSteps[Model], simple: Model, stop: Stop) -> _Optimum[Model]:
    """Return the optimum of the best of all starts, where work is left for one of them only."""
    start, *_ = _compared(steps, simple.K, simple)
    precision = steps.precision(simple.K)
    return _Optimum(*steps.optimise(start, stop=stop, precision=precision, share=_ALONE), None)


def _of_evidence(steps: FastSteps[Model], simple: Model, stop: Stop) -> list[_Optimum[Model]]:
    """Return the optimum next to that of the exact evidence, and of a simple start if it is close.

    On concrete, with 927 rows and 256 points, it took half the time of a simple start and ended
    0.01 nats per observation higher.
    """
    start = steps.eliminated(steps.initialise(steps.data.N).best, simple.K)
    # Blocks of few rows in float32 save no time.
    first = _optimised(steps, start, stop, None)
    tried = Stop(stop.gain, stop.window, _TRIED_SIMPLE)
    return [first, *_unless_behind(steps, simple, stop, first, tried, _BEHIND_EVIDENCE, None)]


def _of_two_kinds(steps: FastSteps[Model], simple: Model, stop: Stop) -> list[_Optimum[Model]]:
    """Return the optima of a simple start, and of the best one of a search."""
    precision = steps.precision(simple.K)
    # Without a pause: L-BFGS would have to learn the curvature again.
    first = _optimised(steps, simple, stop, precision)
    other = _compared(steps, simple.K)[0]
    if precision is None:
        return [first, _optimised(steps, other, stop, precision)]
    tried = Stop(stop.gain, stop.window, _TRIED)
    return [first, *_unless_behind(steps, other, stop, first, tried, _BEHIND, precision)]


def _unless_behind(
    steps: FastSteps[Model],
    start: Model,
    stop: Stop,
    first: _Optimum[Model],
    tried: Stop,
    margin: float,
    precision: str | None,
) -> list[_Optimum[Model]]:
    """Return the optimum of a start, unless it is far below the first after some iterations.

    Args:
        tried: stopping rule of these iterations.
        margin: nats per observation by which it may be below then.
    """
    own = _optimised(steps, start, tried, precision)
    least = steps.objective(first.model, first.elbo) - margin * steps.data.observations
    if steps.objective(own.model, own.elbo) < least:
        return []
    return [_optimised(steps, own.model, stop, precision, curvature=own.curvature)]


def searched_model(steps: FastSteps[Model], M: int) -> Model | None:
    """Return a model of more than M points at the hyper-parameters of the search.

    Few points may prefer a constant to a function that they cannot represent, and more would gain
    nothing at the hyper-parameters of the constant. None for other likelihoods than Gaussian noise,
    where it takes long, and where the exact evidence of all rows is known.
    """
    initial = steps.initialization
    if initial is None or initial.complete or not isinstance(steps.model, SparseGP):
        return None
    bare = initial.best.with_candidates(initial.best.candidates[:0])
    return steps.with_fresh(bare, min(max(2 * M, _COMPARED), steps.most))
