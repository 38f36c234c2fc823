"""The fast schedule of noise that depends on the inputs: two processes, fitted in turn."""

from dataclasses import dataclass, replace
from math import nan
from typing import Any, final

import torch

from winnowgp.data import Dataset
from winnowgp.linalg import threads_for
from winnowgp.models import Posterior, SparseGP, VariationalGP
from winnowgp.models.base import Model
from winnowgp.models.heteroscedastic import (
    HeteroscedasticGP,
    HeteroscedasticPosterior,
    leave_one_out_residuals,
)
from winnowgp.models.kernels import copy_module
from winnowgp.selection import SizeFrontier
from winnowgp.selection.frontier import Selection
from winnowgp.training.budget import Budget
from winnowgp.training.fast_sparse import SparseTraining, fit_sparse
from winnowgp.training.fast_steps import FastSteps
from winnowgp.training.goals import (
    AllCandidates,
    Goal,
    MaxCost,
    MaxPoints,
    Tolerance,
    learn_inclusion,
)
from winnowgp.training.growth import constant_model
from winnowgp.training.lbfgs import Stop
from winnowgp.training.schedules import (
    FitResult,
    SizedModel,
    TrainingContext,
    draw_seed,
    warn_not_sharded,
)

# Rows of the exact bound of g at most: its optimum is where fits of few points to all rows start.
# On a GPU many more would be affordable, and take longer than the whole fit of f.
_EVIDENCE_ROWS = 500
# Rows up to which g is fitted on the CPU: its many small steps take longer on a GPU.
_CPU_ROWS = 10_000
# Rows of the first fit of g at most: a few inducing points, which all rows improve and select again
# later, do not need more. With all of protein's 41,157 rows it took longer than all other steps.
_FIRST_ROWS = 5000
# Rounds in which both processes are optimised in turn, at most, and the nats per observation that
# the last of them may gain.
_ROUNDS, _GAIN = 6, 2e-3
# L-BFGS iterations of one process in a round.
_ITERATIONS = 30
# Points are moved if they have fewer coordinates than this many per row, as in `fast_sparse`.
_MOVED = 0.5
# Nats per observation that the last update of q(f) and q(g) gains.
_SETTLED = 1e-6
# Shares of the seconds that are left: constant noise, the first fit of g, and f and g in turn. The
# last fit of f may take the rest.
_CONSTANT, _FIRST, _IN_TURN = 0.4, 0.3, 0.5


def fit_heteroscedastic(
    model: HeteroscedasticGP, data: Dataset, *, training: SparseTraining, context: TrainingContext
) -> FitResult[HeteroscedasticGP]:
    """Fit f and g in turn; each fit raises the bound of the model with the other process fixed.

    1. f with constant noise, as a `SparseGP`.
    2. g on the leave-one-out residuals of up to 5,000 random rows, as a `VariationalGP` with points
       of its own. If it gains no more than by chance, its set is empty and the noise constant: the
       fit ends here. Residuals of rows that f was fitted to would not tell: with many points, f
       explains the noise of each.
    3. L-BFGS on f and on g in turn, until a round gains little.
    4. The points of g are selected again, then those of f, with the noise of each row known.
    5. The optimal q(f) and q(g) at the final parameters. Their bound must exceed that of constant
       noise.

    Gaps and frontier of the result are those of f given q(g). A limit on the number of points holds
    for each process; g keeps fewer if they are within the tolerance. A wall-clock limit is divided
    among the steps; the alternation ends once its share is used up. With a GPU, the first fit of g,
    and with up to 10,000 rows all steps of g, are computed on the CPU.
    """
    warn_not_sharded(
        context.process_group, "the fast schedule shares rows for constant Gaussian noise only"
    )
    rows = data.require_dataset("`HeteroscedasticGP`")
    clock = Budget(model.candidates.device, seconds=training.max_seconds)
    limited = replace(training, max_seconds=_share(clock, _CONSTANT))
    plain = fit_sparse(model.function, rows, training=limited, context=context)
    targets = leave_one_out_residuals(plain.model, rows)
    settings = replace(
        training,
        goal=noise_goal(training.goal),
        kernels=(),
        linear_term=False,
        kept_sizes=0,
        max_seconds=_share(clock, _FIRST),
        reported=False,
        evidence_rows=_EVIDENCE_ROWS,
    )
    if targets.N > _FIRST_ROWS:
        order = torch.randperm(
            targets.N, generator=context.generator, device=context.generator.device
        )
        targets = targets.part(order[:_FIRST_ROWS])
    own = noise_context(context, targets.N)
    noise = _fit_noise(model.log_noise, targets, training=settings, context=own)
    start = model.with_parts(function=plain.model, log_noise=noise.model).normalised(rows)
    if not start.log_noise.K:
        return _constant(plain, start, noise, rows)
    in_turn = Budget(model.candidates.device, seconds=_share(clock, _IN_TURN))
    steps = _Steps(rows, training, context, in_turn)
    current = steps.alternate(start)
    current, pool, selection = steps.select_noise(current, settings.goal)
    earlier = not isinstance(training.goal, AllCandidates)
    # Held-out densities of weighted rows would not be those of the model.
    limit = _share(clock, 1.0)
    warm = replace(training, warm_start=earlier, max_seconds=limit, reported=False)
    last = fit_sparse(current.function, current.weighted(rows), training=warm, context=context)
    current = steps.optimise_noise(current.with_parts(function=last.model))
    current = current.with_best_q(rows, gain=_SETTLED).normalised(rows)
    elbo = current.fixed_bound(rows)
    if elbo < plain.elbo:
        return _constant(plain, steps.without_noise_points(start), noise, rows)
    posterior = current.posterior(rows)
    result: FitResult[Any] = last
    return replace(
        result,
        model=current,
        posterior=posterior,
        selections=(last.selection, selection),
        candidates=(last.candidates[0], pool),
        elbo=elbo,
        kernel_evidence=plain.kernel_evidence,
        linear_gain=plain.linear_gain,
        linear_kernel=plain.linear_kernel,
        frontier=_shifted(last.frontier, elbo - last.elbo, rows),
        sized=_sized(last.sized, posterior.log_noise, elbo - last.elbo),
        evidence=None,
        predictive_gap=None,
        noise_gain=elbo - plain.elbo,
    )


