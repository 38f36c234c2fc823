"""Checkpoints of fits that processes share; each has its own folder, to see which one writes."""

import errno
import os
import signal
import warnings
from contextlib import suppress
from typing import Any

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel

from helpers.shared_rows import error_of, plain, rows
from helpers.short_fits import short_fits
from winnowgp.data import ArraySource, shard
from winnowgp.data.distributed import ProcessGroup
from winnowgp.data.sharding import ShardedSource
from winnowgp.errors import CheckpointWarning
from winnowgp.models import SparseGP
from winnowgp.training import Checkpoint, EndPhase, FastSchedule, Progress, Tolerance, fit
from winnowgp.training import checkpoint as checkpoint_module
from winnowgp.training.checkpoint import open_checkpoint

PLAN = FastSchedule(Tolerance(0.1), n_candidates=8, rounds=1, inclusion_steps=4)


class Stopped(Exception):
    """Raised by a callback to interrupt a fit."""


class Stops:
    """A callback that interrupts the fit at its n-th step, and counts steps."""

    def __init__(self, at: int = -1, error: type[Exception] = Stopped) -> None:
        self.at, self.error, self.steps = at, error, 0

    def __call__(self, progress: Progress) -> None:
        self.steps += 1
        if self.steps == self.at:
            raise self.error


class EndsPoints(Stops):
    """A callback that ends the first optimisation of a model with points at its third step."""

    def __call__(self, progress: Progress) -> None:
        if progress.phase == "optimisation" and len(progress.candidates[0]):
            super().__call__(progress)


def curve() -> ShardedSource:
    """Return a small sharded source."""
    X, y, _ = rows()
    return shard(ArraySource(X[:60, :1], y[:60] - X[:60, 1]))


def line(noise: float = 0.1) -> SparseGP:
    return SparseGP(ScaleKernel(RBFKernel()), torch.zeros(0, 1).double(), noise=noise)


def _fitted(**settings: Any) -> dict[str, Any]:
    with short_fits():
        result = fit(line(), curve(), schedule=PLAN, **settings)
    return {"bound": result.elbo, "points": plain(result.posterior.Z)}


def unbroken(process_group: ProcessGroup) -> dict[str, Any]:
    return _fitted()


def resumed(process_group: ProcessGroup) -> dict[str, Any]:
    """Interrupt a fit, resume it, and run it again after it has ended."""
    where = Checkpoint(f"kept-{process_group.rank}", 0)
    with suppress(Stopped):
        _fitted(checkpoint=where, callbacks=Stops(8))
    goes_on, ended = Stops(), Stops()
    return {
        "again": _fitted(checkpoint=where, callbacks=goes_on),
        "once more": _fitted(checkpoint=where, callbacks=ended),
        "steps": [goes_on.steps, ended.steps],
        "folder": os.path.isdir(where.folder),
    }


def once(process_group: ProcessGroup) -> list[int]:
    """Return values of a log that is saved, and of one that is not."""
    kept = open_checkpoint(Checkpoint(f"kept-{process_group.rank}"), process_group=process_group)
    unkept = open_checkpoint(None, process_group=process_group)
    return [kept.once(lambda: process_group.rank + 3), unkept.once(lambda: process_group.rank + 4)]


def early(process_group: ProcessGroup) -> list[Any]:
    """Fit with a callback of the first process that ends a phase."""
    callback = EndsPoints(3, EndPhase) if process_group.is_first else EndsPoints()
    return [_fitted(callbacks=callback), callback.steps]


def full_disk(process_group: ProcessGroup) -> list[Any]:
    """Fit with a disk that is full from the third write on."""
    real, seen = checkpoint_module.write_archive, [0]

    def write(*settings: Any) -> Any:
        seen[0] += 1
        if seen[0] > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*settings)

    checkpoint_module.write_archive = write
    where = Checkpoint(f"full-{process_group.rank}", 0)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = _fitted(checkpoint=where)
    finally:
        checkpoint_module.write_archive = real
    warned = {str(each.message) for each in caught if each.category is CheckpointWarning}
    # The file written before is complete, and can be resumed from.
    return [result, sorted(warned), _fitted(checkpoint=where)]


def damaged(process_group: ProcessGroup) -> list[str]:
    """Fit with a damaged file in the first process only."""
    where = Checkpoint(f"damaged-{process_group.rank}", 0)
    if process_group.is_first:
        where.path.parent.mkdir()
        where.path.write_bytes(b"nothing of ours")
    return error_of(lambda: _fitted(checkpoint=where))


def different(process_group: ProcessGroup) -> list[str]:
    """Fit another model in each process."""
    return error_of(
        lambda: fit(line(0.1 + process_group.rank), curve(), schedule=FastSchedule(n_candidates=8))
    )


def shards(process_group: ProcessGroup) -> list[str]:
    """Share other rows in each process."""
    X, y, _ = rows()
    return error_of(lambda: shard(ArraySource(X[process_group.rank :], y[process_group.rank :])))


def elastic(process_group: ProcessGroup) -> dict[str, Any]:
    """Under torchrun: kill the second process in the first attempt, the first in the second."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    steps = Stops()

    def watch(progress: Progress) -> None:
        steps(progress)
        if attempt < 2 and steps.steps == 6 and process_group.rank == 1 - attempt:
            os.kill(os.getpid(), signal.SIGKILL)

    result = _fitted(checkpoint=Checkpoint("kept", 0), callbacks=watch)
    return {"attempt": attempt, "steps": steps.steps, "result": result}
