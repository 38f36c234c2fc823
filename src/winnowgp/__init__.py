"""Gaussian processes that select their own inducing points.

>>> from winnowgp import SparseGPRegressor
>>> SparseGPRegressor(alpha=0.1)
SparseGPRegressor(alpha=0.1)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # Type checkers do not run `__getattr__`; they find the names of `_NAMES` among these.
    from winnowgp.data import *
    from winnowgp.estimators import *
    from winnowgp.io import *
    from winnowgp.models import *
    from winnowgp.tabular import *
    from winnowgp.training import *

__version__ = "0.1.0"

_NAMES = {
    "data": ("DataTable", "Dataset", "MaskedMatrix", "read_table"),
    "estimators": (
        "GPLVM",
        "AdditiveGPRegressor",
        "DeepGPClassifier",
        "DeepGPRegressor",
        "MultiFidelityGPRegressor",
        "MultiOutputGPRegressor",
        "SparseGPClassifier",
        "SparseGPRegressor",
    ),
    "io": ("save",),
    "models": (
        "DeepGP",
        "LatentVariableGP",
        "MultiOutputGP",
        "Posterior",
        "SparseGP",
        "VariationalGP",
    ),
    "tabular": (
        "TabularModel",
        "compare_models",
        "cross_validate_table",
        "evaluate_model",
        "fit_table",
    ),
    # Importing it makes the classes known that a file may hold.
    "tabular.serialization": ("load",),
    "training": ("Checkpoint", "FitResult", "fit"),
}
_PACKAGES = {name: package for package, names in _NAMES.items() for name in names}

__all__ = ["__version__", *_PACKAGES]


def __getattr__(name: str) -> Any:
    """Import a public name on its first use, so that `import winnowgp` is fast."""
    if name not in _PACKAGES:
        raise AttributeError(f"module 'winnowgp' has no attribute {name!r}")
    return getattr(import_module(f"winnowgp.{_PACKAGES[name]}"), name)


def __dir__() -> list[str]:
    """List the public names, whether they have been imported or not."""
    return sorted(__all__)
