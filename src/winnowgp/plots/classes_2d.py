"""A two-dimensional classification: probabilities, the boundary, candidates and kept points."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from torch import Tensor

from winnowgp.plots.kept_points import draw_kept_points
from winnowgp.plots.style import COLOURS


@dataclass(frozen=True, slots=True)
class ClassMap:
    """Probability of the second of two classes on a grid, and where points may be and are."""

    x: Float[Tensor, " G"]
    y: Float[Tensor, " H"]
    probability: Float[Tensor, "H G"]
    idle: Float[Tensor, "J 2"]
    """Candidates that were not kept, where they stood when the choice was made."""
    points: Float[Tensor, "M 2"]


def draw_classes_2d(
    found: ClassMap, X: Float[Tensor, "N 2"], labels: Int[Tensor, " N"], *, ax: Axes
) -> Axes:
    """Rows in two colours over the probability, its contour at one half, idle candidates as small
    rings, kept points as large ones."""
    first, second = COLOURS["posterior"], COLOURS["inclusion"]
    shades = LinearSegmentedColormap.from_list("classes", [first, "#ffffff", second])
    extent = (found.x[0].item(), found.x[-1].item(), found.y[0].item(), found.y[-1].item())
    ax.imshow(
        found.probability.numpy(),
        origin="lower",
        extent=extent,
        cmap=shades,
        vmin=0,
        vmax=1,
        alpha=0.45,
        aspect="auto",
    )
    surface = found.x.numpy(), found.y.numpy(), found.probability.numpy()
    ax.contour(*surface, levels=[0.5], colors="black", linewidths=1.2)
    for label, colour, marker in ((0, first, "o"), (1, second, "s")):
        rows = X[labels == label]
        ax.scatter(rows[:, 0], rows[:, 1], s=7, c=colour, marker=marker, alpha=0.7, linewidths=0)
    ax.scatter(
        found.idle[:, 0],
        found.idle[:, 1],
        s=14,
        facecolors="none",
        edgecolors=COLOURS["data"],
        linewidths=0.6,
        label=f"{len(found.idle)} candidates not kept",
    )
    draw_kept_points(found.points, ax=ax, fill="white")
    # Candidates that wandered off the map do not stretch it.
    ax.set(xlim=extent[:2], ylim=extent[2:])
    return ax
