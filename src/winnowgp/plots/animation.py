"""Animations: figures that are the frames of a GIF or of a page with a slider."""

import base64
import html
import importlib.util
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from matplotlib.animation import FuncAnimation, PillowWriter
from matplotlib.figure import Figure

from winnowgp.errors import InputError
from winnowgp.io.format import atomic_write
from winnowgp.plots.style import styled

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body{{font-family:sans-serif;max-width:45rem;margin:2rem auto}}
img,input{{width:100%}}
</style>
<img id="frame" alt="{alt}">
<input id="slider" type="range" min="0" max="{last}" value="0" aria-label="frame">
<script>
const frames = [{frames}];
const image = document.getElementById("frame"), slider = document.getElementById("slider");
slider.oninput = () => {{ image.src = "data:image/png;base64," + frames[slider.value]; }};
slider.oninput();
</script></html>
"""


@final
@dataclass(frozen=True, slots=True)
class Animation:
    """Frames that are drawn one after another on an empty figure."""

    draw: Callable[[Figure, int], None]
    """Draws the frame of a number, from 0, on a figure without axes."""
    frames: int
    """Number of frames, at least one."""
    size: tuple[float, float]
    """Width and height in inches."""
    title: str
    """Title of a page."""
    alt: str
    """Description of the frames of a page, for readers that do not see them."""

    def save(self, path: Path, *, frames_per_second: int) -> Path:
        """Save the frames as a GIF (needs Pillow) or as an HTML page with a slider.

        If saving fails, no partial file is left behind.

        Args:
            path: ends in .gif or .html, which determines the format.
            frames_per_second: frame rate of a GIF.
        """
        if path.suffix not in (".gif", ".html"):
            raise InputError(f"`path` must end in .gif or .html; got {path.name!r}.")
        with atomic_write(path) as part, styled():
            if path.suffix == ".gif":
                self._write_gif(part, frames_per_second)
            else:
                part.write_text(self._page(), encoding="utf-8")
        return path

    def _write_gif(self, path: Path, frames_per_second: int) -> None:
        if importlib.util.find_spec("PIL") is None:
            raise InputError(
                "a GIF needs Pillow: `pip install pillow`; or use a path that ends in .html."
            )
        figure = Figure(figsize=self.size)

        def draw(index: int) -> list:
            figure.clear()
            self.draw(figure, index)
            return []

        animation = FuncAnimation(figure, draw, frames=self.frames)
        animation.save(path, writer=PillowWriter(fps=frames_per_second), dpi=80)

    def _page(self) -> str:
        frames = []
        for index in range(self.frames):
            figure, content = Figure(figsize=self.size), io.BytesIO()
            self.draw(figure, index)
            figure.savefig(content, format="png", dpi=80)
            frames.append(f'"{base64.b64encode(content.getvalue()).decode("ascii")}"')
        return _PAGE.format(
            title=html.escape(self.title),
            alt=html.escape(self.alt),
            last=self.frames - 1,
            frames=",".join(frames),
        )
