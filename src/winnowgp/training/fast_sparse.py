"""The fast schedule of models with one candidate set: `SparseGP` and `VariationalGP`."""

from dataclasses import replace

import torch

from winnowgp.data import Source
from winnowgp.errors import InputError
from winnowgp.linalg import threads_for
from winnowgp.models import SparseGP
from winnowgp.models.base import InducingModel, Model
from winnowgp.selection import Frontier, SizeFrontier
from winnowgp.selection.frontier import Selection
from winnowgp.training.budget import Budget, selection_work
from winnowgp.training.confirmation import confirmed_optima, significant_gain
from winnowgp.training.cross_validation import CrossValidation, PredictiveGap
from winnowgp.training.fast_steps import FastSteps
from winnowgp.training.fixed_alpha import best_for_alpha
from winnowgp.training.fixed_size import best_of_size, searched_model
from winnowgp.training.goals import (
    AllCandidates,
    FixedAlpha,
    Goal,
    MaxPoints,
    Tolerance,
    learn_inclusion,
)
from winnowgp.training.growth import (
    Pool,
    constant_model,
    grown_pool,
    smaller_models,
)
from winnowgp.training.hyperparameters import Initialization
from winnowgp.training.initialization import scaled, starting_points, with_unit_weights
from winnowgp.training.lbfgs import Stop
from winnowgp.training.optima import best_predicting
from winnowgp.training.other_optima import (
    MOVED,
    SETTLED,
    Choice,
    with_fewer_points,
    with_other_optimum,
)
from winnowgp.training.predictive_gap import (
    averaged_densities,
    exact_density,
    relocatable,
)
from winnowgp.training.schedules import (
    FitResult,
    Growth,
    SparseTraining,
    TrainingContext,
    warn_not_sharded,
)

# Shares of the work of a default fit: steps of the inclusion probabilities, cross-validation for
# the report, and cross-validation that decides.
_INCLUSION, _REPORTED, _CRITERION = 0.001, 0.005, 0.05
# Candidates that were not needed, of which inclusion probabilities are learnt.
_FRESH = 512
# Ratio of the sizes that cross-validation compares.
_SIZE_RATIO = 1.15


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
        warm_start=training.warm_start,
        max_starts=training.max_starts,
    )
    if training.criterion == "predictive" and not steps.can_hold_out:
        raise InputError(
            "`criterion='predictive'` needs all rows in the memory of one process; use 'elbo'."
        )
    chosen = _select(steps, training)
    chosen = with_other_optimum(steps, chosen) or chosen
    smaller = smaller_models(steps, chosen.model, training.kept_sizes)
    while (simpler := with_fewer_points(steps, chosen, smaller)) is not None:
        chosen = simpler
        smaller = smaller_models(steps, chosen.model, training.kept_sizes)
    data, fitted = steps.data, chosen.model
    steps.warn_unless_settled(fitted)
    pool, selection = _inclusion(steps, fitted, training, context.generator)
    assert selection.frontier is not None
    held_out = None
    if training.reported and not steps.is_late():
        held_out = steps.cross_validation(chosen.compared.K, share=_REPORTED)
        if chosen.candidates is None and held_out is not None:
            held_out = relocatable(fitted, held_out, work=steps.share_of_work(_REPORTED))
    with threads_for(10.0 * fitted.K**3):
        elbo, final_model = fitted.fixed_bound(data), fitted.with_best_q(data)
        sized = tuple(each.sized(data, held_out) for each in smaller)
    frontier = SizeFrontier.of(
        *chosen.frontiers,
        selection.frontier,
        *(each.frontier for each in smaller),
        N=data.observations,
    )
    for other in sized:
        frontier = frontier.with_model(
            other.posterior.M, elbo=other.elbo, log_density=other.log_density
        )
    frontier, gap = _compared(steps, chosen, frontier, elbo, held_out, averaged=training.averaged)
    initial = steps.initialization
    assert initial is not None
    for name in initial.held:
        final_model.kernel.get_parameter(name).requires_grad_(True)
    reference = chosen.reference
    # The evidence of many rows takes long, and is only reported.
    evidence = None if steps.is_late() else final_model.evidence(data)
    if chosen.exact:
        if evidence is not None:
            # With weights, the maximum of the evidence was that of unit weights.
            reference = max(reference, evidence.lower)
        frontier = replace(
            frontier,
            evidence=reference,
            exact_log_density=exact_density(initial.best, held_out),
        )
    return FitResult(
        model=final_model,
        posterior=final_model.posterior(data),
        selections=(selection,),
        candidates=(pool.candidates.detach(),),
        elbo=elbo,
        elbo_gap=max(reference - elbo, 0.0),
        evidence=evidence,
        growth=chosen.growth,
        kernel_evidence=initial.kernels,
        linear_gain=initial.linear_gain,
        linear_kernel=initial.linear_kernel,
        frontier=frontier,
        sized=sized,
        predictive_gap=gap,
        constant_weight=initial.constant_weight,
        constant_gain=initial.constant_gain,
    )


