"""The fast schedule of several processes: one selection over the candidates of all of them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf, pi, sqrt
from typing import final

import torch
from jaxtyping import Bool
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.errors import TrainingError
from winnowgp.linalg import threads_for
from winnowgp.models import BoxKernel, MultiOutputGP, greedy_variance
from winnowgp.models.kernels import copy_module
from winnowgp.models.likelihoods import observation_model
from winnowgp.models.priors import log_prior
from winnowgp.models.target_likelihoods import TargetLikelihoods, TargetObservations
from winnowgp.selection import Frontier, SizeFrontier, elimination_frontier
from winnowgp.selection.frontier import Selection
from winnowgp.training import initialization
from winnowgp.training.budget import Budget
from winnowgp.training.callbacks import Progress
from winnowgp.training.goals import Goal, MaxPoints, Tolerance, learn_inclusion
from winnowgp.training.lbfgs import Stop, maximise_elbo
from winnowgp.training.schedules import FitResult, TrainingContext, warn_not_sharded
from winnowgp.typing import Scalar

# Observed targets up to which hyper-parameters come from the exact evidence, and up to which that
# of the fitted model is reported.
_DENSE, _EXACT = 400, 2000
# Rows that starts are compared on, and rows that hyper-parameters are optimised on as the pool
# grows; the selection and the last optimisation use all rows.
_START_ROWS, _ROWS = 500, 4000
# Candidates of all processes together: those of a start, and the largest pool.
_FIRST, _MOST = 192, 1536
# L-BFGS iterations of a start, of a pool, and of selected points between two selections.
_START, _POOL, _MOVE = 25, 40, 100
# Share of the points that a step towards a limit leaves.
_SHRINK = 0.75
# Fewest iterations of a run that the budget limits, and the share of the remaining work that a run
# may take.
_LEAST, _SHARE = 10, 0.5
# Share of the work that steps of the inclusion probabilities may take, as in `fast_sparse`.
_INCLUSION = 0.001
# Points are moved if they have fewer coordinates than this many per row, as in `fast_sparse`.
_MOVED = 0.5


def fit_multi_output(
    model: MultiOutputGP,
    data: Dataset,
    *,
    goal: Goal,
    n_candidates: int | None,
    rounds: int,
    iterations: int,
    gain: float,
    inclusion_steps: int,
    context: TrainingContext,
) -> FitResult[MultiOutputGP]:
    """Fit the processes jointly; tolerances are nats per observed target.

    1. Hyper-parameters, mixing and noise from several starts: by the exact evidence of few targets,
       else by the bound with a pool of candidates on some of the rows.
    2. The pool doubles, with hyper-parameters optimised at each size, until that gains too little.
    3. Backward elimination over the candidates of all processes at once, down to the goal: a point
       stays where it adds most, whatever its process.
    4. L-BFGS on all parameters and on the locations of the selected points.
    5. Steps 3 and 4 again on these points and fresh candidates, until their number settles.

    A budget of operations limits the pool and the iterations, as for one process.

    Args:
        n_candidates: largest number of candidates of all processes together.
        iterations: largest number of iterations of the last L-BFGS run.
        gain: the last run ends once twenty iterations together gain fewer nats per target.
        inclusion_steps: largest number of subsets drawn to learn inclusion probabilities.
    """
    warn_not_sharded(context.process_group, "models of several outputs use all rows at once")
    rows = data.require_dataset("`MultiOutputGP`")
    steps = _Steps.of(model, rows, context, most=n_candidates or _MOST)
    start = steps.best_start()
    current = steps.grown(start, goal)
    limit = goal.limit if isinstance(goal, Tolerance) else goal
    frontiers, reference = [steps.frontier(current)], -inf
    if isinstance(limit, MaxPoints):
        reference = frontiers[0].bounds.max().item()
        M = Tolerance().size(frontiers[0], reference=reference)
        if limit.points < M:
            pruned = steps.pruned(current, frontiers[0], M)
            current = steps.best_of_size(pruned, start, limit.points)
    fits: list[tuple[MultiOutputGP, float]] = []
    for _ in range(rounds):
        pool = steps.with_fresh(current, max(64, current.K // 2))
        frontiers.append(steps.frontier(pool))
        reference = max(reference, frontiers[-1].bounds.max().item())
        M = steps.limited(goal, reference).size(frontiers[-1], reference=reference)
        M = min(M, frontiers[-1].at_most(steps.most))
        current = steps.pruned(pool, frontiers[-1], M)
        elbo = frontiers[-1].bounds[M].item()
        context.notify_once(Progress.of(current, "selection", 1, 1, elbo))
        if fits and abs(M - fits[-1][0].K) <= 0.03 * M and not isinstance(limit, MaxPoints):
            break
        current, elbo = steps.optimise(current, rows, stop=Stop(1e-4 * steps.count, 20, _MOVE))
        reference = max(reference, elbo)
        fits.append((current, elbo))
    best = steps.limited(goal, reference).best([(m.K, elbo) for m, elbo in fits], N=steps.count)
    stop = Stop(gain * steps.count, 20, iterations)
    current, elbo = steps.optimise(fits[best][0], rows, stop=stop)
    frontiers.append(Frontier(*_one_size(current.K, elbo, rows), N=steps.count))
    pool = steps.with_fresh(current, max(32, current.K // 4))
    affordable = int(
        _INCLUSION * steps.budget.work_limit / (2.0 * max(pool.K, 1) ** 2 * max(current.K, 1))
    )
    selection = learn_inclusion(
        pool.subset_statistics(rows),
        steps.frontier(pool),
        steps.own(current, pool),
        goal=steps.limited(goal, reference),
        generator=context.generator,
        max_steps=max(1, min(inclusion_steps, affordable)),
    )
    sizes = [len(Z) for Z in pool.candidate_sets]
    return FitResult(
        model=current,
        posterior=current.posterior(rows),
        selections=_split(selection, sizes),
        candidates=tuple(Z.detach() for Z in pool.candidate_sets),
        elbo=elbo,
        elbo_gap=max(reference - elbo, 0.0),
        evidence=current.evidence(rows, max_rows=_EXACT),
        frontier=SizeFrontier.of(*frontiers, N=steps.count),
    )


@final
@dataclass(frozen=True, slots=True)
class _Steps:
    """The steps of the schedule on fixed rows."""

    model: MultiOutputGP
    data: Dataset
    context: TrainingContext
    most: int
    order: Tensor
    sources: tuple[Tensor, ...]
    """Locations that fresh candidates of each process are drawn from."""
    count: float
    """Number of observed targets, each times the weight of its row."""
    budget: Budget

    @classmethod
    def of(
        cls, model: MultiOutputGP, data: Dataset, context: TrainingContext, *, most: int
    ) -> "_Steps":
        observed = ~torch.isnan(data.Y)
        count = float(data.weighted(observed.to(data.Y)).sum())
        order = torch.randperm(data.N, generator=context.generator, device=data.device)
        # Rows of targets that few rows have come first: samples of rows need them too.
        rarest = torch.where(observed, observed.sum(0), data.N).amin(1)
        rank = torch.arange(1, data.N + 1, device=data.device)
        order = order[(rank * rarest[order]).argsort(stable=True)]
        # A process is seen by the rows whose targets depend on it.
        uses = model.mixing_learnt | (model.mixing.detach() != 0)
        seen = (observed.to(data.Y) @ uses.to(data.Y)) > 0
        shuffled = [order[seen[order, q]][:_ROWS] for q in range(model.Q)]
        given = [Z.detach().clone() for Z in model.candidate_sets]
        sources = tuple(
            Z if len(Z) else data.X[own] for Z, own in zip(given, shuffled, strict=True)
        )
        return cls(model, data, context, most, order, sources, count, Budget(data.device))

    def part(self, count: int) -> Dataset:
        """Return a random subset of the rows, the same one for every call."""
        return self.data if count >= self.data.N else self.data.part(self.order[:count])

    def best_start(self) -> MultiOutputGP:
        """Return the hyper-parameters of the best of several starts, by successive halving.

        They are compared on the CPU: steps on few rows take longer to launch on a GPU than to run.
        """
        cpu = torch.device("cpu")
        if self.data.device != cpu:
            few = replace(
                self,
                model=copy_module(self.model).to(cpu),
                data=self.part(_START_ROWS).to(cpu),
                order=self.order.cpu(),
                sources=tuple(source.cpu() for source in self.sources),
            )
            return few.best_start().to(self.data.device)
        part, iterations = self.part(_START_ROWS), _START
        starts = starting_points(self.model, part)
        results = [(start, -inf) for start in starts]
        while len(results) > 1:
            results = [self._shortly(model, part, iterations) for model, _ in results]
            results.sort(key=lambda result: -result[1])
            results, iterations = results[: (len(results) + 2) // 3], 2 * iterations
        model = results[0][0]
        self.context.notify_once(Progress.of(model, "initialisation", 1, 1, -inf))
        return model

    def _shortly(
        self, model: MultiOutputGP, part: Dataset, iterations: int
    ) -> tuple[MultiOutputGP, float]:
        stop = Stop(1e-3 * part.observations, 10, iterations)
        try:
            return self.hyperparameters(model, part, min(_FIRST, self.most), stop=stop)
        except TrainingError:
            return model, -inf

    def hyperparameters(
        self, model: MultiOutputGP, rows: Dataset, K: int, *, stop: Stop
    ) -> tuple[MultiOutputGP, float]:
        """Return a copy with optimised hyper-parameters, and its objective in nats.

        The objective is the exact evidence of few targets, else the bound with a fixed pool of K
        candidates; priors of hyper-parameters are included.
        """
        dense = not model.has_sites and int((~torch.isnan(rows.Y)).sum()) <= _DENSE
        pool = self.pool(model, 0 if dense else K)
        for Z in pool.candidate_sets:
            Z.requires_grad_(False)
        objective = pool.dense_bound(rows) if dense else pool.chunked_bound(rows)
        value = self._maximise(pool, rows, objective, stop)
        for Z in pool.candidate_sets:
            Z.requires_grad_(True)
        with torch.no_grad():
            return pool, value + log_prior(pool).item()

    def grown(self, model: MultiOutputGP, goal: Goal) -> MultiOutputGP:
        """Return a pool of candidates that doubled until that gained too little."""
        tolerance = goal.nats if isinstance(goal, Tolerance) else 0.01
        rows, K, bound = self.part(_ROWS), min(_FIRST, self.most), -inf
        share = self.count * rows.N / self.data.N
        largest = sum(map(len, self.sources))
        while True:
            stop = Stop(0.1 * tolerance * share, 10, _POOL)
            model, value = self.hyperparameters(model, rows, K, stop=stop)
            if value - bound < tolerance * share or min(self.most, largest) <= K:
                return self.pool(model, K)
            K, bound = min(2 * K, self.most), value

    def pool(self, model: MultiOutputGP, K: int) -> MultiOutputGP:
        """Return the model with K candidates, equally many of each process where it needs them."""
        nothing = [Z.detach()[:0] for Z in model.candidate_sets]
        return self._extended(model.with_candidates(nothing), [K // model.Q] * model.Q)

    def with_fresh(self, model: MultiOutputGP, count: int) -> MultiOutputGP:
        """Return the model with more candidates, equally many of each process.

        They are at least eight of each, but at most `most` of all processes with those it has.
        """
        each = min(max(count // model.Q, 8), max(self.most - model.K, 0) // model.Q)
        return self._extended(model, [each] * model.Q)

    def pruned(self, pool: MultiOutputGP, frontier: Frontier, M: int) -> MultiOutputGP:
        """Return a pool with the M points of its frontier."""
        return pool.prune(frontier.masks[M].split([len(Z) for Z in pool.candidate_sets]))

    def best_of_size(self, large: MultiOutputGP, start: MultiOutputGP, M: int) -> MultiOutputGP:
        """Return the best model with M points, fewer than the processes need.

        Points that are removed at once would all come from processes whose first few points
        explain little, at hyper-parameters that no longer fit. So they are removed in steps,
        between which hyper-parameters adapt. A start with equally many points of each process
        competes.
        """
        stop, elbo = Stop(1e-3 * self.count, 10, _START), -inf
        while large.K > M:
            size = max(M, int(_SHRINK * large.K))
            large = self.pruned(large, self.frontier(large), size)
            large, elbo = self.optimise(large, self.data, stop=stop)
        equal = self.pool(start, M)
        equal, other = self.optimise(equal, self.data, stop=Stop(stop.gain, 10, _MOVE))
        return large if elbo > other else equal

    def _extended(self, model: MultiOutputGP, counts: list[int]) -> MultiOutputGP:
        candidates = []
        parts = zip(model.kernels, model.candidate_sets, self.sources, counts, strict=True)
        for kernel, Z, source, count in parts:
            own = Z.detach()
            # On the CPU: every row that is selected would wait for a GPU.
            indices = greedy_variance(
                copy_module(kernel).cpu(), source.cpu(), count, given=own.cpu()
            )
            candidates.append(torch.cat([own, source[indices.to(source.device)]]))
        return model.with_candidates(candidates)

    def own(self, model: MultiOutputGP, pool: MultiOutputGP) -> Bool[Tensor, " K"]:
        """Return which candidates of a pool are points of the model, which come first."""
        pairs = zip(model.candidate_sets, pool.candidate_sets, strict=True)
        masks = [torch.arange(len(all_), device=all_.device) < len(Z) for Z, all_ in pairs]
        return torch.cat(masks)

    def frontier(self, pool: MultiOutputGP) -> Frontier:
        """Return the frontier of one backward elimination over all processes."""
        with threads_for(12.0 * pool.K**3):
            return elimination_frontier(pool.subset_statistics(self.data))

    def limited(self, goal: Goal, reference: float) -> Goal:
        """Return the goal for data on which the largest model gains little."""
        if not isinstance(goal, Tolerance):
            return goal
        return goal.within(reference - self._constant(), N=self.count)

    @torch.no_grad()
    def _constant(self) -> float:
        """Return the log-likelihood of the best constant of each target, in nats."""
        data, model = self.data, observation_model(self.model.likelihood)
        if not isinstance(model, TargetObservations):
            seen = data.weighted((~torch.isnan(data.Y)).to(data.Y)).sum(0)
            level = (2 * pi * data.mean_square().clamp_min(1e-300)).log() + 1
            return -0.5 * float((seen * level).sum())
        total = 0.0
        for p, part in enumerate(model.parts):
            rows = data.part((~torch.isnan(data.Y[:, p])).nonzero().flatten())
            own = replace(rows, Y=rows.Y[:, p : p + 1])
            level = initialization.best_level(part.likelihood, own).expand(own.Y.shape)
            nats = part.expected_log_prob(own.Y, level, torch.zeros_like(level))
            total += float(own.weighted(nats).sum())
        return total

    def optimise(
        self, model: MultiOutputGP, rows: Dataset, *, stop: Stop
    ) -> tuple[MultiOutputGP, float]:
        """Return a copy optimised by L-BFGS, and its ELBO; the model itself if it is no better."""
        moved = copy_module(model)
        for Z in moved.candidate_sets:
            Z.requires_grad_(moved.K * rows.D <= _MOVED * rows.N)
        before = model.fixed_bound(rows)
        try:
            self._maximise(moved, rows, moved.chunked_bound(rows), stop)
        except TrainingError:
            return model, before
        for Z in moved.candidate_sets:
            Z.requires_grad_(True)
        after = moved.fixed_bound(rows)
        with torch.no_grad():
            gained = after + log_prior(moved).item() - before - log_prior(model).item()
        return (moved, after) if gained > 0 else (model, before)

    def cost(self, rows: Dataset, K: int) -> float:
        """Return the operations of the bound with K candidates and its gradient."""
        # Sites take about three updates of q(u) with two passes each.
        updates = 4.0 if self.model.has_sites else 1.0
        return updates * (5.0 * rows.N * K**2 + 4.0 * K**3)

    def _maximise(
        self, model: MultiOutputGP, rows: Dataset, objective: Callable[[], Scalar], stop: Stop
    ) -> float:
        initialization.lift_noise(model, rows)
        cost = max(self.cost(rows, model.K or int((~torch.isnan(rows.Y)).sum())), 1.0)
        affordable = max(_LEAST, int(_SHARE * self.budget.remaining / cost))
        stop = Stop(stop.gain, stop.window, min(stop.iterations, affordable))
        count = rows.N if rows.N < self.data.N else None
        with threads_for(10.0 * model.K**3):
            maximum = maximise_elbo(
                model,
                rows.X,
                objective=objective,
                stop=stop,
                on_step=lambda step, value: self.context.notify(
                    Progress.of(model, "optimisation", step, stop.iterations, value, rows=count)
                ),
                checkpoint_log=self.context.checkpoint_log,
            )
        self.budget.spend(1.15 * maximum.iterations * cost)
        return maximum.value


def starting_points(model: MultiOutputGP, data: Dataset) -> list[MultiOutputGP]:
    """Return the model as given, and variants of its lengthscales, noise and mixing.

    A kernel on D columns has lengthscales of √D or 1 standard deviations, and a third of one with
    few columns. If the whole mixing matrix is learnt, its columns are the principal components of
    the targets instead of those given, and lengthscales are equal or decrease from one process to
    the next.
    """
    learnt = bool(model.mixing_learnt.all()) and model.P > 1
    model, data = _with_offsets(model, data)
    starts = [] if learnt else [model]
    variance = data.mean_square().clamp_min(1e-12)
    # Widths of boxes have no lengthscales.
    data = _without_widths(model, data)
    # Factors of the lengthscales, of those of the next process, and shares of noise.
    root, decay = sqrt(data.D), 0.5 if learnt else 1.0
    variants = [(root, 1.0, 0.1), (1.0, decay, 0.01)]
    if data.D > 1 or learnt:
        variants.append((root, decay, 0.1))
    if data.D <= 3:
        variants.append((0.3, decay, 0.01))
    for factor, next_factor, noise in variants:
        start = copy_module(model)
        parts = [
            (part, max(next_factor**q, 0.1))
            for q, kernel in enumerate(start.kernels)
            for part in initialization.trainable_lengthscales(kernel)
        ]
        # Terms of a sum keep the ratios of their lengthscales: equal terms would stay equal.
        ratios = initialization.relative_lengthscales([part for part, _ in parts])
        for (part, decayed), ratio in zip(parts, ratios, strict=True):
            lengthscale = factor * decayed * ratio * initialization.column_spread(part, data)
            initialization.set_within(part, "lengthscale", lengthscale)
        _set_noise(start, (noise * variance).clamp_min(1e-5))
        if learnt:
            with torch.no_grad():
                start.raw_mixing.copy_(principal_mixing(data, model.Q).flatten())
        starts.append(start)
    return starts


def _with_offsets(model: MultiOutputGP, data: Dataset) -> tuple[MultiOutputGP, Dataset]:
    """Return the model with initial offsets, and rough values of the latent functions as targets.

    Models of Gaussian noise have no offsets, and are returned as they are.
    """
    observations = observation_model(model.likelihood)
    if not isinstance(observations, TargetObservations):
        return model, data
    latent = observations.initial_latent(data.Y)
    offset = latent.nanmean(0)
    moved = copy_module(model)
    assert isinstance(moved.likelihood, TargetLikelihoods)
    with torch.no_grad():
        moved.likelihood.offset.copy_(offset)
    return moved, replace(data, Y=latent - offset)


def _set_noise(model: MultiOutputGP, noise: Tensor) -> None:
    """Set the noise variance of each target that has one."""
    if not isinstance(model.likelihood, TargetLikelihoods):
        initialization.set_noise(model.likelihood, noise)
        return
    for part, variance in zip(model.likelihood.parts, noise, strict=True):
        initialization.set_noise(part, variance)


def _without_widths(model: MultiOutputGP, data: Dataset) -> Dataset:
    """Return the rows with the columns that the kernel of the function has."""
    kernel = model.kernels[0]
    if not isinstance(kernel, BoxKernel):
        return data
    centres = [d for d in range(data.D) if d not in kernel.widths]
    return replace(data, X=data.X[:, centres])


def principal_mixing(data: Dataset, Q: int) -> Tensor:
    """Return the first Q principal components of the targets `[P Q]`, scaled to their variances.

    Missing targets count as their mean, zero. Components beyond the rank are small unit vectors.
    """
    Y = data.Y.nan_to_num(0.0)
    _, S, Vh = torch.linalg.svd(Y, full_matrices=False)
    rank = min(Q, len(S))
    W = 0.1 * torch.eye(data.P, dtype=Y.dtype, device=Y.device)[:, torch.arange(Q) % data.P]
    W[:, :rank] = Vh[:rank].mT * S[:rank].clamp_min(1e-3 * S[0]) / sqrt(data.N)
    return W


def _one_size(K: int, elbo: float, data: Dataset) -> tuple[Tensor, Tensor]:
    """Return bounds and masks of a frontier of which the last size is known."""
    bounds = torch.full((K + 1,), -inf, dtype=data.dtype, device=data.device)
    bounds[K] = elbo
    return bounds, torch.ones(K + 1, K, dtype=torch.bool, device=data.device).tril(-1)


def _split(selection: Selection, sizes: list[int]) -> tuple[Selection, ...]:
    """Return the selection of each process; they share α, trace and frontier."""
    parts = zip(selection.inclusion.split(sizes), selection.mask.split(sizes), strict=True)
    return tuple(
        Selection(inclusion, mask, selection.trace, selection.alpha, selection.frontier)
        for inclusion, mask in parts
    )
