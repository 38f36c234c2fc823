"""What accuracy costs: one dot a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from matplotlib.axes import Axes

from winnowgp.plots.style import COLOURS


@dataclass(frozen=True, slots=True)
class Tradeoff:
    """Models of one kind."""

    name: str
    cost: list[float]
    accuracy: list[float]
    labels: list[str]
    """What stands beside each dot; empty for none."""


def draw_tradeoff(
    grid: Tradeoff,
    ours: list[Tradeoff],
    *,
    ax: Axes,
    colours: Sequence[str] = (COLOURS["inclusion"], COLOURS["posterior"], COLOURS["second"]),
) -> Axes:
    """A grid in grey, and procedures that chose for themselves in colour, joined by a line."""
    ax.scatter(grid.cost, grid.accuracy, s=16, color=COLOURS["data"], alpha=0.7, label=grid.name)
    best = max(ours, key=lambda each: max(each.accuracy, default=-inf), default=None)
    for colour, found in zip(colours, ours, strict=False):
        ax.plot(
            found.cost, found.accuracy, color=colour, marker="o", markersize=5, label=found.name
        )
        # Above the uppermost line and below the others, where lines that rise leave room.
        beside: dict[str, Any] = {"xytext": (-5, 4), "ha": "right"}
        if len(ours) == 1 or found is not best:
            beside = {"xytext": (5, -9), "ha": "left"}
        for x, y, label in zip(found.cost, found.accuracy, found.labels, strict=False):
            ax.annotate(
                label, (x, y), textcoords="offset points", fontsize=7, color=colour, **beside
            )
    ax.legend(loc="lower right")
    return ax
