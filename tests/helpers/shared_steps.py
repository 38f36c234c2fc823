"""Steps that several processes take together."""

from typing import Any

import numpy as np
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood, Likelihood
from torch import Tensor

from helpers.short_fits import short_fits
from winnowgp.bounds.row_blocks import RowBlocks
from winnowgp.data import ArraySource, Dataset, shard, standardise
from winnowgp.data.distributed import ProcessGroup
from winnowgp.data.sharding import ShardedSource
from winnowgp.errors import InputError, NotPositiveDefiniteError, NotSaveableError
from winnowgp.estimators import SparseGPRegressor
from winnowgp.models import DeepGP, DeepLayer, SparseGP
from winnowgp.models.stationary import StationaryChunks
from winnowgp.selection import Frontier
from winnowgp.training import (
    Checkpoint,
    DeepTraining,
    FastSchedule,
    MaxPoints,
    PaperSchedule,
    Schedule,
    Tolerance,
    fast_steps,
    fit,
)
from winnowgp.training.adam import Adam, Minibatches
from winnowgp.training.checkpoint import CheckpointLog, check_same, open_checkpoint
from winnowgp.training.fast_steps import FastSteps
from winnowgp.training.lbfgs import Stop
from winnowgp.training.schedules import TrainingContext


def rows(N: int = 80) -> Dataset:
    rng = np.random.default_rng(11)
    X = rng.uniform(0, 4, size=(N, 2))
    y = np.sin(2 * X[:, 0]) + X[:, 1] + 0.2 * rng.normal(size=N)
    return Dataset.of(torch.tensor(X), torch.tensor(y))


