"""Model files: one file per model, with tensors and JSON; loading executes nothing."""

from winnowgp.io import components, models  # noqa: F401  they register what can be saved
from winnowgp.io.registry import load, save

__all__ = ["load", "save"]
