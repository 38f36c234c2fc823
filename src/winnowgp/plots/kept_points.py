"""Kept points over a map of two inputs."""

from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from torch import Tensor

from winnowgp.plots.style import COLOURS


def draw_kept_points(points: Float[Tensor, "M 2"], *, ax: Axes, fill: str = "none") -> None:
    """Rings with a white rim, to be seen on any shade, and what the axes are."""
    ax.scatter(
        points[:, 0],
        points[:, 1],
        s=46,
        facecolors=fill,
        edgecolors=COLOURS["points"],
        linewidths=1.4,
        path_effects=[withStroke(linewidth=3.0, foreground="white")],
        zorder=3,
        label=f"{len(points)} inducing points",
    )
    ax.set(xlabel="first input", ylabel="second input")
