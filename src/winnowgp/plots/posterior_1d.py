"""A one-dimensional fit: data, posterior, inducing points."""

from dataclasses import dataclass

from jaxtyping import Float
from matplotlib.axes import Axes
from torch import Tensor

from winnowgp.plots.style import COLOURS


@dataclass(frozen=True, slots=True)
class Curve:
    """A posterior along a grid, and its inducing points with the mean there."""

    grid: Float[Tensor, " G"]
    mean: Float[Tensor, " G"]
    sd: Float[Tensor, " G"]
    points: Float[Tensor, " M"]
    heights: Float[Tensor, " M"]


def draw_curve(curve: Curve, *, ax: Axes, colour: str = COLOURS["posterior"]) -> Axes:
    """A mean with a band of two standard deviations, and the points on it, if it has any."""
    lower, upper = curve.mean - 2 * curve.sd, curve.mean + 2 * curve.sd
    ax.fill_between(
        curve.grid, lower, upper, color=colour, alpha=0.25, linewidth=0, label="mean ± 2 sd"
    )
    ax.plot(curve.grid, curve.mean, color=colour, linewidth=1.2)
    if len(curve.points):
        ax.scatter(
            curve.points,
            curve.heights,
            s=22,
            facecolors="white",
            edgecolors=COLOURS["points"],
            linewidths=1.1,
            zorder=3,
            label=f"{len(curve.points)} inducing points",
        )
    return ax


def draw_posterior_1d(
    curve: Curve,
    x: Float[Tensor, " N"],
    y: Float[Tensor, " N"],
    *,
    ax: Axes,
    colour: str = COLOURS["posterior"],
) -> Axes:
    """The curve over the data."""
    ax.scatter(x, y, s=9, marker="x", linewidths=0.7, color=COLOURS["data"], label="data")
    draw_curve(curve, ax=ax, colour=colour)
    ax.set(xlabel="x", ylabel="y")
    return ax
