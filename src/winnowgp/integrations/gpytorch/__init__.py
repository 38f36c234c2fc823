"""GPyTorch integration: fewer inducing points for its models, and conversion of fitted models.

>>> from winnowgp.integrations.gpytorch import winnow
>>> result = winnow(model, likelihood, (train_x, train_y))  # doctest: +SKIP
>>> model = result.model  # doctest: +SKIP
"""

from winnowgp.integrations.gpytorch.conversion import ConvertedGP, to_gpytorch
from winnowgp.integrations.gpytorch.processes import WinnowedProcesses, winnow_processes
from winnowgp.integrations.gpytorch.selection import (
    PrunedObjective,
    Winnowed,
    WinnowedSet,
    subset_objective,
    winnow,
)
from winnowgp.integrations.gpytorch.updates import update_winnowed

__all__ = [
    "ConvertedGP",
    "PrunedObjective",
    "Winnowed",
    "WinnowedProcesses",
    "WinnowedSet",
    "subset_objective",
    "to_gpytorch",
    "update_winnowed",
    "winnow",
    "winnow_processes",
]
