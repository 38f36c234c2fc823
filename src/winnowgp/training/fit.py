"""The way in: a model, data, a plan."""

from copy import deepcopy

import torch

from winnowgp.data import Dataset
from winnowgp.models import SparseGP
from winnowgp.training.progress import OnProgress, silent
from winnowgp.training.schedule import Fit, Schedule


def fit(
    model: SparseGP,
    data: Dataset,
    *,
    schedule: Schedule,
    generator: torch.Generator | None = None,
    on_progress: OnProgress = silent,
) -> Fit:
    """Train a copy of `model`, choose among its candidates, and return what is left.

    Args:
        generator: where randomness comes from; the same seed gives the same fit.
        on_progress: told of every step.

    >>> from gpytorch.kernels import RBFKernel, ScaleKernel
    >>> from winnowgp.data import hills
    >>> from winnowgp.point_processes import SquaredCardinality
    >>> from winnowgp.training import ThreePhases
    >>> data = hills()
    >>> model = SparseGP(ScaleKernel(RBFKernel()), data.X[::6])
    >>> prior = SquaredCardinality(model.K, alpha=0.5)
    >>> fitted = fit(model, data, schedule=ThreePhases(prior, pre=50, process=100, post=20))
    >>> fitted.posterior.M < model.K == 30
    True
    """
    if generator is None:
        generator = torch.Generator(device=model.candidates.device).manual_seed(0)
    return schedule.run(deepcopy(model), data, generator=generator, on_progress=on_progress)
