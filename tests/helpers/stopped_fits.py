"""A small fit that is interrupted, resumed, and compared."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel

from winnowgp import Checkpoint, Dataset, SparseGP, fit
from winnowgp.data import hills
from winnowgp.point_processes import SquaredCardinality
from winnowgp.training import FitResult, PaperSchedule, Progress


class Stopped(Exception):
    """An exception that the library does not raise."""


def stop_at(step: int, phase: str = "inclusion") -> Callable[[Progress], None]:
    def watch(progress: Progress) -> None:
        if (progress.phase, progress.step) == (phase, step):
            raise Stopped

    return watch


def rows() -> Dataset:
    data = hills()
    return Dataset(data.X[::4], data.Y[::4])


def gp(kernel: Any = None, K: int = 8) -> SparseGP:
    return SparseGP(kernel or ScaleKernel(RBFKernel()), rows().X[:K], noise=0.1)


def plan(**words: Any) -> PaperSchedule:
    asked: dict[str, Any] = {"pre": 3, "joint": 6, "post": 3, **words}
    return PaperSchedule(SquaredCardinality(8, 0.1), **asked)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fitted(where: Checkpoint | None, **words: Any) -> FitResult[SparseGP]:
    asked: dict[str, Any] = {"schedule": plan(), "generator": seeded(), **words}
    return fit(
        asked.pop("model", None) or gp(), asked.pop("data", rows()), checkpoint=where, **asked
    )


def stopped(where: Checkpoint, step: int = 4, **words: Any) -> None:
    with pytest.raises(Stopped):
        fitted(where, callbacks=stop_at(step), **words)


def same(a: FitResult[SparseGP], b: FitResult[SparseGP]) -> bool:
    pairs = zip(a.model.state_dict().values(), b.model.state_dict().values(), strict=True)
    return (
        all(torch.equal(x, y) for x, y in pairs)
        and torch.equal(a.selection.trace, b.selection.trace)
        and torch.equal(a.selection.mask, b.selection.mask)
        and a.elbo == b.elbo
    )
