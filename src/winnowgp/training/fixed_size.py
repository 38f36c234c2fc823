"""The search with a fixed number of points M: the highest ELBO that M points reach.

A smooth function with points at cluster centres is known without a search. It is optimised on all
rows at once, and mostly ends within thousandths of nats per observation of the best optimum known.
Only then is the exact evidence of some rows maximised, for starts of another kind: the bound of few
points has several optima, and where the data have another regime, such as a function that varies
rapidly along one column, the first start may miss it. At last idle points are exchanged.
"""

from winnowgp.models import SparseGP
from winnowgp.models.base import Model
from winnowgp.training.fast_steps import FastSteps
from winnowgp.training.initialization import starting_points
from winnowgp.training.lbfgs import Stop

# Where rows are many, a second start has lost if it is so many nats per observation below the first
# optimum after so many iterations.
_BEHIND, _TRIED = 3e-3, 200
# Nats per observation by which exchanged points must raise the bound, before and after they move.
_EXCHANGED, _MOVED = 1e-5, 1e-4
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
    optima: list[tuple[Model, float]] = []
    simple = _simple_start(steps, M)
    if simple is not None:
        optima.append(steps.optimise(simple, stop=stop, precision=precision))
    if precision is None:
        # Local optima differ by thousandths of nats per observation: two are optimised to the end.
        count = 2 - len(optima)
        starts = steps.successive_halving(steps.starts(M), on=data, iterations=40, count=count)
    else:
        part = steps.part(max(2000, 4 * M, data.N // 8))
        starts = steps.successive_halving(steps.starts(M), on=part, iterations=20)
        if optima:
            tried = Stop(stop.gain, stop.window, _TRIED)
            optima += [steps.optimise(start, stop=tried, precision=precision) for start in starts]
            starts = [optima.pop()[0]] if _is_promising(steps, optima) else []
    # Blocks of rows in float32 take half the time; a few steps in double precision follow.
    optima += [steps.optimise(start, stop=stop, precision=precision) for start in starts]
    best, elbo = max(optima, key=lambda optimum: steps.objective(*optimum))
    if precision is not None:
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
    first; and where the user or an earlier fit gave candidates.
    """
    compared = steps.kernels or steps.linear_term
    if steps.given or steps.warm_start or compared or not isinstance(steps.model, SparseGP):
        return None
    return steps.centres(starting_points(steps.model, steps.sample, 2)[1], M)


def _is_promising(steps: FastSteps[Model], optima: list[tuple[Model, float]]) -> bool:
    """Return whether the last start, optimised for a while, may still exceed the first optimum."""
    first, last = (steps.objective(*optimum) for optimum in (optima[0], optima[-1]))
    return last > first - _BEHIND * steps.data.observations
