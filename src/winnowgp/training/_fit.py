"""The way in: a model, data, a plan."""

from copy import deepcopy

import torch

from winnowgp.data import Source, StandardisedSource
from winnowgp.errors import InputError
from winnowgp.models.base import Model
from winnowgp.training.callbacks import OnProgress, silent
from winnowgp.training.checkpoint import Checkpoint, row_identity
from winnowgp.training.context import training_context
from winnowgp.training.fast import Fast
from winnowgp.training.schedules import Fit, Schedule

_DEFAULT = Fast()


def fit(
    model: Model,
    data: Source,
    *,
    schedule: Schedule = _DEFAULT,
    generator: torch.Generator | None = None,
    on_progress: OnProgress = silent,
    checkpoint: Checkpoint | None = None,
) -> Fit[Model]:
    """Train a copy of `model`, choose among its candidates, and return what is left.

    Args:
        data: rows in memory, or any other source for a `SparseGP` with the schedule `Fast`; rows
            that are `shared` among processes give each of them the same result.
        schedule: the plan; `Fast()` gives up 0.01 nats an observation at the most.
        generator: where randomness comes from; the same seed gives the same fit.
        on_progress: told of every step.
        checkpoint: where to write down how far it has come, and go on from if it was stopped.

    >>> from gpytorch.kernels import RBFKernel, ScaleKernel
    >>> from winnowgp.data import hills
    >>> from winnowgp.models import SparseGP
    >>> data = hills()
    >>> model = SparseGP(ScaleKernel(RBFKernel()), data.X[::2])
    >>> fitted = fit(model, data)
    >>> fitted.posterior.M < 20 < model.K
    True
    """
    if isinstance(data, StandardisedSource):
        data = data.converted()
    points, held = model.candidates, data.held()
    # Rows that are read during the fit are moved then.
    device = points.device if held is None else held.device
    if points.shape[1] != data.D or points.dtype != data.dtype or points.device != device:
        raise InputError(
            f"the model's candidates are {points.dtype} with {points.shape[1]} columns on "
            f"{points.device} and the data {data.dtype} with {data.D} on {device}; make them alike."
        )
    model.check(data)
    if generator is None:
        generator = torch.Generator(device=model.candidates.device).manual_seed(0)
    with training_context(
        checkpoint,
        "fit",
        generator=generator,
        on_progress=on_progress,
        process_group=data.process_group,
        **row_identity(data, kept=checkpoint is not None),
        model=model,
        schedule=schedule,
    ) as context:
        return schedule.run(deepcopy(model), data, context=context)
