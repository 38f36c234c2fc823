"""One look for all pictures, and one safe way to save them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from winnowgp.io.format import atomic_write

# Okabe and Ito's palette: distinguishable with every common colour vision.
COLOURS = {
    "data": "#7f7f7f",
    "posterior": "#0072B2",
    "points": "#000000",
    "inclusion": "#D55E00",
    "second": "#009E73",
}
# Of the two procedures, wherever both are drawn.
PROCEDURES = {"paper": COLOURS["posterior"], "fast": COLOURS["inclusion"]}


@contextmanager
def styled() -> Iterator[None]:
    """Draw in the house style without touching the user's settings."""
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


def saved(figure: Figure, path: Path) -> Path:
    """Write the figure whole or not at all."""
    with atomic_write(path) as part, styled():
        figure.savefig(part)
    return path


def plain(text: str) -> str:
    """A user's words, so that matplotlib shows dollar signs rather than reading mathematics.

    >>> print(plain("$ per m$"))
    \\$ per m\\$
    """
    return text.replace("$", r"\$")
