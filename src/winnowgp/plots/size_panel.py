"""What a number of points buys when somebody sets it, and what procedures chose."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from matplotlib.axes import Axes

from winnowgp.plots.style import COLOURS


@dataclass(frozen=True, slots=True)
class ChosenSizes:
    """Sets that one procedure kept."""

    name: str
    colour: str
    expected: float
    """Where the line stands."""
    sizes: Sequence[float]
    values: Sequence[float]
    """A dot for each set."""
    marker: str = "o"


@dataclass(frozen=True, slots=True)
class SizePanel:
    """A curve with a band, and procedures beside it."""

    title: str
    sizes: Sequence[float]
    middle: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    name: str
    chosen: Sequence[ChosenSizes] = field(default_factory=list)


def draw_size_panel(panel: SizePanel, *, ax: Axes) -> Axes:
    """The curve in grey, each procedure with a dashed line and its dots in a colour of its own."""
    grey = COLOURS["data"]
    ax.fill_between(panel.sizes, panel.low, panel.high, color=grey, alpha=0.25, linewidth=0)
    ax.plot(panel.sizes, panel.middle, color=grey, linewidth=1.4, label=panel.name)
    for found in panel.chosen:
        ax.axvline(found.expected, color=found.colour, linestyle="--", linewidth=1)
        ax.scatter(
            found.sizes,
            found.values,
            s=16,
            marker=found.marker,
            facecolors="none",
            edgecolors=found.colour,
            linewidths=0.9,
            zorder=3,
            label=found.name,
        )
    ax.set_title(panel.title)
    return ax
