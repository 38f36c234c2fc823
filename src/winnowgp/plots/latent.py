"""Figures of two-dimensional latent embeddings, and animations of their training."""

import base64
import html
import importlib.util
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.animation import FuncAnimation, PillowWriter
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse
from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.io.format import atomic_write
from winnowgp.plots.style import COLOURS, styled

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
    """Save embeddings as the frames of a GIF (needs Pillow) or of an HTML page with a slider.

    All frames share their axes. If saving fails, no partial file is left behind.

    Args:
        maps: the frames.
        labels: one label per observation, or None for a single colour.
        path: ends in .gif or .html, which determines the format.
        frames_per_second: frame rate of a GIF.
    """
    writers = {".gif": _write_gif, ".html": _write_page}
    if path.suffix not in writers or not maps:
        raise InputError(
            f"`path` must end in .gif or .html and `maps` must not be empty; got {path.name!r} "
            f"and {len(maps)} maps."
        )
    with atomic_write(path) as part:
        writers[path.suffix](maps, labels, part, frames_per_second)
    return path


def _label_colour(number: int) -> tuple[float, float, float]:
    red, green, blue = to_rgba(_LABEL_COLOURS[number % len(_LABEL_COLOURS)])[:3]
    darker = 0.55 ** (number // len(_LABEL_COLOURS) % 3)
    return red * darker, green * darker, blue * darker


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body{{font-family:sans-serif;max-width:45rem;margin:2rem auto}}
img,input{{width:100%}}
</style>
<img id="frame" alt="latent embedding">
<input id="slider" type="range" min="0" max="{last}" value="0" aria-label="training step">
<script>
const frames = [{frames}];
const image = document.getElementById("frame"), slider = document.getElementById("slider");
slider.oninput = () => {{ image.src = "data:image/png;base64," + frames[slider.value]; }};
slider.oninput();
</script></html>
"""


def _frame_drawer(
    maps: Sequence[LatentMap], labels: Sequence[str] | None
) -> tuple[Figure, Callable[[int], list]]:
    figure = Figure(figsize=(6, 5.6))
    ax = figure.subplots()
    low = min(min(m.latents.min().item(), m.candidates.min().item()) for m in maps)
    high = max(max(m.latents.max().item(), m.candidates.max().item()) for m in maps)
    margin = 0.05 * (high - low)

    def draw(index: int) -> list:
        ax.clear()
        draw_latent_map(maps[index], labels, ax=ax)
        ax.set(xlim=(low - margin, high + margin), ylim=(low - margin, high + margin))
        return []

    return figure, draw


def _write_gif(
    maps: Sequence[LatentMap], labels: Sequence[str] | None, path: Path, frames_per_second: int
) -> None:
    if importlib.util.find_spec("PIL") is None:
        raise InputError(
            "a GIF needs Pillow: `pip install pillow`; or use a path that ends in .html."
        )
    with styled():
        figure, draw = _frame_drawer(maps, labels)
        animation = FuncAnimation(figure, draw, frames=len(maps))
        animation.save(path, writer=PillowWriter(fps=frames_per_second), dpi=80)


def _write_page(
    maps: Sequence[LatentMap], labels: Sequence[str] | None, path: Path, frames_per_second: int
) -> None:
    frames = []
    with styled():
        figure, draw = _frame_drawer(maps, labels)
        for index in range(len(maps)):
            draw(index)
            content = io.BytesIO()
            figure.savefig(content, format="png", dpi=80)
            frames.append(f'"{base64.b64encode(content.getvalue()).decode("ascii")}"')
    page = _PAGE.format(
        title=html.escape(maps[0].title), last=len(maps) - 1, frames=",".join(frames)
    )
    path.write_text(page, encoding="utf-8")
