"""What each number of points buys."""

from collections.abc import Sequence

from matplotlib.axes import Axes

from winnowgp.plots.style import COLOURS


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
