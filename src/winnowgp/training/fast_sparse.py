"""The fast schedule of models with one candidate set: `SparseGP` and `VariationalGP`."""

from copy import deepcopy
from math import inf
from typing import Generic, final

import torch
from torch import Tensor

from winnowgp.data import Dataset, Source
from winnowgp.data.dataset import sampled_rows
from winnowgp.data.distributed import ProcessGroup
from winnowgp.errors import TrainingError
from winnowgp.models import SparseGP, greedy_variance
from winnowgp.models.base import InducingModel, Model
from winnowgp.models.likelihoods import observation_model
from winnowgp.models.sgpr import LEAST_NOISE
from winnowgp.selection import Frontier, SubsetStatistics, elimination_frontier
from winnowgp.training import initialization
from winnowgp.training.callbacks import Progress
from winnowgp.training.goals import Goal, MaxPoints, learn_inclusion
from winnowgp.training.initialization import starting_points
from winnowgp.training.lbfgs import Stop, maximise_elbo
from winnowgp.training.schedules import FitResult, TrainingContext, warn_not_sharded
from winnowgp.typing import Mask

# Largest number of rows that are sampled from a source which is not in memory. A wide table is
# limited to `NUMBERS` numbers, but to at least `_FEWEST` rows, which the schedule uses.
SAMPLE, NUMBERS, _FEWEST = 2**18, 2**25, 4096
# A source with at most this many rows, all of them in the sample, is not read again in each pass.
HELD = SAMPLE
# Floating-point operations of one L-BFGS run before its iterations are limited, to no fewer than
# `_LEAST`: minutes, not hours, on a few cores and on a modest GPU.
_WORK = {"cpu": 2.5e12, "cuda": 1e14}

_LEAST = 20


