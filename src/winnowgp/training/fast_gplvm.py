"""The fast schedule of the GP-LVM: L-BFGS, inference of latent positions, selection.

`infer_latents` finds the latent positions of rows, one by one, by batched BFGS: of new rows too.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from math import inf
from typing import TypeAlias, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from winnowgp.data import MaskedMatrix
from winnowgp.errors import TrainingError
from winnowgp.models import LatentVariableGP, greedy_variance
from winnowgp.models.gplvm_posterior import RowELBO
from winnowgp.selection import Frontier, elimination_frontier
from winnowgp.training.callbacks import Progress
from winnowgp.training.goals import Goal, MaxPoints, learn_inclusion
from winnowgp.training.initialization import cluster_centres
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


# Number of rows inferred at once: bounds memory at this many times the pairs of inducing points.
ROWS = 512

Problems: TypeAlias = Callable[[Tensor, Tensor], Tensor]

"""A differentiable function of the numbers of B problems and their vectors `[B n]` that returns
nats `[B]`."""

_BACKTRACKS = 10
# Largest norm of a step. Where data have little noise, a row may start hundreds of its standard
# deviations away.
_LONGEST = 32.0
# What rounding may hide, relative to a value; and a gradient too small to restart for.
_ROUNDING, _SMALL = 1e-11, 1e-3


@dataclass(frozen=True, slots=True)
class LatentPositions:
    """q(x_i) = N(mean_i, diag variance_i) of some rows, and the bound of each row there."""

    mean: Float[Tensor, "N Q"]
    variance: Float[Tensor, "N Q"]
    nats: Float[Tensor, " N"]


def infer_latents(
    bound: RowELBO,
    *,
    anchors: tuple[Float[Tensor, "J Q"], Float[Tensor, "J Q"]],
    starts: int = 3,
    flat: float = 1e-6,
) -> LatentPositions:
    """Return the best q(x_i) for each row, independently of the other rows.

    BFGS starts at the anchors with the highest bound that are not close to each other, and the best
    of its results is returned.

    Args:
        bound: bound of each row as a function of q(x_i).
        anchors: means and variances to start from, such as those of training rows.
        starts: number of starts per row.
        flat: largest slope of a solution, in nats per standard deviation.
    """
    chunks = torch.arange(bound.N, device=anchors[0].device).split(ROWS)
    results = [_infer_chunk(bound, rows, anchors, starts=starts, flat=flat) for rows in chunks]
    return LatentPositions(
        torch.cat([each.mean for each in results]),
        torch.cat([each.variance for each in results]),
        torch.cat([each.nats for each in results]),
    )


def _infer_chunk(
    bound: RowELBO,
    rows: Int[Tensor, " B"],
    anchors: tuple[Tensor, Tensor],
    *,
    starts: int,
    flat: float,
) -> LatentPositions:
    nats = bound.of(rows).everywhere(*anchors)
    best: LatentPositions | None = None
    for _ in range(starts):
        nearest = nats.argmax(1)
        result = optimise_positions(
            bound, rows, anchors[0][nearest], anchors[1][nearest], flat=flat
        )
        best = result if best is None else _better(best, result)
        # Anchors within half a prior standard deviation lead to the same optimum.
        near = torch.cdist(anchors[0][nearest], anchors[0]) < 0.5
        nats = nats.masked_fill(near, -torch.inf)
        if bool(torch.isinf(nats).all()):
            break
    assert best is not None
    return best


def optimise_positions(
    bound: RowELBO,
    rows: Int[Tensor, " B"],
    mean: Float[Tensor, "B Q"],
    variance: Float[Tensor, "B Q"],
    *,
    flat: float = 1e-6,
) -> LatentPositions:
    """Return the local optimum of each row's q(x) that BFGS reaches from the one given."""
    Q, spread = mean.shape[1], variance.sqrt()

    def nats(which: Tensor, x: Tensor) -> Tensor:
        at = x[:, :Q] * spread[which]
        # Variances beyond e^±30 would overflow; the prior keeps them far from there.
        return bound(rows[which], at, x[:, Q:].clamp(-30, 30).exp())

    start = torch.cat([mean / spread, variance.log()], 1)
    x, value = maximise_each(nats, start, flat=flat)
    return LatentPositions(x[:, :Q] * spread, x[:, Q:].exp(), value)


def _better(a: LatentPositions, b: LatentPositions) -> LatentPositions:
    wins = b.nats > a.nats
    return LatentPositions(
        torch.where(wins[:, None], b.mean, a.mean),
        torch.where(wins[:, None], b.variance, a.variance),
        torch.where(wins, b.nats, a.nats),
    )


