"""The search with a fixed number of points M: the highest ELBO that M points reach.

A smooth function with points at cluster centres is known without a search, and is optimised on all
rows at once. Then the exact evidence of some rows is maximised, for starts of another kind: the
bound of few points has several optima, and where the data have another regime, such as a function
that varies rapidly along one column, the first start misses it. The best of these is optimised too,
unless it falls behind, and idle points are exchanged. Where the work of a fit does not suffice for
one whole optimisation, all starts are compared on some rows, and the best has nearly all of it.

The kernel is that of the highest evidence of some rows. With 16 and 64 points on five tables of 292
to 927 rows, the kernel that reaches the highest ELBO with so many points had a higher one by 0.007
nats per observation in the mean (0.02 at most), a test log density that was higher by 0.001 in the
mean (−0.05 to 0.06), and would take three fits.
"""

from winnowgp.models import SparseGP
from winnowgp.models.base import Model
from winnowgp.training.fast_steps import FastSteps
from winnowgp.training.initialization import starting_points
from winnowgp.training.lbfgs import Stop

# Where rows are many, the other start has lost if after so many iterations it is so many nats per
# observation below the optimum of the first.
_TRIED, _BEHIND = 200, 6e-3
# Nats per observation by which exchanged points must raise the bound, before and after they move.
_EXCHANGED, _MOVED = 1e-5, 1e-4
# Share of the work that is left which the only start may take.
_ALONE = 0.95
# Points at the hyper-parameters of the search, with which fewer points are compared.
_COMPARED = 256
# Share of the iterations that an optimisation of exchanged points may take.
_SHORTER = 0.2


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
    if simple is None:
        optima = _searched(steps, M, stop)
    elif steps.affordable_evaluations(simple, data) < stop.iterations:
        optima = [_of_best(steps, simple, stop)]
    else:
        optima = _of_two_kinds(steps, simple, stop)
    best, elbo = max(optima, key=lambda optimum: steps.objective(*optimum))
    if precision is not None:
        # Blocks of rows in float32 took half the time; a few steps in double precision follow.
        best, elbo = steps.optimise(best, stop=stop)
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


def _searched(steps: FastSteps[Model], M: int, stop: Stop) -> list[tuple[Model, float]]:
    """Return the optima of the best starts of a search; of two where that is quick.

    Local optima differ by thousandths of nats per observation.
    """
    precision = steps.precision(M)
    starts = _compared(steps, M)[: 2 if precision is None else 1]
    return [steps.optimise(start, stop=stop, precision=precision) for start in starts]


def _compared(steps: FastSteps[Model], M: int, *others: Model) -> list[Model]:
    """Return the starts that were the best after some iterations, the best first.

    Args:
        others: starts besides those of a search.
    """
    starts = [*others, *steps.starts(M)]
    if steps.precision(M) is None:
        return steps.successive_halving(starts, on=steps.data, iterations=40, count=2)
    part = steps.part(max(2000, 4 * M, steps.data.N // 8))
    return steps.successive_halving(starts, on=part, iterations=20)


def _of_best(steps: FastSteps[Model], simple: Model, stop: Stop) -> tuple[Model, float]:
    """Return the optimum of the best of all starts, where work is left for one of them only."""
    start, *_ = _compared(steps, simple.K, simple)
    return steps.optimise(start, stop=stop, precision=steps.precision(simple.K), share=_ALONE)


def _of_two_kinds(steps: FastSteps[Model], simple: Model, stop: Stop) -> list[tuple[Model, float]]:
    """Return the optima of a simple start, and of the best one of a search."""
    precision = steps.precision(simple.K)
    # Without a pause: L-BFGS would have to learn the curvature again.
    first = steps.optimise(simple, stop=stop, precision=precision)
    other = _compared(steps, simple.K)[0]
    if precision is not None:
        tried = Stop(stop.gain, stop.window, _TRIED)
        other, elbo = steps.optimise(other, stop=tried, precision=precision)
        least = steps.objective(*first) - _BEHIND * steps.data.observations
        if steps.objective(other, elbo) < least:
            return [first]
    return [first, steps.optimise(other, stop=stop, precision=precision)]


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
