"""GPyTorch's own models, with fewer inducing points; and ours as GPyTorch's.

>>> from winnowgp.integrations.gpytorch import winnow
>>> result = winnow(model, likelihood, (train_x, train_y))  # doctest: +SKIP
>>> model = result.model  # doctest: +SKIP
"""

from winnowgp.integrations.gpytorch.conversion import ConvertedGP, to_gpytorch
from winnowgp.integrations.gpytorch.objective import PrunedObjective, subset_objective
from winnowgp.integrations.gpytorch.selection import Winnowed, WinnowedSet, winnow

__all__ = [
    "ConvertedGP",
    "PrunedObjective",
    "Winnowed",
    "WinnowedSet",
    "subset_objective",
    "to_gpytorch",
    "winnow",
]