class Odd(Exception):
    """An error that cannot be unpickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def broadcasts(process_group: ProcessGroup) -> dict[str, Any]:
    """Return what the first process broadcasts to all."""
    own = torch.tensor([0.1 + process_group.rank, 1.0], dtype=torch.float64)
    mask = torch.tensor([[True, process_group.is_first]])
    led = process_group.broadcast(own, mask, torch.tensor(3.0 + process_group.rank))
    total = process_group.all_reduce(own, torch.tensor([1.0 + process_group.rank]))

    def fails() -> int:
        raise Odd("no", "luck")

    try:
        error = f"{process_group.broadcast_result(fails)}"
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {
        "led": [each.tolist() for each in led],
        "dtypes": [str(each.dtype) for each in (*led, *total)],
        "decided": process_group.broadcast_result(lambda: None),
        "error": error,
    }


def one_fails(process_group: ProcessGroup) -> dict[str, Any]:
    """The second process cannot compute its part of the third minibatch."""
    data = rows(40)
    parts = Minibatches(data, 8, torch.Generator().manual_seed(0), process_group=process_group)
    slope = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    calls, values = 0, []

    def bound() -> Tensor:
        nonlocal calls
        calls += 1
        own = parts.next()
        if calls == 3 and process_group.rank == process_group.world_size - 1:
            raise NotPositiveDefiniteError("rows of this process only")
        return -(own.Y[:, 0] - own.X @ slope).square().mean()

    Adam(6).maximise(
        lambda: parts.mean_over_processes(bound),
        [([slope], 0.1)],
        scale=1.0,
        on_step=lambda step, value: values.append(value),
        process_group=process_group,
    )
    return {"calls": calls, "values": values, "slope": slope.tolist()}


def uneven(process_group: ProcessGroup) -> list[list[float]]:
    """Return the mean of values that are far larger than it."""
    parts = Minibatches(rows(40), 8, torch.Generator().manual_seed(0), process_group=process_group)
    some = torch.linspace(0.1, 1, 50, dtype=torch.float64)
    own = (0.1 - 3e5 * some if process_group.rank else 3e5 * some).requires_grad_()
    found = parts.mean_over_processes(lambda: own / 3, own.shape)
    found.sum().backward()
    assert own.grad is not None
    return [found.tolist(), own.grad.tolist()]


def failed_scores(process_group: ProcessGroup) -> list[float]:
    """Return scores that the last process cannot compute at first."""
    parts = Minibatches(rows(40), 8, torch.Generator().manual_seed(0), process_group=process_group)

    def scores() -> Tensor:
        if process_group.rank == process_group.world_size - 1:
            raise NotPositiveDefiniteError("rows of this process only")
        return torch.ones(3, dtype=torch.float64)

    try:
        return parts.mean_over_processes(scores, (3,)).tolist()
    except NotPositiveDefiniteError:
        return parts.mean_over_processes(
            lambda: torch.full((2,), 0.5 + process_group.rank), (2,)
        ).tolist()


def starts(process_group: ProcessGroup) -> list[list[float]]:
    """Return the start of a stage that differs between processes."""
    own = torch.nn.Parameter(torch.tensor([1.0, 0.1 * process_group.rank]))
    CheckpointLog(process_group=process_group).stage({}, start=[own, torch.ones(0)])
    return own.tolist()


class Unwritable:
    """A callback whose state cannot be saved."""

    def __call__(self, progress: Any) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"seen": object()}

    def load_state_dict(self, state: Any) -> None: ...


def watched(process_group: ProcessGroup) -> str:
    """Open a checkpoint with an unsaveable callback in the first process only."""
    callbacks = [Unwritable()] if process_group.is_first else []
    try:
        open_checkpoint(
            Checkpoint(f"kept-{process_group.world_size}"),
            callbacks=callbacks,
            process_group=process_group,
        )
    except NotSaveableError as error:
        return str(error)
    return ""


def choices(process_group: ProcessGroup) -> dict[str, Any]:
    """Return what the fast schedule decides by, where processes round differently."""
    if not process_group.is_first:
        _differ()
    data = shard(rows())
    kernel = ScaleKernel(RBFKernel(ard_num_dims=2))
    model = SparseGP(kernel, torch.zeros(0, 2, dtype=torch.float64), noise=0.1)
    context = TrainingContext(
        torch.Generator().manual_seed(0),
        (),
        CheckpointLog(process_group=process_group),
        process_group,
    )
    steps = FastSteps(model, data, rows=80, context=context)
    pool = steps.with_fresh(model, 12)
    frontier = steps.frontier(pool.subset_statistics(data))
    kept = steps.select(pool, frontier.masks[6], 0.0)
    return {
        "own": kept.fixed_bound(data),
        "fresh": pool.candidates.tolist(),
        "frontier": [frontier.bounds.tolist(), frontier.masks.tolist()],
        "climbed": [steps.optimise(kept, stop=Stop(1e-3, 5, most))[1] for most in (0, 3)],
    }


def _differ() -> None:
    greedy, path = fast_steps.greedy_variance, fast_steps.elimination_frontier
    bound = SparseGP.fixed_bound

    def reversed_path(statistics: Any) -> Frontier:
        found = path(statistics)
        return Frontier(found.bounds + 1e-3, found.masks.flip(1), found.N)

    fast_steps.greedy_variance = lambda *args, **kwargs: greedy(*args, **kwargs).flip(0)
    fast_steps.elimination_frontier = reversed_path
    SparseGP.fixed_bound = lambda self, data: bound(self, data) + 1e-3


def other_machines(process_group: ProcessGroup) -> dict[str, Any]:
    """Make all processes but the first evaluate kernels with errors."""
    return _perturbed(
        process_group, rows(40), FastSchedule(Tolerance(0.2), n_candidates=12, rounds=1)
    )


def more_machines(process_group: ProcessGroup) -> dict[str, Any]:
    """Fit a number of points by successive halving."""
    return _perturbed(
        process_group, rows(), FastSchedule(MaxPoints(20), n_candidates=30, rounds=2, iterations=30)
    )


def _perturbed(process_group: ProcessGroup, data: Dataset, plan: FastSchedule) -> dict[str, Any]:
    if not process_group.is_first:
        _perturb(1e-7 * process_group.rank)
    kernel = ScaleKernel(RBFKernel(ard_num_dims=2))
    model = SparseGP(kernel, torch.zeros(0, 2, dtype=torch.float64), noise=0.1)
    steps: list[float] = []
    fitted = fit(
        model,
        standardise(shard(data)),
        schedule=plan,
        callbacks=lambda progress: steps.append(progress.objective),
    )
    return {"steps": steps, "points": fitted.posterior.Z.tolist()}


def threads(process_group: ProcessGroup) -> dict[str, str]:
    """Check headings that differ in the number of threads."""
    heading = {"threads": str(1 + process_group.rank), "rows": "4"}
    check_same(process_group.all_gather(heading))
    try:
        check_same(process_group.all_gather({**heading, "rows": str(4 + process_group.rank)}))
    except InputError as error:
        return {"refused": str(error)}
    return {}


def _perturb(error: float) -> None:
    kept = StationaryChunks.uu, StationaryChunks.uf

    def uu(self: StationaryChunks) -> Tensor:
        found = kept[0](self)
        return found + error * torch.diag(found.diagonal())

    def uf(self: StationaryChunks, block: Any) -> Tensor:
        return (1 + error) * kept[1](self, block)

    StationaryChunks.uu, StationaryChunks.uf = uu, uf


def blocks(process_group: ProcessGroup) -> list[float]:
    """Fit with blocks of another size in each process."""
    X, y = rows().X.numpy(), rows().Y.numpy()
    source = shard(ArraySource(X, y))
    found = RowBlocks(source, device=torch.device("cpu"), size=10 + process_group.rank)
    return found.centre.tolist()


def standard_twice(process_group: ProcessGroup) -> dict[str, Any]:
    """Fit an estimator to a source that is standardised already."""
    read: list[int] = []
    original = ShardedSource.shards

    def shards(self: ShardedSource) -> Any:
        found = original(self)
        read.append(sum(shard.N for shard in found))
        return found

    ShardedSource.shards = shards
    estimator = SparseGPRegressor("rbf", tolerance=0.3, n_candidates=6, random_state=0)
    with short_fits():
        estimator.fit(standardise(shard(rows(30))))
    return {"read": max(read[2:]), "elbo": estimator.elbo_}


def deep_layers(process_group: ProcessGroup) -> dict[str, Any]:
    """Fit two layers by both schedules, with Gaussian noise and with classes."""
    paper = PaperSchedule(0.1, layerwise=2, pre=4, joint=4, post=4, batch_size=20, samples=2)
    fast = FastSchedule(
        rounds=2,
        inclusion_steps=4,
        deep=DeepTraining(layerwise=2, pre=4, post=4, batch_size=20),
    )
    data = rows(40)
    level = data.Y.mean()
    classes = Dataset(data.X, (level < data.Y).double())
    return {
        "paper": _deep(data, GaussianLikelihood(), paper),
        "fast": _deep(data, GaussianLikelihood(), fast),
        "all rows": _deep(
            data,
            GaussianLikelihood(),
            FastSchedule(
                rounds=1, inclusion_steps=4, deep=DeepTraining(layerwise=2, pre=3, post=3)
            ),
        ),
        "classes": _deep(classes, BernoulliLikelihood(), fast),
    }


def _deep(data: Dataset, likelihood: Likelihood, plan: Schedule) -> dict[str, Any]:
    layers = [
        DeepLayer(ScaleKernel(RBFKernel()), data.X[:8], outputs=P, slope=slope)
        for P, slope in ((2, torch.eye(2)), (1, None))
    ]
    values: list[float] = []
    found = fit(
        DeepGP(layers, likelihood=likelihood),
        shard(data),
        schedule=plan,
        callbacks=lambda progress: values.append(progress.objective),
    )
    state = sorted(found.model.named_parameters())
    return {
        "values": values,
        "bound": found.elbo,
        "sizes": list(found.model.sizes),
        "state": [number for _, part in state for number in part.flatten().tolist()],
    }