def noise_goal(goal: Goal) -> Goal:
    """Return the goal of g: that of f, where a number of points is a limit and not the aim."""
    match goal:
        case MaxPoints() | MaxCost():
            return Tolerance(limit=goal)
        case AllCandidates():
            return Tolerance()
        case _:
            return goal


@final
@dataclass(frozen=True, slots=True)
class _Steps:
    """The steps of the schedule on fixed rows, within one budget."""

    rows: Dataset
    training: SparseTraining
    context: TrainingContext
    budget: Budget

    def alternate(self, model: HeteroscedasticGP) -> HeteroscedasticGP:
        """Optimise f and g in turn until a round gains little or the budget is spent."""
        bound = model.fixed_bound(self.rows)
        for _ in range(_ROUNDS):
            if self._spent():
                break
            better = self.optimise_noise(self._optimise_function(model))
            gained = better.fixed_bound(self.rows) - bound
            if gained > 0:
                model, bound = better, bound + gained
            if gained < _GAIN * self.rows.observations:
                break
        return model

    def optimise_noise(self, model: HeteroscedasticGP) -> HeteroscedasticGP:
        """Optimise kernel, mean and points of g, and then q(g), given q(f)."""
        g, targets = self._noise(model)
        return self._with_noise(model, self._optimised(g, targets).with_best_q(targets))

    def select_noise(
        self, model: HeteroscedasticGP, goal: Goal
    ) -> tuple[HeteroscedasticGP, torch.Tensor, Selection]:
        """Select the points of g from its own and fresh ones; return the candidates as well."""
        g, targets = self._noise(model)
        steps = self._steps(g, targets)
        pool = steps.with_fresh(g, max(32, g.K // 4))
        statistics = pool.subset_statistics(targets)
        frontier = steps.frontier(statistics)
        reference = frontier.bounds.max().item()
        if isinstance(goal, Tolerance):
            constant = constant_model(steps, g)[1]
            goal = goal.within(reference - constant, N=self.rows.observations)
        M = max(goal.size(frontier, reference=reference), 1)
        selection = learn_inclusion(
            statistics,
            frontier,
            frontier.masks[M],
            goal=goal,
            generator=noise_context(self.context, self.rows.N).generator,
            max_steps=self.training.inclusion_steps,
        )
        selected = steps.select(pool, frontier.masks[M], frontier.bounds[M].item())
        model, device = self._with_noise(model, selected.with_best_q(targets)), self.rows.device
        candidates = pool.candidates.detach().to(device)
        return self.optimise_noise(model), candidates, selection.to(device)

    def without_noise_points(self, model: HeteroscedasticGP) -> HeteroscedasticGP:
        """Return the model with constant noise."""
        g, targets = self._noise(model)
        return self._with_noise(model, constant_model(self._steps(g, targets), g)[0])

    def _noise(self, model: HeteroscedasticGP) -> tuple[VariationalGP, Dataset]:
        """Return a copy of g and its targets, where its steps are computed."""
        device = _noise_device(self.context, self.rows.N)
        return copy_module(model.log_noise).to(device), model.residuals(self.rows).to(device)

    def _with_noise(self, model: HeteroscedasticGP, log_noise: VariationalGP) -> HeteroscedasticGP:
        """Return the model with another g, on the device of the rows."""
        return model.with_parts(log_noise=log_noise.to(self.rows.device)).normalised(self.rows)

    def _optimise_function(self, model: HeteroscedasticGP) -> HeteroscedasticGP:
        f = self._optimised(model.function, model.weighted(self.rows))
        return model.with_parts(function=f).normalised(self.rows)

    def _optimised(self, model: Model, rows: Dataset) -> Model:
        learnt = model.candidates.requires_grad
        model.candidates.requires_grad_(learnt and model.K * rows.D <= _MOVED * rows.N)
        stop = Stop(1e-4 * rows.observations, 10, _ITERATIONS)
        with threads_for(10.0 * model.K**3):
            better, _ = self._steps(model, rows).optimise(model, stop=stop)
        better.candidates.requires_grad_(learnt)
        return better

    def _spent(self) -> bool:
        """Return whether the budget is spent; a decision by the clock is taken once."""
        if self.budget.seconds is None:
            return self.budget.remaining == 0
        return self.context.checkpoint_log.once(lambda: self.budget.remaining == 0)

    def _steps(self, model: Model, rows: Dataset) -> FastSteps[Model]:
        is_function = isinstance(model, SparseGP)
        return FastSteps(
            model,
            rows,
            rows=self.training.selection_rows,
            context=self.context if is_function else noise_context(self.context, rows.N),
            budget=self.budget,
            warm_start=True,
        )


def _noise_device(context: TrainingContext, N: int) -> torch.device:
    """Return the device on which the steps of g are computed."""
    return torch.device("cpu") if N <= _CPU_ROWS else context.generator.device


def noise_context(context: TrainingContext, N: int) -> TrainingContext:
    """Return the context of a step of g, whose generator is on the device of this step.

    A generator on another device than that of the fit has a seed from it. It is made anew for each
    step, because checkpoints save the state of the fit's generator alone.
    """
    if context.generator.device == (device := _noise_device(context, N)):
        return context
    seed = draw_seed(context.generator)
    return replace(context, generator=torch.Generator(device).manual_seed(seed))


def _fit_noise(
    log_noise: VariationalGP, data: Dataset, *, training: SparseTraining, context: TrainingContext
) -> FitResult[VariationalGP]:
    """Fit g on the device of the context; its model, candidates and selection are with the rows."""
    device, own = data.device, context.generator.device
    result = fit_sparse(
        copy_module(log_noise).to(own), data.to(own), training=training, context=context
    )
    return replace(
        result,
        model=result.model.to(device),
        candidates=tuple(each.to(device) for each in result.candidates),
        selections=tuple(each.to(device) for each in result.selections),
    )


def _share(clock: Budget, share: float) -> float | None:
    """Return a share of the seconds that are left; None without a limit."""
    return None if clock.seconds_left is None else share * clock.seconds_left


def _constant(
    plain: FitResult[SparseGP],
    model: HeteroscedasticGP,
    noise: FitResult[VariationalGP],
    rows: Dataset,
) -> FitResult[HeteroscedasticGP]:
    """Return the fit with constant noise, and no points of g."""
    model = model.with_parts(function=plain.model).normalised(rows)
    log_noise = model.log_noise.posterior(rows)
    nothing = replace(noise.selection, mask=torch.zeros_like(noise.selection.mask))
    result: FitResult[Any] = plain
    return replace(
        result,
        model=model,
        posterior=HeteroscedasticPosterior(plain.posterior, log_noise),
        selections=(plain.selection, nothing),
        candidates=(*plain.candidates, *noise.candidates),
        sized=_sized(plain.sized, log_noise, 0.0),
        noise_gain=0.0,
    )


def _shifted(frontier: SizeFrontier | None, nats: float, rows: Dataset) -> SizeFrontier | None:
    """Return the frontier of f given q(g), with the nats of g added."""
    if frontier is None:
        return None
    evidence = None if frontier.evidence is None else frontier.evidence + nats
    elbos, densities = frontier.elbos + nats, frontier.log_densities
    return SizeFrontier(elbos, densities, rows.observations, evidence)


def _sized(
    sized: tuple[SizedModel, ...], log_noise: Posterior, nats: float
) -> tuple[SizedModel, ...]:
    """Return models with fewer points of f, and the same g."""
    functions = [(each.posterior, each.elbo) for each in sized]
    return tuple(
        SizedModel(HeteroscedasticPosterior(function, log_noise), elbo + nats, nan)
        for function, elbo in functions
        if isinstance(function, Posterior)
    )
