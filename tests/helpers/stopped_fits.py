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


def plan(**changes: Any) -> PaperSchedule:
    settings: dict[str, Any] = {"pre": 3, "joint": 6, "post": 3, **changes}
    return PaperSchedule(SquaredCardinality(8, 0.1), **settings)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fitted(where: Checkpoint | None, **changes: Any) -> FitResult[SparseGP]:
    settings: dict[str, Any] = {"schedule": plan(), "generator": seeded(), **changes}
    return fit(
        settings.pop("model", None) or gp(),
        settings.pop("data", rows()),
        checkpoint=where,
        **settings,
    )


def stopped(where: Checkpoint, step: int = 4, **changes: Any) -> None:
    with pytest.raises(Stopped):
        fitted(where, callbacks=stop_at(step), **changes)


def same(a: FitResult[SparseGP], b: FitResult[SparseGP]) -> bool:
    pairs = zip(a.model.state_dict().values(), b.model.state_dict().values(), strict=True)
    return (
        all(torch.equal(x, y) for x, y in pairs)
        and torch.equal(a.selection.trace, b.selection.trace)
        and torch.equal(a.selection.mask, b.selection.mask)
        and a.elbo == b.elbo
    )
