"""Growth of the pool of candidates until more of them gain too little.

At fixed hyper-parameters the pool doubles, by greedy conditional variance, until a doubling gains
little and little prior variance is left to explain. Unless the hyper-parameters come from the exact
evidence of all rows, they are then refitted with the locations held, and the pool doubles again: a
frontier at fixed hyper-parameters cannot tell whether more points would pay with others.
`smaller_models` goes the other way: it refits the selected model with fewer points.
"""

from dataclasses import dataclass, replace
from math import inf, nan
from typing import Generic

from winnowgp.data import Source
from winnowgp.errors import TrainingError
from winnowgp.linalg import threads_for
from winnowgp.models import SparseGP
from winnowgp.models.base import InducingModel, Model
from winnowgp.models.kernels import copy_module
from winnowgp.selection import Frontier
from winnowgp.training.budget import selection_work
from winnowgp.training.callbacks import SMALLER_MODEL
from winnowgp.training.cross_validation import CrossValidation
from winnowgp.training.fast_steps import FastSteps
from winnowgp.training.goals import Tolerance
from winnowgp.training.hyperparameters import Initialization
from winnowgp.training.initialization import (
    scaled,
    without_variance,
)
from winnowgp.training.lbfgs import Stop
from winnowgp.training.schedules import Growth, SizedModel

