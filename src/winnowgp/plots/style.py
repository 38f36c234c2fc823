"""Colours, fonts and settings that all figures share, and the files they are saved in."""

import base64
import html
import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, final

import matplotlib
from matplotlib.animation import FuncAnimation, PillowWriter
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font
from matplotlib.text import Text

from winnowgp.errors import InputError, MissingGlyphWarning
from winnowgp.io.format import atomic_write

# The palette of Okabe and Ito, which is distinguishable with every common colour vision.
COLOURS = {
    "data": "#7f7f7f",
    "posterior": "#0072B2",
    "points": "#000000",
    "inclusion": "#D55E00",
    "second": "#009E73",
}

# Fonts of matplotlib that have placeholders instead of glyphs, or symbols in place of letters.
_NOT_FOR_TEXT = ("Last Resort", "STIXNonUnicode", "STIXSize", "cm")


@contextmanager
def styled() -> Iterator[None]:
    """Draw in the package's style; the user's matplotlib settings are restored on exit."""
    settings: dict[Any, Any] = {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 10,
        "axes.labelsize": 9,
        "xtick.labelsize": 8,
        "ytick.labelsize": 8,
        "legend.fontsize": 8,
        "legend.frameon": False,
        "figure.constrained_layout.use": True,
        "savefig.dpi": 150,
    }
    with matplotlib.rc_context(settings):
        yield


def save_figure(figure: Figure, path: Path) -> Path:
    """Save a figure; if saving fails, no partial file is left behind.

    Returns:
        `path`.
    """
    with atomic_write(path) as part, styled():
        add_fonts(figure)
        figure.savefig(part)
    return path


def add_fonts(figure: Figure) -> None:
    """Let the texts of a figure fall back on fonts that have characters the first one lacks."""
    with warnings.catch_warnings():
        # Ticks get their labels when the figure is laid out; glyphs are not needed for that.
        warnings.simplefilter("ignore")
        figure.draw_without_rendering()
    texts = [text for text in figure.findobj(Text) if isinstance(text, Text)]
    characters = {character for text in texts for character in text.get_text()}
    needed = (font_for(character) for character in sorted(characters) if not character.isspace())
    others = list(dict.fromkeys(font for font in needed if font))
    if not others:
        return
    for text in texts:
        text.set_fontfamily([*text.get_fontfamily(), *others])
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            family = axis.get_ticklabels()[0].get_fontfamily() if axis.get_ticklabels() else others
            axis.set_tick_params(labelfontfamily=family)


def font_for(character: str) -> str | None:
    """Return the family of an installed font that has a character; "" if the usual font has it.

    >>> font_for("ß")
    ''
    """
    return _font_for(character, findfont(FontProperties()))


@cache
def _font_for(character: str, usual: str) -> str | None:
    if get_font(usual).get_char_index(ord(character)):
        return ""
    # Fonts with many scripts first: fewer files are opened, and scripts look alike.
    ranked = sorted(fontManager.ttflist, key=lambda font: ("Noto" not in font.name, font.name))
    for font in ranked:
        if font.style != "normal" or font.name.startswith(_NOT_FOR_TEXT):
            continue
        try:
            if get_font(font.fname).get_char_index(ord(character)):
                return font.name
        except (OSError, RuntimeError):  # the list of fonts is older than the fonts
            continue
    return None


def plain(text: str) -> str:
    """Return a text as a figure can show it.

    Dollar signs are escaped, which matplotlib would read as the start of a formula. Characters that
    no installed font has are replaced by their codes, with a `MissingGlyphWarning`.

    >>> print(plain("$ per m$"))
    \\$ per m\\$
    """
    lacking = {c for c in text if not c.isspace() and font_for(c) is None}
    shown = "".join(c.encode("unicode_escape").decode() if c in lacking else c for c in text)
    if lacking:
        warnings.warn(
            f"no installed font has the characters of {text!r}; the figure shows {shown!r}. "
            "Install a font that has them, such as Noto Sans CJK for Chinese, Japanese and Korean.",
            MissingGlyphWarning,
            stacklevel=2,
        )
    return shown.replace("$", r"\$")


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
        """Save the frames as a GIF or as an HTML page with a slider.

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