def fit_sparse(
    model: Model,
    data: Source,
    *,
    goal: Goal,
    n_candidates: int,
    rounds: int,
    iterations: int,
    gain: float,
    selection_rows: int,
    inclusion_steps: int,
    context: TrainingContext,
) -> FitResult[Model]:
    """Fit a model with one candidate set and observed inputs; see `FastSchedule`.

    Args:
        iterations: largest number of iterations of one L-BFGS run.
        gain: a run ends once twenty iterations together gain fewer nats per observation.
        selection_rows: number of rows that candidates are drawn from and starts compared on.
        inclusion_steps: largest number of subsets drawn to learn inclusion probabilities.
    """
    _warn_not_sharded(model, context)
    steps = FastSteps(model, data, rows=selection_rows, context=context)
    if isinstance(goal, MaxPoints):
        stop = Stop(gain * steps.data.observations, 20, iterations)
        fitted, reference = _select_count(steps, goal.points, rounds, stop)
    else:
        fitted, reference = _select_by_goal(steps, goal, n_candidates, rounds)
    data = steps.data
    pool = steps.with_fresh(fitted, max(32, fitted.K // 4))
    statistics = pool.subset_statistics(data)
    selection = learn_inclusion(
        statistics,
        steps.frontier(statistics),
        torch.arange(pool.K, device=pool.candidates.device) < fitted.K,
        goal=goal,
        generator=context.generator,
        max_steps=inclusion_steps,
    )
    elbo, final_model = fitted.fixed_bound(data), fitted.with_best_q(data)
    return FitResult(
        model=final_model,
        posterior=final_model.posterior(data),
        selections=(selection,),
        candidates=(pool.candidates.detach(),),
        elbo=elbo,
        upper_bound=fitted.upper_bound(data),
        elbo_gap=max(reference - elbo, 0.0),
    )


def _warn_not_sharded(model: InducingModel, context: TrainingContext) -> None:
    if not isinstance(model, SparseGP):
        # Sites are kept for each row, and found by sweeps in which rows see those before them.
        warn_not_sharded(
            context.process_group, "the fast schedule shares rows for Gaussian noise only"
        )


def _select_by_goal(
    steps: "FastSteps[Model]", goal: Goal, n_candidates: int, rounds: int
) -> tuple[Model, float]:
    """Select as few points as the goal allows, in rounds of selection and optimisation."""
    data, size = steps.data, -1
    current = steps.initialise()
    pool = steps.with_fresh(current, n_candidates)
    reference, fits = -inf, []
    for index in range(rounds):
        frontier = steps.frontier(pool.subset_statistics(data))
        reference = max(reference, frontier.bounds.max().item())
        M = min(goal.size(frontier, reference=reference), steps.most)
        settled = index > 0 and abs(M - size) <= 0.03 * size
        last, size = settled or index == rounds - 1, M
        current = steps.select(pool, frontier.masks[M], frontier.bounds[M].item())
        if index == 0 and 4 * n_candidates < data.N:
            part = steps.part(data.N // 4)
            stop = Stop(1e-3 * part.observations, 20, 60)
            current, _ = steps.optimise(current, stop=stop, on=part)
        gain, most = (3e-4, 200) if last else (1e-3, 100)
        current, elbo = steps.optimise(current, stop=Stop(gain * data.observations, 20, most))
        fits.append((current, elbo))
        reference = max(reference, elbo)
        if last:
            break
        pool = steps.with_fresh(current, max(32, current.K // 4))
    # The ELBO of all candidates counts as a reference that is too large to be selected.
    known = [(model.K, elbo) for model, elbo in fits]
    index = goal.best([*known, (data.N + 1, reference)], N=data.observations)
    best = fits[index] if index < len(fits) else max(fits, key=lambda fit: fit[1])
    return best[0], reference


def _select_count(
    steps: "FastSteps[Model]", M: int, rounds: int, stop: Stop
) -> tuple[Model, float]:
    """Select M points: compare starts, optimise the best, exchange idle points."""
    data, M = steps.data, min(M, steps.most)
    shorter = Stop(stop.gain, stop.window, int(0.2 * stop.iterations))
    whole = data.N * M <= 250_000
    part = data if whole else steps.part(max(2000, 4 * M, data.N // 8))
    start = steps.successive_halving(steps.starts(M), on=part, iterations=50)
    best, elbo = steps.optimise(start, stop=stop)
    for _ in range(1, rounds):
        pool = steps.with_fresh(best, max(50, M // 2))
        frontier = steps.frontier(pool.subset_statistics(data))
        size = frontier.at_most(M)
        if frontier.bounds[size].item() < elbo + 1e-5 * data.observations:
            break
        exchanged = steps.select(pool, frontier.masks[size], frontier.bounds[size].item())
        better, new_elbo = steps.optimise(exchanged, stop=shorter)
        if new_elbo < elbo + 1e-4 * data.observations:
            break
        best, elbo = better, new_elbo
    return best, elbo


@final
class FastSteps(Generic[Model]):
    """The steps of the fast schedule on a fixed random order of the rows.

    Steps that need few rows use rows in memory: all of them, or a random sample of a source that is
    not in memory. A source that is no larger than the sample is read once.

    Args:
        model: its own candidates, if it has any, are the pool that fresh candidates are drawn from;
            otherwise the rows are.
        rows: number of rows that candidates are drawn from and starts compared on.
    """

    def __init__(
        self,
        model: Model,
        data: Source,
        *,
        rows: int,
        context: TrainingContext,
    ) -> None:
        self.model = model
        self._rows, self._context = rows, context
        self.sample, self._order = _sampled(data, context.generator)
        self.data = self.sample if _is_complete(data, self.sample) else data
        self._given = model.candidates.detach().clone()
        self._latents = observation_model(model.likelihood).num_latents(data.P)

    @property
    def _process_group(self) -> ProcessGroup:
        return self._context.process_group

    @property
    def most(self) -> int:
        """Largest number of points: the number of given candidates, or of rows."""
        return len(self._given) or self.data.N

    def part(self, count: int) -> Dataset:
        """Return a random subset of the rows, the same one for every call."""
        return self.sample.part(self._order[:count])

    def initialise(self, stages: tuple[int, ...] = initialization.STAGES) -> Model:
        """Return a model without points, its hyper-parameters from the evidence of a few rows."""
        if not isinstance(self.model, SparseGP):
            # Each value takes several factorisations for each latent function.
            share = 0.4 * self._latents ** (-1 / 3)
            stages = tuple(round(share * count) for count in stages)
        initial = initialization.initialise_hyperparameters(
            self.model,
            self.sample,
            order=self._order,
            stages=stages,
            checkpoint_log=self._context.checkpoint_log,
        )
        self._context.notify_once(Progress.of(initial, "initialisation", 1, 1, -inf))
        return initial

    def with_fresh(self, model: Model, count: int) -> Model:
        """Return the model with up to `count` more candidates of greatest conditional variance."""
        source = self._given if len(self._given) else self.part(max(self._rows, 2 * count)).X
        greedy = greedy_variance(model.kernel, source, count, given=model.candidates.detach())
        indices = torch.tensor(
            self._process_group.broadcast_object(greedy.tolist()), dtype=torch.long
        ).to(greedy.device)
        return model.with_candidates(torch.cat([model.candidates.detach(), source[indices]]))

    def frontier(self, statistics: SubsetStatistics) -> Frontier:
        """Return the frontier of one backward elimination, that of the first process.

        Among points of nearly equal gain another machine may remove another one.
        """
        frontier = elimination_frontier(statistics)
        shared = self._process_group.broadcast(frontier.bounds, frontier.masks)
        return Frontier(*shared, N=frontier.N)

    def select(self, pool: Model, mask: Mask, elbo: float) -> Model:
        """Return the pruned pool, whose ELBO is known from the statistics."""
        pruned = pool.prune(mask)
        self._context.notify_once(Progress.of(pruned, "selection", 1, 1, elbo))
        return pruned

    def optimise(
        self, model: Model, *, stop: Stop, on: Source | None = None
    ) -> tuple[Model, float]:
        """Return a copy optimised by L-BFGS, and its ELBO in nats on the rows it was optimised on.

        The objective includes the jitter of `bounds.chunked`; the ELBO returned does not. The
        model itself is returned if the copy is no better.
        """
        moved, rows = deepcopy(model), self.data if on is None else on
        dataset = rows.as_dataset()
        dataset = self.sample if dataset is None else dataset
        _lift_noise(moved, dataset)
        work = _WORK.get(moved.candidates.device.type, _WORK["cpu"])
        affordable = int(work / max(model.chunked_cost(rows), 1.0))
        stop = Stop(stop.gain, stop.window, min(stop.iterations, max(_LEAST, affordable)))
        maximise_elbo(
            moved,
            dataset.X,
            objective=moved.chunked_bound(rows),
            stop=stop,
            on_step=lambda step, value: self._context.notify(
                Progress.of(moved, "optimisation", step, stop.iterations, value)
            ),
            checkpoint_log=self._context.checkpoint_log,
        )
        after = self._process_group.broadcast_object(moved.fixed_bound(rows))
        before = self._process_group.broadcast_object(model.fixed_bound(rows))
        return (moved, after) if after > before else (model, before)

    def starts(self, M: int) -> list[Model]:
        """Return initial models with M points, the most reliable first; more where M is small.

        M points cannot represent the exact posterior: their optimum is closer to a smoother
        function with more noise.
        """
        initial = self.initialise(initialization.STAGES if M > 64 else initialization.STAGES[:2])
        smooth = starting_points(self.model, self.sample)[1]
        soft = _scaled(initial, variance=2.0, lengthscale=1.5, noise=2.0)
        starts = [self._eliminated(soft, M)]
        if M > 32:
            starts.append(self._eliminated(self._with_fixed_locations(initial, M), M))
        if M <= 64:
            starts += [
                self._eliminated(smooth, M),
                self._centres(smooth, M),
                self._centres(soft, M),
            ]
        if M <= 16:
            smoother = _scaled(smooth, variance=1.0, lengthscale=2.0, noise=3.0)
            starts += [self._centres(smooth, M), self._centres(smoother, M)]
            starts += [self._random(smooth, M, first=True), self._random(soft, M, first=False)]
        return starts

    def successive_halving(self, starts: list[Model], *, on: Source, iterations: int) -> Model:
        """Return the best start after rounds that each drop the worse half."""
        while len(starts) > 1:
            results = [self._shortly(start, on, iterations) for start in starts]
            results.sort(key=lambda result: -result[1])
            count = (len(starts) + 1) // 2 if len(starts) > 2 else 1
            starts, iterations = [model for model, _ in results[:count]], 2 * iterations
        return starts[0]

    def _shortly(self, start: Model, on: Source, iterations: int) -> tuple[Model, float]:
        try:
            return self.optimise(start, stop=Stop(3e-4 * on.observations, 20, iterations), on=on)
        except TrainingError:
            return start, -inf

    def _eliminated(self, model: Model, M: int) -> Model:
        """Return M of the greedy candidates, by backward elimination on a subset of the rows."""
        pool = self.with_fresh(model, max(200, 2 * M))
        if pool.K <= M:
            return pool
        frontier = self.frontier(pool.subset_statistics(self.part(self._rows)))
        return pool.prune(frontier.masks[M])

    def _with_fixed_locations(self, model: Model, M: int) -> Model:
        """Return a model without points, its hyper-parameters optimised with M fixed points."""
        pool, part = self.with_fresh(model, M), self.part(self._rows)
        learnt = pool.candidates.requires_grad
        pool.candidates.requires_grad_(False)
        optimised, _ = self.optimise(pool, stop=Stop(1e-3 * part.observations, 10, 40), on=part)
        optimised.candidates.requires_grad_(learnt)
        return optimised.with_candidates(self.sample.X[:0])

    def _centres(self, model: Model, M: int) -> Model:
        """Return the model with points at M cluster centres, if locations may be anywhere."""
        if not model.candidates.requires_grad:
            return self._random(model, M, first=True)
        source = self._given if len(self._given) else self.part(self._rows).X
        if len(source.unique(dim=0)) <= M:
            return model.with_candidates(source[:M])
        (centres,) = self._process_group.broadcast(
            initialization.cluster_centres(
                source, M, generator=self._context.generator, init="random", max_iter=20
            )
        )
        return model.with_candidates(centres)

    def _random(self, model: Model, M: int, *, first: bool) -> Model:
        """Return the model with points at random rows, from either end of the fixed order."""
        source = self._given if len(self._given) else self.sample.X[self._order]
        return model.with_candidates(source[:M] if first else source[-M:])


def _sampled(data: Source, generator: torch.Generator) -> tuple[Dataset, Tensor]:
    """Return rows in memory, and a random order of them."""
    device = generator.device
    dataset = data.as_dataset()
    if dataset is not None:
        return dataset, torch.randperm(data.N, generator=generator, device=device)
    most = min(SAMPLE, max(_FEWEST, NUMBERS // (data.D + data.P)))
    if most >= data.N:
        sample = data.part(torch.arange(data.N)).to(device)
        return sample, torch.randperm(data.N, generator=generator, device=device)
    rows = sampled_rows(data.N, most, generator)
    sample = data.part(rows.cpu()).to(device)
    return sample, torch.arange(sample.N, device=device)


def _is_complete(data: Source, sample: Dataset) -> bool:
    """Return whether the sample contains all rows, and no other process has any."""
    return sample.N == data.N <= HELD and len(data.shards()) == data.process_group.world_size == 1


def _lift_noise(model: InducingModel, rows: Dataset) -> None:
    """Reset noise that has reached its lower constraint, where its gradient vanishes."""
    least = max(1e-4 * float(rows.Y.square().mean()), 10 * LEAST_NOISE)
    noise = initialization.noise_of(model.likelihood)
    if noise is not None and noise.value.item() < least:
        initialization.set_noise(model.likelihood, rows.X.new_tensor(least))


def _scaled(model: Model, *, variance: float, lengthscale: float, noise: float) -> Model:
    """Return a copy with trainable kernel variances, lengthscales and noise multiplied."""
    scaled = deepcopy(model)
    for kernel in initialization.trainable_variances(scaled.kernel):
        initialization.set_within(kernel, "outputscale", variance * kernel.outputscale.detach())
    for kernel in initialization.trainable_lengthscales(scaled.kernel):
        initialization.set_within(kernel, "lengthscale", lengthscale * kernel.lengthscale.detach())
    learnt = initialization.noise_of(scaled.likelihood)
    if learnt is not None:
        initialization.set_noise(scaled.likelihood, noise * learnt.value)
    return scaled
