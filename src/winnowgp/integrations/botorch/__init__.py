"""BoTorch integration: inducing points for its models, and fitted models as BoTorch models."""

from importlib import import_module

from winnowgp.errors import MissingExtraError

try:
    import_module("botorch")
except ModuleNotFoundError as error:
    raise MissingExtraError(
        "`winnowgp.integrations.botorch` needs the package botorch: pip install 'winnowgp[botorch]'"
    ) from error

from winnowgp.integrations.botorch.allocator import WinnowingAllocator
from winnowgp.integrations.botorch.model import SparseGPModel

__all__ = ["SparseGPModel", "WinnowingAllocator"]
