"""What each input does."""

from collections.abc import Sequence
from math import ceil
from typing import Any

from matplotlib.axes import Axes
from matplotlib.dates import ConciseDateFormatter
from matplotlib.figure import Figure

from winnowgp.plots.style import plain, styled

_CYCLE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def draw_effects(effects: Sequence[Any], *, target: str) -> Figure:
    """A panel an input, up to three abreast.

    Args:
        effects: `Findings["effects"]`.
        target: what is predicted.
    """
    across = min(len(effects), 3)
    down = ceil(len(effects) / across)
    with styled():
        figure = Figure(figsize=(3.6 * across, 2.7 * down))
        panels = figure.subplots(down, across, squeeze=False, sharey=True).ravel()
        for ax, effect in zip(panels, effects, strict=False):
            draw_effect(effect, ax=ax)
        for ax in panels[len(effects) :]:
            ax.set_visible(False)
        for ax in panels[::across]:
            ax.set_ylabel(plain(target))
        if len(effects[0]["curves"]) > 1:
            panels[0].legend()
    return figure


def draw_effect(effect: Any, *, ax: Axes) -> Axes:
    """The prediction as one input changes, with a band of two standard deviations."""
    words = effect["kind"] == "words"
    at = range(len(effect["at"])) if words else effect["at"]
    for colour, curve in zip(_CYCLE, effect["curves"], strict=False):
        label = plain(curve["label"]) or None
        if words:
            error = None
            if curve["lower"]:
                error = [
                    [m - low for m, low in zip(curve["mean"], curve["lower"], strict=True)],
                    [high - m for m, high in zip(curve["mean"], curve["upper"], strict=True)],
                ]
            ax.errorbar(at, curve["mean"], yerr=error, fmt="o", ms=4, color=colour, label=label)
            continue
        if curve["lower"]:
            ax.fill_between(
                at, curve["lower"], curve["upper"], color=colour, alpha=0.25, linewidth=0
            )
        ax.plot(at, curve["mean"], color=colour, linewidth=1.4, label=label)
    if words:
        ax.set_xticks(
            list(at), [plain(word[:12]) for word in effect["at"]], rotation=30, ha="right"
        )
        ax.set_xlim(-0.5, len(effect["at"]) - 0.5)
    if effect["kind"] == "date":
        ax.xaxis_date()  # days since 1970, as here
        ax.xaxis.set_major_formatter(ConciseDateFormatter(ax.xaxis.get_major_locator()))
    ax.set_xlabel(plain(effect["column"]))
    return ax
