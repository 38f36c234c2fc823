"""Colours and settings that all figures share, and the function that saves them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from winnowgp.io.format import atomic_write

# The palette of Okabe and Ito, which is distinguishable with every common colour vision.
COLOURS = {
    "data": "#7f7f7f",
    "posterior": "#0072B2",
    "points": "#000000",
    "inclusion": "#D55E00",
    "second": "#009E73",
}


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
        figure.savefig(part)
    return path


def plain(text: str) -> str:
    """Escape dollar signs, which matplotlib would read as the start of a formula.

    >>> print(plain("$ per m$"))
    \\$ per m\\$
    """
    return text.replace("$", r"\$")
