"""The fast schedule of the GP-LVM."""

from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import inf
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from winnowgp.data import MaskedMatrix
from winnowgp.errors import InputError, TrainingError
from winnowgp.models import LatentVariableGP, greedy_variance
from winnowgp.models.gplvm import Latent
from winnowgp.models.gplvm_posterior import RowELBO
from winnowgp.point_processes import SquaredCardinality
from winnowgp.selection import Frontier, Selection, alpha_at, path_frontier, select_naturally
from winnowgp.training.batched_bfgs import maximise_each
from winnowgp.training.callbacks import Progress
from winnowgp.training.context import TrainingContext
from winnowgp.training.goals import FixedAlpha, Goal, MaxPoints, Tolerance
from winnowgp.training.lbfgs import Stop, climb
from winnowgp.training.schedules import LatentFit, LatentSchedule
from winnowgp.typing import Mask

# Where rows lie in the latent space of a fitted model.


# Rows placed at once: bounds memory at this many times the pairs of points.
ROWS = 512


@dataclass(frozen=True, slots=True)
class Places:
    """q(x_i) = N(mean_i, diag variance_i) of some rows, and each row's bound there."""

    mean: Float[Tensor, "N Q"]
    variance: Float[Tensor, "N Q"]
    nats: Float[Tensor, " N"]


def placed(
    bound: RowELBO,
    *,
    anchors: tuple[Float[Tensor, "J Q"], Float[Tensor, "J Q"]],
    starts: int = 3,
    flat: float = 1e-6,
) -> Places:
    """The best q(x_i) found for each row, independently of the other rows.

    Each row starts at the anchors (means and variances, those of training rows for example) that
    suit it best and are not close to each other; BFGS climbs from each until no slope exceeds
    `flat` nats a standard deviation, and the best end counts.
    """
    parts = torch.arange(bound.N, device=anchors[0].device).split(ROWS)
    found = [_placed(bound, rows, anchors, starts=starts, flat=flat) for rows in parts]
    return Places(
        torch.cat([p.mean for p in found]),
        torch.cat([p.variance for p in found]),
        torch.cat([p.nats for p in found]),
    )


def _placed(
    bound: RowELBO,
    rows: Int[Tensor, " B"],
    anchors: tuple[Tensor, Tensor],
    *,
    starts: int,
    flat: float,
) -> Places:
    nats = bound.of(rows).everywhere(*anchors)
    best: Places | None = None
    for _ in range(starts):
        chosen = nats.argmax(1)
        ended = climbed(bound, rows, anchors[0][chosen], anchors[1][chosen], flat=flat)
        best = ended if best is None else _better(best, ended)
        # Anchors within half a prior standard deviation lead to the same place.
        near = torch.cdist(anchors[0][chosen], anchors[0]) < 0.5
        nats = nats.masked_fill(near, -torch.inf)
        if bool(torch.isinf(nats).all()):
            break
    assert best is not None
    return best


def climbed(
    bound: RowELBO,
    rows: Int[Tensor, " B"],
    mean: Float[Tensor, "B Q"],
    variance: Float[Tensor, "B Q"],
    *,
    flat: float = 1e-6,
) -> Places:
    """Each row's q(x) climbed from the one given."""
    Q, spread = mean.shape[1], variance.sqrt()

    def nats(which: Tensor, x: Tensor) -> Tensor:
        at = x[:, :Q] * spread[which]
        # Variances beyond e^±30 would overflow; the prior keeps them far from there.
        return bound(rows[which], at, x[:, Q:].clamp(-30, 30).exp())

    start = torch.cat([mean / spread, variance.log()], 1)
    x, value = maximise_each(nats, start, flat=flat)
    return Places(x[:, :Q] * spread, x[:, Q:].exp(), value)


def _better(a: Places, b: Places) -> Places:
    wins = b.nats > a.nats
    return Places(
        torch.where(wins[:, None], b.mean, a.mean),
        torch.where(wins[:, None], b.variance, a.variance),
        torch.where(wins, b.nats, a.nats),
    )


# The fast schedule of a latent-variable model: move, place, choose, and again.


# Points that the first climb has, before any were chosen.
FIRST = 64
# Nats a row below which its place says nothing: all of the table was taken for noise.
ASLEEP = 1e-3


