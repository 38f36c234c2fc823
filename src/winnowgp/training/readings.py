"""The numbers that a step can be plotted by."""

from math import isfinite

from torch import Tensor

from winnowgp.training.deep_fit import DeepProgress
from winnowgp.training.progress import Progress


def readings(progress: Progress | DeepProgress) -> dict[str, float]:
    """The objective, the number of points, and the expected number where that is learnt.

    Of a deep model, points of each layer. Numbers that are not finite are left out.
    """
    found = {f"objective/{progress.phase}": progress.objective}
    if isinstance(progress, DeepProgress):
        sizes = enumerate(progress.model.sizes, start=1)
        found |= {f"points/layer {number}": float(size) for number, size in sizes}
    else:
        found["points"] = float(len(progress.candidates))
    for name, inclusion in inclusions(progress).items():
        found[name.replace("inclusion", "expected points")] = inclusion.sum().item()
    return {name: value for name, value in found.items() if isfinite(value)}


def inclusions(progress: Progress | DeepProgress) -> dict[str, Tensor]:
    """λ, of each layer for a deep model; empty in phases that do not learn it."""
    found = progress.inclusion
    if found is None:
        return {}
    if isinstance(found, Tensor):
        return {"inclusion": found}
    return {f"inclusion/layer {number}": each for number, each in enumerate(found, start=1)}