def _inclusion(
    steps: FastSteps[Model], fitted: Model, training: SparseTraining, generator: torch.Generator
) -> tuple[Model, Selection]:
    """Return the selected points with fresh candidates, and the inclusion probability of each."""
    pool = steps.with_fresh(fitted, max(32, min(fitted.K // 4, _FRESH)))
    statistics = pool.subset_statistics(steps.data)
    affordable = int(steps.share_of_work(_INCLUSION) / (2.0 * pool.K**2 * max(fitted.K, 1)))
    with threads_for(2.0 * pool.K**3):
        return pool, learn_inclusion(
            statistics,
            steps.frontier(statistics),
            torch.arange(pool.K, device=pool.candidates.device) < fitted.K,
            goal=training.goal,
            generator=generator,
            max_steps=max(1, min(training.inclusion_steps, affordable)),
        )


def _compared(
    steps: FastSteps[Model],
    chosen: Choice[Model],
    frontier: SizeFrontier,
    elbo: float,
    held_out: CrossValidation | None,
    *,
    averaged: bool,
) -> tuple[SizeFrontier, PredictiveGap | None]:
    """Return the frontier with the constant, the largest and the selected model, and their gap.

    Args:
        averaged: whether predictions are averages with a constant, which the gap includes.
    """
    frontier = frontier.with_model(0, elbo=chosen.constant)
    fitted, largest = chosen.model, chosen.compared
    if held_out is None:
        return frontier.with_model(fitted.K, elbo=elbo), None
    best, gap = held_out.densities(largest), None
    own = best if fitted is largest else chosen.held_out_densities(held_out)
    if chosen.largest is not None:
        averages, initial = own, steps.initialization
        if averaged and initial is not None:
            weight = initial.constant_weight
            averages = averaged_densities(own, initial.best, held_out, weight=weight)
        gap = held_out.gap(best, averages)
        bound = elbo if fitted is largest else largest.fixed_bound(steps.data)
        frontier = frontier.with_model(largest.K, elbo=bound, log_density=held_out.mean(best))
    return frontier.with_model(fitted.K, elbo=elbo, log_density=held_out.mean(own)), gap


def _warn_not_sharded(model: InducingModel, context: TrainingContext) -> None:
    if not isinstance(model, SparseGP):
        # Sites are kept for each row, and found by sweeps in which rows see those before them.
        warn_not_sharded(
            context.process_group, "the fast schedule shares rows for Gaussian noise only"
        )


def _select(steps: FastSteps[Model], training: SparseTraining) -> Choice[Model]:
    """Select points by the goal; as many as its limit allows where a tolerance needs more."""
    goal, most = training.goal, training.n_candidates
    if isinstance(goal, AllCandidates):
        return _keep_all(steps, training)
    if isinstance(goal, MaxPoints):
        return _select_count(steps, _least(goal.points, most), training)
    limit = None
    if isinstance(goal, Tolerance) and goal.limit is not None:
        limit = _least(goal.limit.most_points, most)
        goal = replace(goal, limit=None)
    choice = _select_by_goal(steps, goal, training)
    if limit is None or limit >= choice.model.K:
        return choice
    if steps.budget.seconds is None:
        # Fewer points have a budget of their own, as with `MaxPoints`.
        steps.budget.spent = 0.0
    limited = _select_count(steps, limit, training)
    return replace(
        limited,
        reference=max(choice.reference, limited.reference),
        exact=choice.exact,
        frontiers=choice.frontiers,
        largest=choice.largest,
        constant=choice.constant,
    )


def _keep_all(steps: FastSteps[Model], training: SparseTraining) -> Choice[Model]:
    """Learn the other parameters with all candidates of the model.

    Few points prefer a smoother function with more noise than the exact evidence, so several starts
    are compared.
    """
    initial, points = steps.initialise(training.evidence_rows), steps.model.candidates.detach()
    smooth = starting_points(initial.best, steps.sample, 2)[1]
    soft = scaled(initial.best, variance=2.0, lengthscale=1.5, noise=2.0)
    starts = [start.with_candidates(points) for start in (initial.best, soft, smooth)]
    if steps.warm_start:
        starts = [steps.model]
    (start,) = steps.successive_halving(starts, on=steps.data, iterations=30)
    stop = Stop(training.gain * steps.data.observations, 20, training.iterations)
    with threads_for(10.0 * len(points) ** 3):
        model, elbo = steps.optimise(start, stop=stop)
    reference = max(elbo, steps.dense_evidence(initial)) if initial.complete else elbo
    return Choice(model, reference, None, exact=initial.complete)


def _least(points: int, n_candidates: int | None) -> int:
    return points if n_candidates is None else min(points, n_candidates)


def _select_by_goal(steps: FastSteps[Model], goal: Goal, training: SparseTraining) -> Choice[Model]:
    """Select as few points as the goal allows: grow a pool, eliminate, move, and again."""
    initial, data = _best_predicting(steps, training.evidence_rows), steps.data
    confirmed: Initialization[Model] | None = initial
    if isinstance(goal, Tolerance):
        confirmed = confirmed_optima(
            steps, initial, reported=training.reported, averaged=training.averaged
        )
    initial = steps.initialization = confirmed or initial
    constant = constant_model(steps, initial.best)
    most = min(training.n_candidates or steps.most, steps.most)
    tolerance = goal.nats if isinstance(goal, Tolerance) else Tolerance().nats
    pool, reference = grown_pool(
        steps, initial, tolerance=tolerance, most=most, constant=constant[1]
    )
    significant = constant[1] + significant_gain(initial.best, data.N)
    if pool.predicts_best and isinstance(goal, Tolerance):
        # Other models have a higher ELBO and predict worse, and so would fewer points. The call
        # reports to the callbacks that all candidates are selected.
        steps.select(pool.model, torch.ones(pool.model.K, dtype=torch.bool), pool.elbo)
        return Choice(
            pool.model,
            reference,
            pool.growth,
            exact=initial.complete,
            largest=pool.model,
            constant=constant[1],
        )
    if reference < significant and steps.warm_start:
        # The earlier parameters explain these rows as noise; others may not.
        steps.forget_earlier()
        return _select_by_goal(steps, goal, training)
    if reference < significant:
        tried, elbo = steps.best_start(min(16, most))
        if elbo < significant:
            highest = max(reference, constant[1])
            short = highest - constant[1] > tolerance * data.observations
            return Choice(
                constant[0],
                highest,
                replace(pool.growth, limit="chance") if short else pool.growth,
                exact=initial.complete and reference >= constant[1],
                constant=constant[1],
            )
        pool, reference = Pool(tried, elbo, pool.growth), elbo
    choice = Choice(
        constant[0],
        reference,
        pool.growth,
        exact=initial.complete,
        largest=pool.model,
        constant=constant[1],
    )
    if isinstance(goal, Tolerance):
        goal = goal.within(reference - constant[1], N=data.observations)
        if confirmed is None:
            return replace(choice, growth=replace(pool.growth, limit="held_out"))
        if training.criterion == "predictive":
            return _select_by_density(steps, choice, pool.model, goal)
    # No work is left to move the points.
    exhausted = pool.growth.limit in ("work", "memory", "max_fit_seconds")
    candidates = pool.model
    if steps.earlier is not None:
        # Those of the pool first: it is large enough by itself.
        points = torch.cat([pool.model.candidates.detach(), steps.earlier])[:most]
        candidates = pool.model.with_candidates(points)
    if isinstance(goal, FixedAlpha) and not exhausted:
        stop = Stop(training.gain * data.observations, 20, training.iterations)
        model, elbo, visited = best_for_alpha(
            steps, candidates, goal, constant=constant, most=most, stop=stop
        )
        return replace(
            choice, model=model, reference=max(reference, elbo), frontiers=tuple(visited)
        )
    rounds, frontiers, reference = _selection_rounds(
        steps,
        candidates,
        goal,
        rounds=training.rounds if not exhausted else 0,
        most=most,
        reference=reference,
        at_rows=initial.complete and not pool.limited,
    )
    fits = [(*constant, None), *rounds]
    # The largest model counts as a reference that cannot be selected.
    known = [*((model.K, elbo) for model, elbo, _ in fits), (data.N + 1, reference)]
    best = goal.best(known, N=data.observations)
    if best == len(fits):
        best = max(range(len(fits)), key=lambda i: fits[i][1])
    fitted, _, candidates = fits[best]
    return replace(
        choice,
        model=fitted,
        reference=reference,
        frontiers=tuple(frontiers),
        candidates=candidates,
        goal=goal if isinstance(goal, Tolerance) else None,
    )


def _best_predicting(steps: FastSteps[Model], rows: int | None) -> Initialization[Model]:
    """Return the optima of the evidence, of nearly equal ones the best predictor first."""
    initial = steps.initialise(rows)
    if not initial.complete or steps.is_late() or not isinstance(steps.model, SparseGP):
        return initial
    data = with_unit_weights(initial.best, steps.sample)
    first = initial.optima[int(steps.shared(best_predicting(initial.optima, data)))]
    others = (optimum for optimum in initial.optima if optimum is not first)
    steps.initialization = replace(initial, optima=(first, *others))
    return steps.initialization


def _selection_rounds(
    steps: FastSteps[Model],
    candidates: Model,
    goal: Goal,
    *,
    rounds: int,
    most: int,
    reference: float,
    at_rows: bool,
) -> tuple[list[tuple[Model, float, Model | None]], list[Frontier], float]:
    """Eliminate inducing points, and optimise those that are left, in rounds.

    Args:
        candidates: model with the first candidates; later rounds add fresh ones to what is left.
        rounds: largest number of optimisations; with none, points are eliminated only.
        most: largest number of candidates.
        reference: highest ELBO or evidence known.
        at_rows: whether many inducing points stay at their rows, because the hyper-parameters are
            those of the exact GP. A pool that is too small would need others: its ELBO may be far
            below the evidence.

    Returns: the models with their ELBO, and the candidates unless they have moved since; the
    frontiers; and the highest ELBO.
    """
    data, size = steps.data, -1
    fits: list[tuple[Model, float, Model | None]] = []
    frontiers: list[Frontier] = []
    for index in range(max(rounds, 1)):
        frontier = steps.frontier(candidates.subset_statistics(data))
        frontiers.append(frontier)
        reference = max(reference, frontier.bounds.max().item())
        M = goal.size(frontier, reference=reference)
        current = steps.select(candidates, frontier.masks[M], frontier.bounds[M].item())
        steps.budget.spend(selection_work(candidates, data, candidates.K))
        fits.append((current, frontier.bounds[M].item(), candidates))
        settled = index > 0 and abs(M - size) <= (1 - SETTLED) * size
        last, size = settled or index == rounds - 1, M
        if not current.K or not rounds:
            break
        if at_rows and current.K * data.D > MOVED * data.N:
            break
        gain, iterations = (3e-4, 200) if last else (1e-3, 100)
        current, elbo = steps.optimise(current, stop=Stop(gain * data.observations, 20, iterations))
        fits.append((current, elbo, None))
        reference = max(reference, elbo)
        if last:
            break
        fresh = min(max(32, current.K // 4), most - current.K)
        candidates = steps.with_fresh(current, max(fresh, 0))
    return fits, frontiers, reference


def _select_by_density(
    steps: FastSteps[Model], choice: Choice[Model], pool: Model, goal: Tolerance
) -> Choice[Model]:
    """Select as few points as predict held-out rows within the tolerance of the pool."""
    held_out = steps.cross_validation(pool.K, share=_CRITERION)
    assert held_out is not None
    sizes, M = [pool.K], float(pool.K)
    while sizes[-1] > 1:
        M /= _SIZE_RATIO
        sizes.append(min(int(M), sizes[-1] - 1))
    size = held_out.smallest(pool, sizes[::-1], tolerance=goal.nats)
    frontier = steps.frontier(pool.subset_statistics(steps.data))
    # A subset within the tolerance of the evidence predicts well enough.
    size = min(size, goal.size(frontier, reference=choice.reference))
    model = steps.select(pool, frontier.masks[size], frontier.bounds[size].item())
    return replace(
        choice,
        model=model,
        reference=max(choice.reference, frontier.bounds.max().item()),
        frontiers=(frontier,),
        candidates=pool,
    )


def _select_count(steps: FastSteps[Model], M: int, training: SparseTraining) -> Choice[Model]:
    """Select M points: compare starts, optimise the best, exchange idle points."""
    stop = Stop(training.gain * steps.data.observations, 20, training.iterations)
    with threads_for(10.0 * M**3):
        return _best_of_count(steps, min(M, steps.most), training.rounds, stop)


def _best_of_count(steps: FastSteps[Model], M: int, rounds: int, stop: Stop) -> Choice[Model]:
    data = steps.data
    best, elbo = best_of_size(steps, M, rounds=rounds, stop=stop)
    bare = best.with_candidates(best.candidates[:0])
    larger = steps.with_fresh(bare, min(2 * M, steps.most))
    larger_elbo = steps.shared(larger.fixed_bound(data))
    gain = max(larger_elbo - elbo, 0.0) / data.observations
    limit = "max_points" if steps.most > M else None
    growth = Growth((M, larger.K), (elbo, larger_elbo), limit, gain)
    reference, initial = max(elbo, larger_elbo), steps.initialization
    assert initial is not None
    searched = searched_model(steps, M)
    if searched is not None:
        searched_elbo = steps.shared(searched.fixed_bound(data))
        if searched_elbo > reference:
            larger, reference = searched, searched_elbo
    if initial.complete:
        reference = max(reference, steps.dense_evidence(initial))
    return Choice(best, reference, growth, exact=initial.complete, largest=larger)
