"""`fit`: train any model by a schedule."""

from copy import deepcopy
from typing import Any

import torch

from winnowgp.data import MaskedMatrix, Source
from winnowgp.data.distributed import SINGLE_PROCESS
from winnowgp.data.scaling import StandardisedSource
from winnowgp.errors import InputError
from winnowgp.models import DeepGP
from winnowgp.models.gplvm import LatentModel
from winnowgp.training.callbacks import Callbacks
from winnowgp.training.checkpoint import Checkpoint, CheckpointLog
from winnowgp.training.context import training_context
from winnowgp.training.fast import FastSchedule
from winnowgp.training.fingerprint import row_identity
from winnowgp.training.schedules import FitResult, Schedule, Trained


def fit(
    model: Trained,
    data: Source | MaskedMatrix,
    *,
    schedule: Schedule | None = None,
    callbacks: Callbacks = (),
    checkpoint: Checkpoint | CheckpointLog | None = None,
    generator: torch.Generator | None = None,
) -> FitResult[Trained]:
    """Train a copy of a model and select inducing points among its candidates.

    Args:
        model: a `SparseGP`, `VariationalGP`, `DeepGP`, `LatentVariableGP` or `SampledLatentGP`.
        data: a `Dataset`, or any other source for a `SparseGP` with `FastSchedule`; a
            `MaskedMatrix` for GP-LVMs. Processes that share a source all return the same result.
        schedule: the schedule of the fit; `FastSchedule()` if None, which selects the fewest
            inducing points within 0.01 nats per observation of the best ELBO.
        callbacks: functions called with the `Progress` of every step.
        checkpoint: folder in which the fit is recorded, and from which it resumes if interrupted;
            or the open log of a larger fit that this one is a part of.
        generator: source of randomness, seeded with 0 if None.

    >>> from gpytorch.kernels import RBFKernel, ScaleKernel
    >>> from winnowgp.data import hills
    >>> from winnowgp.models import SparseGP
    >>> data = hills()
    >>> model = SparseGP(ScaleKernel(RBFKernel()), data.X[::2])
    >>> result = fit(model, data)
    >>> result.posterior.M < 20 < model.K
    True
    """
    schedule = FastSchedule() if schedule is None else schedule
    process_group = SINGLE_PROCESS
    if isinstance(data, MaskedMatrix) != isinstance(model, LatentModel):
        raise InputError(
            "`data` must be a MaskedMatrix for a GP-LVM, and a Dataset or another source for other "
            f"models; got {type(data).__name__} for {type(model).__name__}."
        )
    if not isinstance(data, MaskedMatrix):
        process_group = data.process_group
        if isinstance(data, StandardisedSource):
            data = data.materialised()
        if isinstance(model, DeepGP):
            data = data.require_dataset("a deep model")
    _check(model, data)
    schedule.check(model, data)
    if generator is None:
        generator = torch.Generator(device=_device(model)).manual_seed(0)
    identity: dict[str, Any] = {}
    if not isinstance(checkpoint, CheckpointLog):
        identity = {**_row_identity(data, saved=checkpoint is not None), "model": model}
        identity["schedule"] = schedule
    with training_context(
        checkpoint,
        generator=generator,
        callbacks=callbacks,
        process_group=process_group,
        **identity,
    ) as context:
        return schedule.run(deepcopy(model), data, context=context)


def _check(model: Any, data: Any) -> None:
    """Raise an error if the model cannot be fitted to the data."""
    if isinstance(model, LatentModel):
        model.check(data)
        if model.candidates.shape[1] != model.latents.Q:
            raise InputError(
                "the candidates must have as many columns as the latents have dimensions, "
                f"{model.latents.Q}; got {model.candidates.shape[1]}."
            )
        return
    points = model.layers[0].candidates if isinstance(model, DeepGP) else model.candidates
    dataset = data.as_dataset()
    # Rows that are read during the fit are moved to the model's device then.
    device = points.device if dataset is None else dataset.device
    if points.shape[1] != data.D or points.dtype != data.dtype or points.device != device:
        raise InputError(
            "model and data must have the same number of columns, dtype and device; the model's "
            f"candidates are {points.dtype} with {points.shape[1]} columns on {points.device} and "
            f"the data {data.dtype} with {data.D} on {device}. Convert one of them."
        )
    model.check(data)


def _device(model: Any) -> torch.device:
    return next(model.parameters()).device


def _row_identity(data: Source | MaskedMatrix, *, saved: bool) -> dict[str, Any]:
    """Return what identifies the rows of a fit."""
    if isinstance(data, MaskedMatrix):
        return {"table": data.Y, "observed": data.observed}
    return row_identity(data, saved=saved)
