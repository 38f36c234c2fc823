"""The fast schedule of the GP-LVM: L-BFGS, inference of latent positions, selection."""

from copy import deepcopy
from dataclasses import replace
from math import inf
from typing import final

import torch
from torch import Tensor

from winnowgp.data import MaskedMatrix
from winnowgp.errors import TrainingError
from winnowgp.models import LatentVariableGP, greedy_variance
from winnowgp.selection import Frontier, elimination_frontier
from winnowgp.training.callbacks import Progress
from winnowgp.training.goals import Goal, MaxPoints, learn_inclusion
from winnowgp.training.initialization import cluster_centres
from winnowgp.training.latent_inference import infer_latents
from winnowgp.training.lbfgs import Stop, maximise_elbo
from winnowgp.training.schedules import FitResult, TrainingContext

# Defaults: number of candidates, iterations, and gain in nats per entry.
CANDIDATES, ITERATIONS, GAIN = 100, 300, 3e-6
# Number of points in the first optimisation, before any were selected.
FIRST = 64
# KL of q(x_i) per row, in nats, below which the fit explains the whole table as noise.
COLLAPSED = 1e-3


def fit_gplvm(
    model: LatentVariableGP,
    table: MaskedMatrix,
    *,
    goal: Goal,
    n_candidates: int | None,
    rounds: int,
    iterations: int,
    gain: float,
    inclusion_steps: int,
    context: TrainingContext,
) -> FitResult[LatentVariableGP]:
    """Fit a GP-LVM by L-BFGS on the collapsed bound, with selections as the latents move.

    1. Points: some of the model's candidates, else cluster centres of the latent positions.
    2. L-BFGS on latents, kernel, noise and locations at once; the first time, if that explains the
       table as noise alone, once more with the noise fixed at first.
    3. Every row's latent position is inferred anew given the functions: a row in the wrong region
       has no gradient that leads out of it.
    4. Backward elimination by psi statistics, exactly as in regression, from the points and fresh
       candidates at latent positions down to the goal. The set may grow.
    5. Steps 2 to 4 again until the number settles; then a last, longer optimisation.

    Args:
        iterations: largest number of iterations of the last L-BFGS run; the others have a third.
        gain: the last run ends once twenty iterations together gain fewer nats per entry.
        inclusion_steps: largest number of subsets drawn to learn inclusion probabilities.
    """
    steps = _Steps(model, table, context)
    stop = Stop(1e-5 * table.count, 20, max(1, iterations // 3))
    current, reference = _initial_fit(steps, goal, stop)
    current, reference = _select(steps, goal, n_candidates, rounds, stop, current, reference)
    stop = Stop(gain * table.count, 20, iterations)
    current, _ = steps.optimise(current, stop=stop)
    moved = steps.with_inferred_latents(current)
    if moved is not current:
        current, _ = steps.optimise(moved, stop=replace(stop, iterations=iterations // 3))
    pool = steps.with_fresh(current, max(32, current.K // 4))
    selection = learn_inclusion(
        pool.subset_statistics(table),
        steps.frontier(pool),
        torch.arange(pool.K, device=pool.candidates.device) < current.K,
        goal=goal,
        generator=context.generator,
        max_steps=inclusion_steps,
    )
    elbo = current.fixed_bound(table)
    return FitResult(
        model=current,
        posterior=current.posterior(table),
        selections=(selection,),
        candidates=(pool.candidates.detach(),),
        elbo=elbo,
        elbo_gap=max(reference - elbo, 0.0),
    )


def _initial_fit(steps: "_Steps", goal: Goal, stop: Stop) -> tuple[LatentVariableGP, float]:
    """Return a model optimised with some points, before any selection, and its ELBO."""
    start = steps.start(goal.points if isinstance(goal, MaxPoints) else FIRST)
    current, reference = steps.optimise_twice(start, stop=stop)
    if current.latents.kl().item() < COLLAPSED * steps.table.N:
        initial, _ = steps.optimise(start, stop=stop, hold_noise=True)
        other, elbo = steps.optimise_twice(initial, stop=stop)
        if elbo > reference:
            return other, elbo
    return current, reference


def _select(
    steps: "_Steps",
    goal: Goal,
    n_candidates: int | None,
    rounds: int,
    stop: Stop,
    current: LatentVariableGP,
    reference: float,
) -> tuple[LatentVariableGP, float]:
    """Select and optimise in rounds until the number of points settles."""
    size = -1
    for _ in range(rounds):
        pool = steps.with_fresh(current, n_candidates or CANDIDATES)
        frontier = steps.frontier(pool)
        reference = max(reference, frontier.bounds.max().item())
        M = goal.size(frontier, reference=reference)
        if n_candidates is not None:
            M = min(M, frontier.at_most(n_candidates))
        current = pool.prune(frontier.masks[M])
        elbo = frontier.bounds[M].item()
        steps.context.notify_once(Progress.of(current, "selection", 1, 1, elbo))
        if abs(M - size) <= 0.03 * size:
            break
        size = M
        current, elbo = steps.optimise(current, stop=stop)
        current, reference = steps.with_inferred_latents(current), max(reference, elbo)
    return current, reference


@final
class _Steps:
    """The steps of the schedule on one table.

    Fresh candidates are drawn from the candidates given, else from the latent positions.
    """

    def __init__(
        self, model: LatentVariableGP, table: MaskedMatrix, context: TrainingContext
    ) -> None:
        self.model, self.table, self.context = model, table, context
        self._own_candidates = model.candidates.detach().clone()

    def start(self, count: int) -> LatentVariableGP:
        """Return the model with `count` of its candidates, else with cluster centres."""
        if len(self._own_candidates):
            nothing = self._own_candidates[:0]
            chosen = greedy_variance(self.model.kernel, self._own_candidates, count, given=nothing)
            return self.model.with_candidates(self._own_candidates[chosen])
        X = self.model.latents.mean.detach()
        if len(X.unique(dim=0)) <= count:
            return self.model.with_candidates(X.unique(dim=0))
        centres = cluster_centres(X, count, generator=self.context.generator, max_iter=50)
        return self.model.with_candidates(centres)

    def optimise_twice(
        self, model: LatentVariableGP, *, stop: Stop
    ) -> tuple[LatentVariableGP, float]:
        """Optimise and infer latents twice, so that no point is pruned which latents still need."""
        reference = -inf
        for _ in range(2):
            model, elbo = self.optimise(model, stop=stop)
            model, reference = self.with_inferred_latents(model), max(reference, elbo)
        return model, reference

    def optimise(
        self, model: LatentVariableGP, *, stop: Stop, hold_noise: bool = False
    ) -> tuple[LatentVariableGP, float]:
        """Return a copy optimised by L-BFGS, and its ELBO in nats."""
        moved = deepcopy(model)
        fixed = [p for p in moved.likelihood.parameters() if hold_noise and p.requires_grad]
        for parameter in fixed:
            parameter.requires_grad_(False)
        try:
            maximum = maximise_elbo(
                moved,
                moved.latents.mean.detach().clone(),
                objective=lambda: moved.bound(self.table),
                stop=stop,
                on_step=lambda step, value: self.context.notify(
                    Progress.of(moved, "optimisation", step, stop.iterations, value)
                ),
                checkpoint_log=self.context.checkpoint_log,
            )
        except TrainingError:
            # Rounding at the start (close points, hardly any noise): return the model unchanged.
            return model, model.fixed_bound(self.table)
        for parameter in fixed:
            parameter.requires_grad_(True)
        return moved, maximum.value

    @torch.no_grad()
    def with_inferred_latents(self, model: LatentVariableGP) -> LatentVariableGP:
        """Return the model with every row's latent position inferred anew, if the ELBO gains."""
        moved = deepcopy(model)
        latents = moved.latents
        stage = self.context.checkpoint_log.stage(
            {"latents": latents}, start=list(model.parameters())
        )
        if not stage.ended:
            anchors = latents.mean.detach(), latents.variance.detach()
            bound = model.posterior(self.table).row_elbo(self.table)
            positions = infer_latents(bound, anchors=anchors, starts=2, flat=0.01)
            latents.mean.copy_(positions.mean)
            latents.log_variance.copy_(positions.variance.log())
            stage.end()
        return moved if moved.fixed_bound(self.table) > model.fixed_bound(self.table) else model

    def with_fresh(self, model: LatentVariableGP, count: int) -> LatentVariableGP:
        """Return the model with up to `count` more candidates of greatest conditional variance."""
        points = model.candidates.detach()
        source = self._own_candidates if len(self._own_candidates) else model.latents.mean.detach()
        greedy = greedy_variance(model.kernel, source, count, given=points)
        return model.with_candidates(torch.cat([points, source[greedy]]))

    def frontier(self, pool: LatentVariableGP) -> Frontier:
        """Return the frontier of the ELBO with the latents' KL, its tolerances per entry."""
        frontier = elimination_frontier(pool.subset_statistics(self.table))
        with torch.no_grad():
            bounds: Tensor = frontier.bounds - pool.latents.kl()
        return replace(frontier, bounds=bounds, N=self.table.count)
