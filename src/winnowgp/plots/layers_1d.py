"""A deep process of one dimension, layer by layer, and the density that comes out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxtyping import Float
from matplotlib.axes import Axes
from torch import Tensor

from winnowgp.plots.style import COLOURS

# Of Okabe and Ito's palette, what the two procedures leave.
_LAYERS = ("#009E73", "#CC79A7", "#E69F00", "#7f7f7f")


@dataclass(frozen=True, slots=True)
class DensityMap:
    """A predictive density on a grid."""

    x: Float[Tensor, " X"]
    y: Float[Tensor, " Y"]
    density: Float[Tensor, "Y X"]
    low: Float[Tensor, " X"]
    """The 5 % quantile at each x."""
    high: Float[Tensor, " X"]
    """The 95 % quantile at each x."""


def draw_density(
    found: DensityMap, x: Float[Tensor, " N"], y: Float[Tensor, " N"], *, ax: Axes
) -> Axes:
    """The density as shades, its central nine tenths as lines, and the data."""
    grid = (found.x.numpy(), found.y.numpy(), found.density.numpy())
    ax.pcolormesh(*grid, cmap="Blues", shading="auto", rasterized=True)
    for edge, label in ((found.low, "5 % and 95 %"), (found.high, None)):
        ax.plot(found.x, edge, color=COLOURS["posterior"], linewidth=0.8, label=label)
    ax.scatter(x, y, s=7, marker="x", linewidths=0.6, color=COLOURS["inclusion"], label="data")
    ax.set(xlabel="x", ylabel="y")
    return ax


def draw_layer_sizes(sizes: Mapping[str, Sequence[Sequence[int]]], *, ax: Axes) -> Axes:
    """Numbers of points by layer: one group a label, one dot a run, and their mean.

    Args:
        sizes: for each label the sizes of every run, one number a layer.
    """
    layers = max(len(run) for runs in sizes.values() for run in runs)
    for layer in range(layers):
        offset = (layer - (layers - 1) / 2) * 0.22
        colour = _LAYERS[layer % len(_LAYERS)]
        for place, runs in enumerate(sizes.values()):
            values = [run[layer] for run in runs]
            named = f"layer {layer + 1}" if place == 0 else None
            where = [place + offset] * len(values)
            ax.scatter(where, values, s=14, color=colour, alpha=0.6, linewidths=0, label=named)
            mean = sum(values) / len(values)
            ax.hlines(mean, place + offset - 0.08, place + offset + 0.08, color=colour)
    ax.set_xticks(range(len(sizes)), list(sizes))
    ax.set(ylabel="inducing points", ylim=(0, None))
    ax.legend()
    return ax
