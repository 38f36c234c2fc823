"""A two-dimensional classification: probabilities, the boundary, candidates and kept points."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from torch import Tensor

from winnowgp.plots.style import COLOURS


@dataclass(frozen=True, slots=True)
class ClassMap:
    """Probability of the second of two classes on a grid, and where points may be and are."""

    x: Float[Tensor, " G"]
    y: Float[Tensor, " H"]
    probability: Float[Tensor, "H G"]
    candidates: Float[Tensor, "K 2"]
    inclusion: Float[Tensor, " K"]
    points: Float[Tensor, "M 2"]


def draw_classes_2d(
    found: ClassMap, X: Float[Tensor, "N 2"], labels: Int[Tensor, " N"], *, ax: Axes
) -> Axes:
    """Rows in two colours over the probability, its contour at one half, candidates as small rings
    filled by inclusion, kept points as large ones."""
    first, second = COLOURS["posterior"], COLOURS["inclusion"]
    shades = LinearSegmentedColormap.from_list("classes", [first, "#ffffff", second])
    extent = (found.x[0].item(), found.x[-1].item(), found.y[0].item(), found.y[-1].item())
    ax.imshow(
        found.probability,
        origin="lower",
        extent=extent,
        cmap=shades,
        vmin=0,
        vmax=1,
        alpha=0.45,
        aspect="auto",
    )
    ax.contour(found.x, found.y, found.probability, levels=[0.5], colors="black", linewidths=1.2)
    for label, colour, marker in ((0, first, "o"), (1, second, "s")):
        rows = X[labels == label]
        ax.scatter(rows[:, 0], rows[:, 1], s=7, c=colour, marker=marker, alpha=0.7, linewidths=0)
    kept, idle = _split(found)
    ax.scatter(
        idle[:, 0],
        idle[:, 1],
        s=14,
        facecolors="none",
        edgecolors=COLOURS["data"],
        linewidths=0.6,
        label=f"{len(idle)} candidates not kept",
    )
    ax.scatter(
        kept[:, 0],
        kept[:, 1],
        s=46,
        facecolors="white",
        edgecolors=COLOURS["points"],
        linewidths=1.4,
        zorder=3,
        label=f"{len(kept)} inducing points",
    )
    ax.set(xlabel="first input", ylabel="second input")
    return ax


def _split(found: ClassMap) -> tuple[np.ndarray, np.ndarray]:
    """Kept points, and candidates that are none of them."""
    kept = found.points.numpy()
    apart = (found.candidates[:, None] != found.points[None]).any(-1).all(1)
    return kept, found.candidates[apart].numpy()
