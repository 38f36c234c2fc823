"""Maps one after another: a GIF, or a page with a slider that needs nothing else."""

import base64
import html
import importlib.util
import io
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.animation import FuncAnimation, PillowWriter
from matplotlib.figure import Figure

from winnowgp.errors import InputError
from winnowgp.io import written_whole
from winnowgp.plots.latent_map import LatentMap, draw_latent_map
from winnowgp.plots.style import styled

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
    with written_whole(path) as part:
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
