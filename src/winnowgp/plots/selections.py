"""Plots of a selection: frontier, inclusion probabilities, training trace."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from winnowgp.plots.style import COLOURS

# What each number of points buys.


def draw_frontier(bounds: Sequence[float], chosen: int, *, rows: int, ax: Axes) -> Axes:
    """Nats per row below the best bound, for each number of points, and the number chosen.

    Args:
        bounds: best bound for 0, 1, 2, ... points, in nats.
        chosen: number of points that were kept.
        rows: N, for nats per row.
    """
    best = max(bounds)
    # The last few differ by nothing, which a logarithm cannot show.
    least = 1e-5
    below = [max((best - bound) / rows, least) for bound in bounds]
    ax.plot(range(len(below)), below, color=COLOURS["posterior"], linewidth=1.4)
    ax.scatter(
        [chosen],
        [below[chosen]],
        s=46,
        facecolors="white",
        edgecolors=COLOURS["points"],
        linewidths=1.4,
        zorder=3,
        label=f"{chosen} points kept",
    )
    ax.set_yscale("log")
    ax.set(xlabel="number of points", ylabel="below the best bound (nats per row)")
    ax.set_title("What each number of points buys")
    ax.legend(loc="upper right")
    return ax


# The probability of each candidate.


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


# A fit from its first step to its last.


_MARKS = {"warm up": "s", "choose": "o"}


def draw_trace(moments: Sequence[Any], *, ax: Axes) -> Axes:
    """The objective and, on an axis of its own, the number of points.

    Args:
        moments: `Summary["training"]["moments"]`.
    """
    seen = [moment for moment in moments if moment["objective"] is not None]
    steps = [moment["step"] for moment in seen]
    ax.plot(steps, [m["objective"] for m in seen], color=COLOURS["posterior"], linewidth=1.4)
    for phase, mark in _MARKS.items():
        there = [moment for moment in seen if moment["phase"] == phase]
        if there:
            ax.scatter(
                [m["step"] for m in there],
                [m["objective"] for m in there],
                marker=mark,
                s=26,
                facecolors="white",
                edgecolors=COLOURS["posterior"],
                zorder=3,
                label=phase,
            )
    ax.set(xlabel="step", ylabel="objective (nats)")
    ax.yaxis.label.set_color(COLOURS["posterior"])
    counts = ax.twinx()
    counts.step(
        steps, [len(m["x"]) for m in seen], where="post", color=COLOURS["inclusion"], linewidth=1
    )
    counts.set_ylabel("points", color=COLOURS["inclusion"])
    counts.set_ylim(bottom=0)
    counts.spines["right"].set_visible(True)
    ax.set_title("The fit")
    if ax.get_legend_handles_labels()[1]:
        ax.legend(loc="lower right")
    return ax
