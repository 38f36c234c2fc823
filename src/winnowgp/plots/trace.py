"""A fit from its first step to its last."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from winnowgp.plots.style import COLOURS

_MARKS = {"warm up": "s", "choose": "o"}


def draw_trace(moments: Sequence[Any], *, ax: Axes) -> Axes:
    """The objective and, on an axis of its own, the number of points.

    Args:
        moments: `Findings["training"]["moments"]`.
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