@final
@dataclass(frozen=True, slots=True)
class FastLatent(LatentSchedule):
    """L-BFGS on the collapsed bound, with the active set chosen anew as the latent cloud moves.

    1. Points: the model's own candidates thinned, else centres of the latent cloud.
    2. L-BFGS on latents, kernel, noise and locations at once; the first time, if that ends with
       nothing but noise, once more with the noise held at first.
    3. Every row is placed anew, given the functions: a row that sits in the wrong part of the map
       has no gradient that leads out.
    4. The points, and fresh candidates where the cloud is now: flips and elimination by psi
       statistics, exactly as in regression, down to what the goal asks for. The set may grow.
    5. From 2 again until the set settles; then a last, longer climb.

    Tolerances are nats per observed entry. For `LatentVariableGP` alone.
    """

    goal: Goal = field(default_factory=Tolerance)
    n_candidates: int = 100
    rounds: int = 3
    iterations: int = 300
    """At most, in the last climb; the others have a third."""
    gain: float = 3e-6
    """The last climb ends once twenty iterations together gain fewer nats an entry."""
    inclusion_steps: int = 60
    """Subsets drawn at most to learn the probabilities of inclusion."""

    def __post_init__(self) -> None:
        if min(self.n_candidates, self.rounds, self.iterations) < 1:
            raise InputError(
                "`n_candidates`, `rounds` and `iterations` must be at least 1; "
                f"got {self.n_candidates}, {self.rounds} and {self.iterations}."
            )

    def run(
        self, model: Latent, table: MaskedMatrix, *, context: TrainingContext[Progress]
    ) -> LatentFit[Latent]:
        if not isinstance(model, LatentVariableGP):
            raise InputError(
                f"`FastLatent` needs a LatentVariableGP; got {type(model).__name__}. "
                "Use `JointLatent` for other kernels and likelihoods."
            )
        steps = _Steps(model, table, context)
        current, reference = self._rounds(steps)
        stop = Stop(self.gain * table.count, 20, self.iterations)
        current, _ = steps.climb(current, stop=stop)
        moved = steps.replaced(current)
        if moved is not current:
            current, _ = steps.climb(moved, stop=replace(stop, iterations=self.iterations // 3))
        return self._finished(steps, current, reference, context.generator)

    def _rounds(self, steps: "_Steps") -> tuple[LatentVariableGP, float]:
        """Climb, place, choose, until the set settles."""
        table, size = steps.table, -1
        first = self.goal.points if isinstance(self.goal, MaxPoints) else FIRST
        start = steps.started(first)
        stop = Stop(1e-5 * table.count, 20, max(1, self.iterations // 3))
        current, reference = steps.climbed_twice(start, stop=stop)
        if current.latents.kl().item() < ASLEEP * table.N:
            held, _ = steps.climb(start, stop=stop, hold_noise=True)
            other, bound = steps.climbed_twice(held, stop=stop)
            if bound > reference:
                current, reference = other, bound
        for _ in range(self.rounds):
            pool = steps.with_fresh(current, self.n_candidates)
            frontier = steps.frontier(pool)
            reference = max(reference, frontier.bounds.max().item())
            M = self.goal.size(frontier, reference=reference)
            current = pool.prune(frontier.masks[M])
            steps.notify_once("choose", frontier.bounds[M].item(), current)
            if abs(M - size) <= 0.03 * size:
                break
            size = M
            current, bound = steps.climb(current, stop=stop)
            current, reference = steps.replaced(current), max(reference, bound)
        return current, reference

    def _finished(
        self,
        steps: "_Steps",
        fitted: LatentVariableGP,
        reference: float,
        generator: torch.Generator,
    ) -> LatentFit:
        """Look once more at the final points among fresh candidates, and report."""
        pool = steps.with_fresh(fitted, max(32, fitted.K // 4))
        mask = torch.arange(pool.K, device=pool.candidates.device) < fitted.K
        bound = fitted.fixed_bound(steps.table)
        return LatentFit(
            model=fitted,
            posterior=fitted.posterior(steps.table),
            selection=self._selection(steps, pool, mask, generator),
            candidates=pool.candidates.detach(),
            bound=bound,
            elbo_gap=max(reference - bound, 0.0),
        )

    def _selection(
        self, steps: "_Steps", pool: LatentVariableGP, mask: Mask, generator: torch.Generator
    ) -> Selection:
        frontier, goal = steps.frontier(pool), self.goal
        alpha = goal.alpha if isinstance(goal, FixedAlpha) else alpha_at(frontier, int(mask.sum()))
        learnt = select_naturally(
            pool.subset_statistics(steps.table),
            prior=SquaredCardinality(pool.K, alpha),
            generator=generator,
            start=mask,
            max_steps=self.inclusion_steps,
        )
        return Selection(learnt.q.inclusion, mask, learnt.trace, alpha, frontier)


@final
class _Steps:
    """The table, and where fresh candidates come from: given ones, else the latent cloud."""

    def __init__(
        self, model: LatentVariableGP, table: MaskedMatrix, context: TrainingContext[Progress]
    ) -> None:
        self.model, self.table, self._course = model, table, context
        self._given = model.candidates.detach().clone()

    def started(self, count: int) -> LatentVariableGP:
        """Some of the candidates given, spread out; else centres of the cloud."""
        if len(self._given):
            nothing = self._given[:0]
            chosen = greedy_variance(self.model.kernel, self._given, count, given=nothing)
            return self.model.with_candidates(self._given[chosen])
        X = self.model.latents.mean.detach()
        if len(X.unique(dim=0)) <= count:
            return self.model.with_candidates(X.unique(dim=0))
        g = self._course.generator
        seed = int(torch.randint(2**31, (1,), generator=g, device=g.device))
        from sklearn.cluster import KMeans  # half a second that not all fits need

        clusters = KMeans(count, n_init="auto", max_iter=50, random_state=seed).fit(X.cpu().numpy())
        return self.model.with_candidates(torch.as_tensor(clusters.cluster_centers_).to(X))

    def climbed_twice(
        self, model: LatentVariableGP, *, stop: Stop
    ) -> tuple[LatentVariableGP, float]:
        """Before anything is dropped: points that the cloud needs later must not go now."""
        reference = -inf
        for _ in range(2):
            model, bound = self.climb(model, stop=stop)
            model, reference = self.replaced(model), max(reference, bound)
        return model, reference

    def climb(
        self, model: LatentVariableGP, *, stop: Stop, hold_noise: bool = False
    ) -> tuple[LatentVariableGP, float]:
        """A copy moved uphill by L-BFGS, and its bound in nats."""
        moved = deepcopy(model)
        held = [p for p in moved.likelihood.parameters() if hold_noise and p.requires_grad]
        for parameter in held:
            parameter.requires_grad_(False)
        try:
            found = climb(
                moved,
                moved.latents.mean.detach().clone(),
                objective=lambda: moved.bound(self.table),
                stop=stop,
                on_step=lambda step, value: self._course.on_progress(
                    _progress("move", step, stop.iterations, value, moved)
                ),
                checkpoint_log=self._course.checkpoint_log,
            )
        except TrainingError:
            # Rounding at the start (close points, hardly any noise): stay, and choose again.
            return model, model.fixed_bound(self.table)
        for parameter in held:
            parameter.requires_grad_(True)
        return moved, found.value

    @torch.no_grad()
    def replaced(self, model: LatentVariableGP) -> LatentVariableGP:
        """Every row placed anew where the functions would have it, if the bound gains by it."""
        moved = deepcopy(model)
        latents = moved.latents
        stage = self._course.checkpoint_log.stage(
            {"latents": latents}, start=list(model.parameters())
        )
        if not stage.ended:
            anchors = latents.mean.detach(), latents.variance.detach()
            bound = model.posterior(self.table).row_elbo(self.table)
            found = placed(bound, anchors=anchors, starts=2, flat=0.01)
            latents.mean.copy_(found.mean)
            latents.log_variance.copy_(found.variance.log())
            stage.end()
        return moved if moved.fixed_bound(self.table) > model.fixed_bound(self.table) else model

    def with_fresh(self, model: LatentVariableGP, count: int) -> LatentVariableGP:
        """The model's points and up to `count` candidates of greatest conditional variance."""
        points = model.candidates.detach()
        source = self._given if len(self._given) else model.latents.mean.detach()
        chosen = greedy_variance(model.kernel, source, count, given=points)
        return model.with_candidates(torch.cat([points, source[chosen]]))

    def frontier(self, pool: LatentVariableGP) -> Frontier:
        """The frontier of whole bounds, its tolerances per observed entry."""
        frontier = path_frontier(pool.subset_statistics(self.table))
        with torch.no_grad():
            bounds: Tensor = frontier.bounds - pool.latents.kl()
        return replace(frontier, bounds=bounds, N=self.table.count)

    def notify_once(self, phase: str, value: float, model: LatentVariableGP) -> None:
        """Something that happens between stages."""
        self._course.notify_once(_progress(phase, 1, 1, value, model))


def _progress(phase: str, step: int, steps: int, value: float, model: LatentVariableGP) -> Progress:
    points, latents = model.candidates.detach().clone(), model.latents.mean.detach().clone()
    return Progress(phase, step, steps, value, None, points, latents)
