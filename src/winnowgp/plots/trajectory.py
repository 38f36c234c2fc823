"""A quantity along a way, as the middle and the range of several runs."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One line."""

    name: str
    colour: str
    x: Sequence[float]
    middle: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    dashed: bool = False


def draw_trajectories(trajectories: Sequence[Trajectory], *, ax: Axes) -> Axes:
    """Lines with dots where something was measured, and a band from the lowest to the highest."""
    for each in trajectories:
        ax.fill_between(each.x, each.low, each.high, color=each.colour, alpha=0.2, linewidth=0)
        ax.plot(
            each.x,
            each.middle,
            color=each.colour,
            linestyle="--" if each.dashed else "-",
            linewidth=1.3,
            marker="o",
            markersize=3,
            label=each.name,
        )
    return ax
