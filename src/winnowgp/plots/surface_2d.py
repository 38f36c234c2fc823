"""A two-dimensional regression: the mean as contours, data in its colours, kept points."""

from dataclasses import dataclass

from jaxtyping import Float
from matplotlib.axes import Axes
from torch import Tensor

from winnowgp.plots.kept_points import draw_kept_points

# Even in lightness from end to end, and the same to every common colour vision.
_SHADES = "cividis"
_LEVELS = 12


@dataclass(frozen=True, slots=True)
class Surface:
    """A predicted mean on a grid, and where the points that carry it are."""

    x: Float[Tensor, " G"]
    y: Float[Tensor, " H"]
    mean: Float[Tensor, "H G"]
    points: Float[Tensor, "M 2"]


def draw_surface_2d(
    found: Surface, X: Float[Tensor, "N 2"], targets: Float[Tensor, " N"], *, ax: Axes
) -> Axes:
    """Contours of the mean, rows in the colour of what was observed there, points as rings.

    A row that disappears into its surroundings is predicted well. There may be no rows at all.
    """
    surface = found.x.numpy(), found.y.numpy(), found.mean.numpy()
    ends = [found.mean.min(), found.mean.max(), *([targets.min(), targets.max()] if len(X) else [])]
    low, high = min(ends).item(), max(ends).item()
    filled = ax.contourf(*surface, levels=_LEVELS, cmap=_SHADES, vmin=low, vmax=high)
    ax.contour(*surface, levels=filled.levels, colors="white", linewidths=0.4, linestyles="solid")
    rows = ax.scatter(
        X[:, 0],
        X[:, 1],
        c=targets,
        cmap=_SHADES,
        vmin=low,
        vmax=high,
        s=16,
        edgecolors="white",
        linewidths=0.4,
        label="data" if len(X) else None,
    )
    draw_kept_points(found.points, ax=ax)
    ax.figure.colorbar(rows if len(X) else filled, ax=ax, label="mean")
    return ax
