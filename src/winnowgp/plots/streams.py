"""Figures of a stream: size, log density and seconds of each batch, and which points left."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy import ndarray

from winnowgp.plots.style import COLOURS


def draw_stream(batches: Sequence[Any], axes: Sequence[Axes], *, first: int = 1) -> Sequence[Axes]:
    """Draw the inducing points, log density and seconds of each batch, one below the other.

    Args:
        batches: records of the batches, such as `batches_` of an estimator.
        axes: three axes.
        first: number of the first of these batches.
    """
    points, density, seconds = axes
    numbers = range(first, first + len(batches))
    points.plot(numbers, [b.points for b in batches], color=COLOURS["points"], label="in use")
    points.bar(numbers, [b.added for b in batches], color=COLOURS["posterior"], label="added")
    points.bar(numbers, [-b.dropped for b in batches], color=COLOURS["data"], label="dropped")
    points.set_ylabel("inducing points")
    points.legend(loc="upper left", fontsize=8)
    density.plot(numbers, [b.log_density for b in batches], color=COLOURS["posterior"])
    density.set_ylabel("log density of the\nbatch before it\nwas learnt (nats)")
    seconds.plot(numbers, [b.seconds for b in batches], color=COLOURS["posterior"])
    seconds.set(ylabel="seconds", xlabel="batch", ylim=(0, None))
    for ax in axes:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return axes


def draw_point_history(
    history: Sequence[Float[ndarray, "M D"]], *, ax: Axes, column: int = 0
) -> Axes:
    """Draw one coordinate of the inducing points after each batch; those that left are crosses.

    Args:
        history: `inducing_points_` after each batch.
        column: the coordinate.
    """
    for number, locations in enumerate(history, start=1):
        here = locations[:, column].tolist()
        ax.scatter([number] * len(here), here, s=9, color=COLOURS["points"])
        if number > 1:
            before = history[number - 2][:, column].tolist()
            left = [place for place in before if place not in here]
            ax.scatter([number] * len(left), left, s=20, marker="x", color=COLOURS["data"])
    ax.set(xlabel="batch", ylabel="location")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return ax
