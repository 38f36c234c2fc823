"""GPyTorch integration: fewer inducing points for its models, and conversion of fitted models.

>>> from winnowgp.integrations.gpytorch import winnow
>>> result = winnow(model, likelihood, (train_x, train_y))  # doctest: +SKIP
>>> model = result.model  # doctest: +SKIP
"""

from winnowgp.integrations.gpytorch.conversion import to_gpytorch, winnow_processes
from winnowgp.integrations.gpytorch.selection import subset_objective, winnow
from winnowgp.integrations.gpytorch.updates import update_winnowed

__all__ = [
    "subset_objective",
    "to_gpytorch",
    "update_winnowed",
    "winnow",
    "winnow_processes",
]
