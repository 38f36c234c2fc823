"""The paper's schedule on minibatches that processes share."""

from contextlib import suppress
from typing import Any

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood, Likelihood

from helpers.shared_checkpoints import Stopped, Stops
from helpers.shared_rows import D, error_of, plain, rows
from winnowgp.data import Dataset, shard
from winnowgp.data.distributed import ProcessGroup
from winnowgp.gradients import Relaxed
from winnowgp.models import DeepGP, DeepLayer, VariationalGP
from winnowgp.point_processes import SquaredCardinality
from winnowgp.training import Checkpoint, PaperSchedule, fit


def _plan(**changes: Any) -> PaperSchedule:
    settings: dict[str, Any] = {"joint": 12, "post": 6, "pre": 8, "learning_rate": 0.05, **changes}
    return PaperSchedule(SquaredCardinality(12, 0.1), **settings)


def _fitted(
    plan: PaperSchedule, *, likelihood: Likelihood | None = None, **changes: Any
) -> dict[str, Any]:
    """Fit numbers, or two classes where a likelihood is given."""
    X, y, _ = (torch.tensor(column[:60]) for column in rows())
    data = Dataset.of(X, y if likelihood is None else (y > 2).double())
    kernel = ScaleKernel(RBFKernel(ard_num_dims=D))
    start = VariationalGP(kernel, X[:12], likelihood=likelihood or GaussianLikelihood())
    values: list[float] = []
    callback = changes.pop("callbacks", lambda progress: values.append(progress.objective))
    found = fit(start, shard(data), schedule=plan, callbacks=callback, **changes)
    return {
        "values": values,
        "bound": found.elbo,
        "inclusion": plain(found.selection.inclusion),
        "points": plain(found.posterior.Z),
        "mean": plain(found.posterior.predict_mean(X[:9])),
    }


def gaussian(process_group: ProcessGroup) -> dict[str, Any]:
    return _fitted(_plan(batch_size=20))


def classes(process_group: ProcessGroup) -> dict[str, Any]:
    return _fitted(_plan(batch_size=20), likelihood=BernoulliLikelihood())


def relaxed(process_group: ProcessGroup) -> dict[str, Any]:
    return _fitted(_plan(batch_size=20, gradient=Relaxed(samples=2)))


def whole(process_group: ProcessGroup) -> dict[str, Any]:
    """Fit with all rows in every step."""
    return _fitted(_plan())


def odd(process_group: ProcessGroup) -> list[str]:
    """Fit with minibatches that two processes cannot split evenly."""
    return error_of(lambda: _fitted(_plan(batch_size=21)))


def resumed(process_group: ProcessGroup) -> dict[str, Any]:
    """Fit as `gaussian`, interrupted and resumed."""
    kept = Checkpoint(f"kept-{process_group.rank}", 0)
    with suppress(Stopped):
        _fitted(_plan(batch_size=20), checkpoint=kept, callbacks=Stops(13))
    return _fitted(_plan(batch_size=20), checkpoint=kept)


def deep(process_group: ProcessGroup) -> dict[str, Any]:
    """Fit a deep GP of two layers."""
    X, y, _ = rows()
    data = shard(Dataset.of(torch.tensor(X[:40]), torch.tensor(y[:40])))
    layers = [DeepLayer(ScaleKernel(RBFKernel()), torch.tensor(X[:8]), outputs=P) for P in (2, 1)]
    model = DeepGP(layers, likelihood=GaussianLikelihood())
    plan = PaperSchedule(0.1, layerwise=2, pre=6, joint=6, post=6, batch_size=20)
    values: list[float] = []
    found = fit(model, data, schedule=plan, callbacks=lambda step: values.append(step.objective))
    state = {name: plain(value) for name, value in sorted(found.model.state_dict().items())}
    return {"values": values, "bound": found.elbo, "state": repr(state)}