# Candidates that the pool starts with.
FIRST = 64
# L-BFGS iterations of a refit with locations held, at most.
_REFIT = 30
# Iterations after which a refitted pool is compared with one that was not.
_COMPARED = 12
# Standard errors by which a pool of lower ELBO must predict held-out rows better.
_ERRORS = 2.0
# Multiples of the noise that are compared on held-out rows.
_NOISIER = (3.0, 10.0)
# Iterations that must be affordable for a refit to begin.
_LEAST_REFIT = 15
# Share of the work that comparing hyper-parameters on held-out rows may take.
_HELD_OUT = 0.02
# Nats per observation that unexplained variance may cost before hyper-parameters are refitted to a
# pool that is too small.
_MODERATE = 0.5
# Share of the tolerance that a doubling at fixed hyper-parameters must gain to go on, and the
# multiple of the tolerance that the unexplained variance may still cost when it does not.
_SHARE, _UNEXPLAINED = 0.5, 10.0
# Elements of K_uf up to which a GPU takes as long for the bound as for its launches, and iterations
# on all rows that replace a hundred on a part. kin8nm's three small models reached 0.001 to 0.010
# nats per observation more in five sixths of the time (seed 72).
_LAUNCHED, _INSTEAD = 2**24, 50
# Numbers of inducing points that a fit may keep models of, besides its own.
_SIZES = (2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Pool(Generic[Model]):
    """A model with a pool of candidates."""

    model: Model
    elbo: float
    """ELBO with all candidates, in nats."""
    growth: Growth
    unexplained: float | None = None
    """Nats per observation that unexplained prior variance costs, if known."""
    predicts_best: bool = False
    """Whether it predicts held-out rows better than a pool of higher ELBO."""

    @property
    def limited(self) -> bool:
        """Whether a limit ended growth."""
        return self.growth.limit is not None


def constant_model(steps: FastSteps[Model], model: Model) -> tuple[Model, float]:
    """Return the model without inducing points and with hardly any variance, and its ELBO."""
    bare = without_variance(model, steps.sample)
    learnt = [parameter.requires_grad for parameter in bare.kernel.parameters()]
    bare.kernel.requires_grad_(False)
    fitted, elbo = steps.optimise(bare, stop=Stop(1e-5 * steps.data.observations, 5, 50))
    for parameter, flag in zip(fitted.kernel.parameters(), learnt, strict=True):
        parameter.requires_grad_(flag)
    return fitted, elbo


def grown_pool(
    steps: FastSteps[Model],
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
            pool, highest = _best_of_limited(steps, pool)
            reference = max(reference, highest)
        return pool, max(reference, pool.elbo)
    starts = [initial.best, *steps.other_regimes(initial)]
    if isinstance(steps.model, SparseGP):
        pools = [
            grow(steps, start, tolerance=tolerance, most=most, reference=None) for start in starts
        ]
        if len(pools) > 1 and all(refit_limit(steps, p.model.K) is None for p in pools):
            pools = [refit(steps, pool, iterations=10) for pool in pools]
    else:
        pools = [
            refit(
                steps,
                grow(steps, start, tolerance=tolerance, most=min(FIRST, most), reference=None),
            )
            for start in starts
        ]
    pool = max(pools, key=lambda pool: steps.objective(pool.model, pool.elbo))
    if not isinstance(steps.model, SparseGP) and most > pool.model.K:
        pool = replace(pool, growth=replace(pool.growth, limit=None))
    if not pool.limited:
        pool = grow_refitted(steps, pool, tolerance=tolerance, most=most, constant=constant)
    highest = max(pool.elbo, *(other.elbo for other in pools))
    if pool.limited:
        pool, elbo = _best_of_limited(steps, pool)
        highest = max(highest, elbo)
    return pool, highest


def _best_of_limited(steps: FastSteps[Model], pool: Pool[Model]) -> tuple[Pool[Model], float]:
    """Return a pool that is too small, with hyper-parameters that predict best; the highest ELBO.

    Refitted with too few points, hyper-parameters explain more as noise: the ELBO rises, and
    predictions may get worse. So they are refitted only if much variance is left unexplained, and
    held-out rows decide, also whether more noise should stand for what is left unexplained. The
    refitted pool is as large as its refit can be afforded.
    """
    if len(pool.growth.sizes) == 1:
        # Greedy candidates are nested.
        half = pool.model.with_candidates(pool.model.candidates[: pool.model.K // 2])
        elbos = (_value(half, steps)[0], pool.elbo)
        gain = (elbos[1] - elbos[0]) / steps.data.observations
        growth = Growth((half.K, pool.model.K), elbos, pool.growth.limit, gain)
        pool = replace(pool, growth=growth)
    if pool.unexplained is not None and pool.unexplained < _MODERATE:
        return pool, pool.elbo
    smaller, K = pool, pool.model.K
    while K > FIRST and refit_limit(steps, K) is not None:
        K //= 2
    if pool.model.K > K:
        bare = pool.model.with_candidates(pool.model.candidates[:0])
        model = steps.with_fresh(bare, K)
        smaller = Pool(model, -inf, pool.growth, None)
    refitted = refit(steps, smaller, iterations=_COMPARED)
    held_out = None
    if not steps.is_late(0.5):
        held_out = steps.cross_validation(pool.model.K, share=_HELD_OUT)
    if held_out is not None:
        factors = _NOISIER if isinstance(steps.model, SparseGP) else ()
        pools = [pool, *(_noisier(steps, pool, factor) for factor in factors)]
        densities = [held_out.densities(other.model) for other in pools]
        best = max(range(len(pools)), key=lambda i: held_out.mean(densities[i]))
        gap = held_out.gap(densities[best], held_out.densities(refitted.model))
        if gap.nats > _ERRORS * gap.standard_error:
            highest = max(other.elbo for other in (*pools, refitted))
            return replace(pools[best], predicts_best=True), highest
    refitted = measure_last_doubling(steps, refit(steps, refitted))
    return refitted, refitted.elbo


def _noisier(steps: FastSteps[Model], pool: Pool[Model], factor: float) -> Pool[Model]:
    """Return the pool with more noise."""
    model = scaled(pool.model, noise=factor)
    elbo, unexplained = _value(model, steps)
    return replace(pool, model=model, elbo=elbo, unexplained=unexplained)


def grow(
    steps: FastSteps[Model],
    start: Model,
    *,
    tolerance: float,
    most: int,
    reference: float | None,
    first: int = FIRST,
) -> Pool[Model]:
    """Return a pool that is large enough at these hyper-parameters, or as large as allowed.

    Args:
        start: model without candidates, or with candidates that stay in the pool.
        tolerance: nats per observation.
        most: largest number of candidates.
        reference: the exact evidence of all rows at these hyper-parameters, if known.
        first: number of candidates to begin with.
    """
    data, N = steps.data, steps.data.observations
    K, limit = min(max(first, start.K), most), None
    sizes: list[int] = []
    elbos: list[float] = []
    model = start
    while True:
        model = steps.with_fresh(model, K - model.K)
        steps.budget.spend(selection_work(model, data, model.K) / 4)
        elbo, unexplained = _value(model, steps)
        sizes.append(model.K)
        elbos.append(elbo)
        gain = (elbo - elbos[-2]) / N if len(elbos) > 1 else inf
        near = reference is not None and reference - elbo < _SHARE * tolerance * N
        if model.K < K:
            # No rows are left that would add anything, to working precision.
            limit = None if near or reference is None else "precision"
            break
        if near:
            break
        if reference is None and unexplained is not None and unexplained < tolerance:
            break
        little = unexplained is None or unexplained < _UNEXPLAINED * tolerance
        if reference is None and gain < _SHARE * tolerance and little:
            break
        if most <= K:
            limit = "n_candidates" if most < steps.most or steps.given else None
            break
        bigger = min(2 * K, most)
        limit = steps.limit_of(steps.pool_work(bigger), candidates=bigger)
        if limit is not None:
            break
        K = bigger
    last = (elbos[-1] - elbos[-2]) / N if len(elbos) > 1 else 0.0
    return Pool(model, elbos[-1], Growth(tuple(sizes), tuple(elbos), limit, last), unexplained)


def refit(steps: FastSteps[Model], pool: Pool[Model], iterations: int = _REFIT) -> Pool[Model]:
    """Return the pool with hyper-parameters that maximise its ELBO, locations held."""
    model = copy_module(pool.model)
    learnt = model.candidates.requires_grad
    model.candidates.requires_grad_(False)
    stop = Stop(1e-3 * steps.data.observations, 10, iterations)
    fitted, elbo = steps.optimise(model, stop=stop)
    fitted.candidates.requires_grad_(learnt)
    sizes, elbos = pool.growth.sizes, pool.growth.elbos
    growth = Growth((*sizes, fitted.K), (*elbos, elbo), pool.growth.limit, pool.growth.last_gain)
    return Pool(fitted, elbo, growth, pool.unexplained)


def grow_refitted(
    steps: FastSteps[Model],
    pool: Pool[Model],
    *,
    tolerance: float,
    most: int,
    constant: float,
) -> Pool[Model]:
    """Return a pool that doubles with refitted hyper-parameters until that gains too little.

    For Gaussian noise the pool also doubles at fixed hyper-parameters in between: the evidence of
    many rows has determined them, and few points would make the ELBO prefer more noise. Other
    likelihoods start from fewer rows, and are refitted each time.

    Args:
        pool: the pool to begin with.
        constant: ELBO of the constant model; a pool that gains little over it has a tolerance in
            proportion.
    """
    N = steps.data.observations
    pool = _refitted_if_affordable(steps, pool)
    while not pool.limited and most > pool.model.K:
        larger = min(2 * pool.model.K, most)
        limit = steps.limit_of(steps.pool_work(larger), candidates=larger)
        if limit is not None:
            return _with_limit(pool, limit)
        bare = pool.model.with_candidates(pool.model.candidates[:0])
        largest = most if isinstance(bare, SparseGP) else larger
        bigger = grow(steps, bare, tolerance=tolerance, most=largest, reference=None, first=larger)
        if largest < most:
            bigger = _with_limit(bigger, None)
        bigger = _refitted_if_affordable(steps, bigger)
        best = max(pool, bigger, key=lambda pool: steps.objective(pool.model, pool.elbo))
        gain = (bigger.elbo - pool.elbo) / N
        enough = gain < Tolerance(tolerance).within(bigger.elbo - constant, N=N).nats
        limit = None if enough else bigger.growth.limit
        if not enough and most <= bigger.model.K and (most < steps.most or steps.given):
            # It seemed large enough before the hyper-parameters were refitted.
            limit = limit or "n_candidates"
        growth = Growth(
            (*pool.growth.sizes, *bigger.growth.sizes),
            (*pool.growth.elbos, *bigger.growth.elbos),
            limit,
            gain,
        )
        pool = Pool(best.model, best.elbo, growth, best.unexplained)
        if enough:
            break
    return pool


def _refitted_if_affordable(steps: FastSteps[Model], pool: Pool[Model]) -> Pool[Model]:
    limit = None if pool.limited else refit_limit(steps, pool.model.K)
    return refit(steps, pool) if limit is None else _with_limit(pool, limit)


def refit_limit(steps: FastSteps[Model], K: int) -> str | None:
    """Return the name of the limit that prevents a refit with K candidates, or None."""
    return steps.limit_of(_LEAST_REFIT * steps.model.chunked_cost_of(steps.data, K))


def measure_last_doubling(steps: FastSteps[Model], pool: Pool[Model]) -> Pool[Model]:
    """Return a limited pool with what its last doubling gained, hyper-parameters refitted."""
    K = pool.model.K
    if refit_limit(steps, K // 2) is not None:
        return pool
    half = steps.with_fresh(pool.model.with_candidates(pool.model.candidates[:0]), K // 2)
    stop = Stop(1e-3 * steps.data.observations, 10, 15)
    half.candidates.requires_grad_(False)
    _, elbo = steps.optimise(half, stop=stop)
    gain = (pool.elbo - elbo) / steps.data.observations
    growth = pool.growth
    return Pool(
        pool.model, pool.elbo, Growth(growth.sizes, growth.elbos, growth.limit, max(gain, 0.0))
    )


def _with_limit(pool: Pool[Model], limit: str | None) -> Pool[Model]:
    return replace(pool, growth=replace(pool.growth, limit=limit))


def _value(model: InducingModel, steps: FastSteps[Model]) -> tuple[float, float | None]:
    """Return the ELBO in nats, and the nats per observation that unexplained variance costs.

    The latter is Σ_i w_i (k_ii − q_ii)/2, the trace term of the collapsed bound; None for other
    bounds.
    """
    if isinstance(model, SparseGP):
        elbo, trace = model.bound_and_trace(steps.data)
        return steps.shared(elbo), steps.shared(trace / steps.data.observations)
    return steps.shared(model.fixed_bound(steps.data)), None


@dataclass(frozen=True, slots=True)
class SmallerModel(Generic[Model]):
    """A model with fewer inducing points, refitted at its size."""

    model: Model
    elbo: float
    frontier: Frontier
    """The frontier of its points at its hyper-parameters."""

    def sized(self, data: Source, held_out: CrossValidation | None) -> SizedModel:
        """Return its posterior, ELBO and held-out log density."""
        model = self.model.with_best_q(data)
        density = nan if held_out is None else held_out.mean(held_out.densities(model))
        return SizedModel(model.posterior(data), self.elbo, density)


def smaller_models(
    steps: FastSteps[Model], fitted: Model, count: int
) -> tuple[SmallerModel[Model], ...]:
    """Return models with fewer inducing points than a fitted one, up to `count` of them."""
    smaller: list[SmallerModel[Model]] = []
    sizes = [size for size in _SIZES if size < fitted.K]
    for M in sizes[max(len(sizes) - count, 0) :]:
        if steps.is_late():
            break
        with threads_for(10.0 * M**3):
            try:
                model, elbo = _shrunk(steps, fitted, M)
            except TrainingError:
                continue
            if model.K not in [other.model.K for other in smaller] and model.K < fitted.K:
                frontier = steps.frontier(model.subset_statistics(steps.data))
                smaller.append(SmallerModel(model, elbo, frontier))
    return tuple(smaller)


def _shrunk(steps: FastSteps[Model], fitted: Model, M: int) -> tuple[Model, float]:
    """Return a model with M points, started from the hyper-parameters of a larger one.

    M points cannot represent the exact posterior: their optimum is closer to a smoother function
    with more noise.
    """
    soft = scaled(fitted, variance=2.0, lengthscale=1.5, noise=2.0)
    start = steps.eliminated(soft.with_candidates(fitted.candidates[:0]), M)
    part, iterations = steps.part(max(2000, 16 * M)), min(60 + 3 * M, 150)
    if start.candidates.is_cuda and steps.data.N * M <= _LAUNCHED:
        # A part of the rows would take as long.
        iterations += _INSTEAD
    elif part.N < steps.data.N:
        start, _ = steps.shortly(start, part, 100, phase=SMALLER_MODEL)
    stop = Stop(2e-4 * steps.data.observations, 20, iterations)
    return steps.optimise(start, stop=stop, precision=steps.precision(M), phase=SMALLER_MODEL)
