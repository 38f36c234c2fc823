"""Gaussian processes that choose their own inducing points.

>>> from winnowgp import SparseGPRegressor
>>> SparseGPRegressor(alpha=0.1)
SparseGPRegressor(alpha=0.1)
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from winnowgp.data import Dataset, DataTable, MaskedMatrix, read_table
    from winnowgp.estimators import (
        GPLVM,
        DeepGPClassifier,
        DeepGPRegressor,
        SparseGPClassifier,
        SparseGPRegressor,
        TabularModel,
        fit_table,
    )
    from winnowgp.io import load, save
    from winnowgp.models import DeepGP, LatentVariableGP, Posterior, SparseGP, VariationalGP
    from winnowgp.training import Checkpoint, fit

__version__ = "0.1.0"

__all__ = [
    "GPLVM",
    "Checkpoint",
    "DataTable",
    "Dataset",
    "DeepGP",
    "DeepGPClassifier",
    "DeepGPRegressor",
    "LatentVariableGP",
    "MaskedMatrix",
    "Posterior",
    "SparseGP",
    "SparseGPClassifier",
    "SparseGPRegressor",
    "TabularModel",
    "VariationalGP",
    "__version__",
    "fit",
    "fit_table",
    "load",
    "read_table",
    "save",
]

_ROOMS = {
    "Checkpoint": "winnowgp.training",
    "DataTable": "winnowgp.data",
    "Dataset": "winnowgp.data",
    "DeepGP": "winnowgp.models",
    "DeepGPClassifier": "winnowgp.estimators",
    "DeepGPRegressor": "winnowgp.estimators",
    "MaskedMatrix": "winnowgp.data",
    "GPLVM": "winnowgp.estimators",
    "LatentVariableGP": "winnowgp.models",
    "Posterior": "winnowgp.models",
    "SparseGP": "winnowgp.models",
    "SparseGPClassifier": "winnowgp.estimators",
    "SparseGPRegressor": "winnowgp.estimators",
    "TabularModel": "winnowgp.estimators",
    "VariationalGP": "winnowgp.models",
    "fit": "winnowgp.training",
    "fit_table": "winnowgp.estimators",
    "load": "winnowgp.estimators.serialization",
    "read_table": "winnowgp.data",
    "save": "winnowgp.io",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for, so that `import winnowgp` is light."""
    if name in _ROOMS:
        return getattr(import_module(_ROOMS[name]), name)
    raise AttributeError(f"module 'winnowgp' has no attribute {name!r}")
