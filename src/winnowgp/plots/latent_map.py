"""A map of a table's rows in two latent dimensions, and the points that support it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.patches import Ellipse
from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.plots.style import COLOURS

# Okabe and Ito's palette once more, and the same darker, for up to sixteen kinds of rows.
_KINDS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")


@dataclass(frozen=True, slots=True)
class LatentMap:
    """Where rows and points are in two of the latent dimensions."""

    title: str
    latents: Float[Tensor, "N 2"]
    deviation: Float[Tensor, "N 2"] | None
    """Standard deviations of the rows' places, if they are to be shown."""
    candidates: Float[Tensor, "K 2"]
    inclusion: Float[Tensor, " K"]
    """Probability of each candidate."""


def draw_latent_map(found: LatentMap, labels: Sequence[str] | None, *, ax: Axes) -> Axes:
    """Rows in the colours of their labels, ellipses of one standard deviation, and candidates
    filled as far as they are probable: black where they are certain, open where they are out."""
    given = [""] * len(found.latents) if labels is None else list(labels)
    if len(given) != len(found.latents):
        raise InputError(
            f"`labels` must be one for each of {len(found.latents)} rows; got {len(given)}."
        )
    kinds, names = list(dict.fromkeys(given)), np.array(given)
    for number, kind in enumerate(kinds):
        rows, colour = found.latents[names == kind], kind_colour(number)
        if found.deviation is not None:
            widths = (2 * found.deviation[names == kind]).tolist()
            for (x, y), (a, b) in zip(rows.tolist(), widths, strict=True):
                ax.add_patch(Ellipse((x, y), a, b, color=colour, alpha=0.12, linewidth=0))
        ax.scatter(rows[:, 0], rows[:, 1], s=9, color=colour, linewidths=0, label=kind or None)
    black = to_rgba(COLOURS["points"])
    fills = [(*black[:3], p) for p in found.inclusion.tolist()]
    edges = [(*black[:3], 0.25 + 0.75 * p) for p in found.inclusion.tolist()]
    ax.scatter(
        found.candidates[:, 0],
        found.candidates[:, 1],
        s=20,
        c=fills,
        edgecolors=edges,
        linewidths=0.6,
        zorder=3,
    )
    ax.set(xlabel="first dimension", ylabel="second dimension", title=found.title)
    return ax


def kind_colour(number: int) -> tuple[float, float, float, float]:
    """The colour of a kind of rows."""
    colour = to_rgba(_KINDS[number % len(_KINDS)])
    darker = 0.55 ** (number // len(_KINDS) % 3)
    return colour[0] * darker, colour[1] * darker, colour[2] * darker, 1.0