def maximise_each(
    problems: Problems, start: Float[Tensor, "N n"], *, iterations: int = 200, flat: float = 1e-6
) -> tuple[Float[Tensor, "N n"], Float[Tensor, " N"]]:
    """Maximise many small problems at once by BFGS, each with its own matrix and step lengths.

    The result of a problem does not depend on the others that are solved beside it.

    Args:
        iterations: largest number of iterations.
        flat: a problem is solved when its gradient is at most this large in every coordinate.

    Returns:
        The maximisers, never lower than the start, and the nats there.
    """
    search = _BatchedBFGS(problems, start)
    for _ in range(iterations):
        moving = (search.gradient.abs().amax(1) > flat) & ~search.stuck
        if not bool(moving.any()):
            break
        search.step(torch.nonzero(moving)[:, 0])
    return search.x, search.value


@final
class _BatchedBFGS:
    """The current point and inverse Hessian of every problem."""

    def __init__(self, problems: Problems, start: Float[Tensor, "N n"]) -> None:
        N, n = start.shape
        self._problems = problems
        self.x = start.detach().clone()
        self.value, self.gradient = self._evaluate(torch.arange(N, device=start.device), self.x)
        self._eye = torch.eye(n, dtype=start.dtype, device=start.device)
        # The first step has about unit length.
        size = self.gradient.norm(dim=1).clamp_min(1.0)
        self._H = self._eye / size[:, None, None]
        self.stuck: Bool[Tensor, " N"] = ~torch.isfinite(self.value)

    def step(self, rows: Int[Tensor, " B"]) -> None:
        """Take one iteration of the problems in `rows`."""
        g = self.gradient[rows]
        direction = (self._H[rows] @ g[:, :, None])[:, :, 0]
        direction = direction / (direction.norm(dim=1, keepdim=True) / _LONGEST).clamp_min(1.0)
        x, value, gradient, moved = self._line_search(rows, direction)
        s, y = x - self.x[rows], g - gradient
        self.x[rows], self.value[rows], self.gradient[rows] = x, value, gradient
        self._update(rows[moved], s[moved], y[moved])
        failed = rows[~moved]
        # If the line search fails along the gradient, stop; otherwise reset the inverse Hessian.
        scale = self.gradient[failed].norm(dim=1).clamp_min(1.0)
        plain = self._eye / scale[:, None, None]
        fresh = (self._H[failed] - plain).abs().amax((1, 2)) < 1e-12
        self.stuck[failed] = fresh | (self.gradient[failed].abs().amax(1) < _SMALL)
        self._H[failed] = plain

    def _line_search(
        self, rows: Int[Tensor, " B"], direction: Float[Tensor, "B n"]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Backtrack along each direction until the gain is sufficient, up to rounding."""
        x, value, gradient = self.x[rows].clone(), self.value[rows].clone(), self.gradient[rows]
        gradient, start = gradient.clone(), x.clone()
        slope = (direction * gradient).sum(1)
        least = value - _ROUNDING * (1 + value.abs())
        step, moved = torch.ones_like(value), torch.zeros_like(value, dtype=torch.bool)
        for _ in range(_BACKTRACKS):
            active = torch.nonzero(~moved)[:, 0]
            if not len(active):
                break
            trial = start[active] + step[active, None] * direction[active]
            new, slope_at = self._evaluate(rows[active], trial)
            enough = new >= least[active] + 1e-4 * step[active] * slope[active]
            enough &= slope[active] > 0
            done = active[enough]
            x[done], value[done], gradient[done] = trial[enough], new[enough], slope_at[enough]
            moved[done] = True
            step[active] *= 0.3
        return x, value, gradient, moved

    def _update(self, rows: Tensor, s: Tensor, y: Tensor) -> None:
        """Set H ← (I − ρ s yᵀ) H (I − ρ y sᵀ) + ρ s sᵀ where the curvature along s is positive."""
        sy = (s * y).sum(1)
        good = sy > 1e-12 * s.norm(dim=1) * y.norm(dim=1)
        rows, s, y, sy = rows[good], s[good], y[good], sy[good]
        left = self._eye - s[:, :, None] * y[:, None, :] / sy[:, None, None]
        self._H[rows] = (
            left @ self._H[rows] @ left.mT + s[:, :, None] * s[:, None, :] / (sy[:, None, None])
        )

    def _evaluate(self, rows: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            value = self._problems(rows, at)
            gradient = torch.autograd.grad(value.sum(), at)[0]
        unusable = ~(torch.isfinite(value) & torch.isfinite(gradient).all(1))
        return value.detach().masked_fill(unusable, -torch.inf), gradient.nan_to_num(0.0)
