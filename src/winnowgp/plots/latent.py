"""Figures of two-dimensional latent embeddings, and animations of their training."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse
from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.plots.style import COLOURS, Animation

# The palette of Okabe and Ito; further labels get the same colours, darker.
_LABEL_COLOURS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#F0E442",
    "#999999",
)


@dataclass(frozen=True, slots=True)
class LatentMap:
    """Latent positions and candidates in two of the latent dimensions."""

    title: str
    latents: Float[Tensor, "N 2"]
    """Mean latent position of each observation."""
    deviation: Float[Tensor, "N 2"] | None
    """Standard deviation of each latent position; None to draw no ellipses."""
    candidates: Float[Tensor, "K 2"]
    inclusion: Float[Tensor, " K"]
    """Inclusion probability of each candidate."""


def draw_latent_map(embedding: LatentMap, labels: Sequence[str] | None, *, ax: Axes) -> Axes:
    """Draw latent positions in the colours of their labels, and the candidates.

    Ellipses show one standard deviation. The opacity of a candidate is its inclusion probability.

    Args:
        embedding: the positions and candidates to draw.
        labels: one label per observation, or None for a single colour.
    """
    N = len(embedding.latents)
    names = np.array([""] * N if labels is None else list(labels))
    if len(names) != N:
        raise InputError(f"`labels` must hold one label for each of {N} rows; got {len(names)}.")
    for number, name in enumerate(dict.fromkeys(names.tolist())):
        rows, colour = embedding.latents[names == name], _label_colour(number)
        if embedding.deviation is not None:
            widths = (2 * embedding.deviation[names == name]).tolist()
            for (x, y), (a, b) in zip(rows.tolist(), widths, strict=True):
                ax.add_patch(Ellipse((x, y), a, b, color=colour, alpha=0.12, linewidth=0))
        ax.scatter(rows[:, 0], rows[:, 1], s=9, color=colour, linewidths=0, label=name or None)
    black = to_rgba(COLOURS["points"])[:3]
    probabilities = embedding.inclusion.tolist()
    ax.scatter(
        embedding.candidates[:, 0],
        embedding.candidates[:, 1],
        s=20,
        c=[(*black, p) for p in probabilities],
        edgecolors=[(*black, 0.25 + 0.75 * p) for p in probabilities],
        linewidths=0.6,
        zorder=3,
    )
    ax.set(xlabel="latent dimension 1", ylabel="latent dimension 2", title=embedding.title)
    return ax


def save_animation(
    maps: Sequence[LatentMap],
    labels: Sequence[str] | None,
    path: Path,
    *,
    frames_per_second: int = 8,
) -> Path:
    """Save embeddings as the frames of a GIF or of an HTML page with a slider.

    All frames share their axes. If saving fails, no partial file is left behind.

    Args:
        maps: the frames.
        labels: one label per observation, or None for a single colour.
        path: ends in .gif or .html, which determines the format.
        frames_per_second: frame rate of a GIF.
    """
    if not maps:
        raise InputError("`maps` must have at least one frame; got none.")
    low = min(min(m.latents.min().item(), m.candidates.min().item()) for m in maps)
    high = max(max(m.latents.max().item(), m.candidates.max().item()) for m in maps)
    margin = 0.05 * (high - low)

    def draw(figure: Figure, index: int) -> None:
        ax = draw_latent_map(maps[index], labels, ax=figure.subplots())
        ax.set(xlim=(low - margin, high + margin), ylim=(low - margin, high + margin))

    animation = Animation(
        draw, frames=len(maps), size=(6, 5.6), title=maps[0].title, alt="latent embedding"
    )
    return animation.save(path, frames_per_second=frames_per_second)


def _label_colour(number: int) -> tuple[float, float, float]:
    red, green, blue = to_rgba(_LABEL_COLOURS[number % len(_LABEL_COLOURS)])[:3]
    darker = 0.55 ** (number // len(_LABEL_COLOURS) % 3)
    return red * darker, green * darker, blue * darker
