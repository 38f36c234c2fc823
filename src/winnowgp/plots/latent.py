"""Plots of latent embeddings, and animations of their training."""

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

# A map of a table's rows in two latent dimensions, and the points that support it.


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


# Maps one after another: a GIF, or a page with a slider that needs nothing else.


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body{{font-family:sans-serif;max-width:45rem;margin:2rem auto}}
img,input{{width:100%}}
</style>
<img id="frame" alt="map of the latent space">
<input id="slider" type="range" min="0" max="{last}" value="0" aria-label="moment of training">
<script>
const frames = [{frames}];
const image = document.getElementById("frame"), slider = document.getElementById("slider");
slider.oninput = () => {{ image.src = "data:image/png;base64," + frames[slider.value]; }};
slider.oninput();
</script></html>
"""


def saved_frames(
    maps: Sequence[LatentMap],
    labels: Sequence[str] | None,
    path: Path,
    *,
    frames_per_second: int = 8,
) -> Path:
    """Write maps as a GIF (needs Pillow) or, by the suffix .html, as a page with a slider.

    All frames share their axes. Written whole or not at all.
    """
    writers = {".gif": _write_gif, ".html": _write_page}
    if path.suffix not in writers or not maps:
        raise InputError(
            f"`path` must end in .gif or .html and there must be maps to show; got {path.name!r} "
            f"and {len(maps)} maps."
        )
    with atomic_write(path) as part:
        writers[path.suffix](maps, labels, part, frames_per_second)
    return path


def _drawer(
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
            "a GIF needs Pillow: pip install pillow; or ask for a path ending in .html"
        )
    with styled():
        figure, draw = _drawer(maps, labels)
        animation = FuncAnimation(figure, draw, frames=len(maps))
        animation.save(path, writer=PillowWriter(fps=frames_per_second), dpi=80)


def _write_page(
    maps: Sequence[LatentMap], labels: Sequence[str] | None, path: Path, frames_per_second: int
) -> None:
    frames = []
    with styled():
        figure, draw = _drawer(maps, labels)
        for index in range(len(maps)):
            draw(index)
            content = io.BytesIO()
            figure.savefig(content, format="png", dpi=80)
            frames.append(f'"{base64.b64encode(content.getvalue()).decode("ascii")}"')
    page = _PAGE.format(
        title=html.escape(maps[0].title), last=len(maps) - 1, frames=",".join(frames)
    )
    path.write_text(page, encoding="utf-8")
