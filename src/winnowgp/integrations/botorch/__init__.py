"""BoTorch: chosen inducing points for its models, and our fitted models for its acquisition
functions."""

from importlib.util import find_spec

from winnowgp.errors import MissingExtraError

if find_spec("botorch") is None:
    raise MissingExtraError(
        "`winnowgp.integrations.botorch` needs the package botorch: pip install 'winnowgp[botorch]'"
    )

from winnowgp.integrations.botorch.fitted_gp import FittedGP
from winnowgp.integrations.botorch.winnowing_allocator import WinnowingAllocator

__all__ = ["FittedGP", "WinnowingAllocator"]
