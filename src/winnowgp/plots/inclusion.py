"""The probability of each candidate."""

from collections.abc import Sequence

from matplotlib.axes import Axes

from winnowgp.plots.style import COLOURS


def draw_inclusion(inclusion: Sequence[float], kept: int, *, ax: Axes) -> Axes:
    """Probabilities of kept and of idle candidates, the most probable of each first.

    Args:
        inclusion: probability of each candidate, the kept ones first.
        kept: how many were kept.
    """
    parts = (
        (sorted(inclusion[:kept], reverse=True), COLOURS["posterior"], f"{kept} points kept"),
        (
            sorted(inclusion[kept:], reverse=True),
            COLOURS["inclusion"],
            f"{len(inclusion) - kept} candidates not kept",
        ),
    )
    start = 0
    for values, colour, label in parts:
        places = range(start, start + len(values))
        ax.vlines(places, 0, values, color=colour, linewidth=1)
        ax.scatter(places, values, s=12, color=colour, label=label)
        start += len(values)
    ax.set(ylim=(0, 1.15), xlabel="candidate", ylabel="probability of inclusion")
    ax.set_title("How sure q(Z) is of each candidate")
    ax.legend(loc="upper right", ncols=2)
    return ax
