"""The way in: a model, data, a plan."""

from copy import deepcopy

import torch

from winnowgp.data import Dataset
from winnowgp.models import SparseGP
from winnowgp.training.fast import Fast
from winnowgp.training.progress import OnProgress, silent
from winnowgp.training.schedule import Fit, Schedule

_DEFAULT = Fast()


def fit(
    model: SparseGP,
    data: Dataset,
    *,
    schedule: Schedule = _DEFAULT,
    generator: torch.Generator | None = None,
    on_progress: OnProgress = silent,
) -> Fit:
    """Train a copy of `model`, choose among its candidates, and return what is left.

    Args:
        schedule: the plan; `Fast()` gives up 0.01 nats an observation at the most.
        generator: where randomness comes from; the same seed gives the same fit.
        on_progress: told of every step.

    >>> from gpytorch.kernels import RBFKernel, ScaleKernel
    >>> from winnowgp.data import hills
    >>> data = hills()
    >>> model = SparseGP(ScaleKernel(RBFKernel()), data.X[::2])
    >>> fitted = fit(model, data)
    >>> fitted.posterior.M < 20 < model.K
    True
    """
    if generator is None:
        generator = torch.Generator(device=model.candidates.device).manual_seed(0)
    return schedule.run(deepcopy(model), data, generator=generator, on_progress=on_progress)
