"""Whether probabilities mean what they say."""

from collections.abc import Sequence

from matplotlib.axes import Axes

from winnowgp.plots.style import COLOURS

_WORDS = {
    "interval": ("nominal level of the interval", "share of held-out rows within it"),
    "class": ("predicted probability", "how often it was so"),
}


def draw_calibration(pairs: Sequence[Sequence[float]], *, kind: str, ax: Axes) -> Axes:
    """Nominal against actual, and the diagonal that a perfect model follows.

    Args:
        pairs: nominal and actual share.
        kind: "interval" or "class".
    """
    nominal, actual = zip(*pairs, strict=True)
    ax.plot([0, 1], [0, 1], color=COLOURS["data"], linewidth=0.8, linestyle="--", label="perfect")
    ax.plot(
        nominal, actual, color=COLOURS["posterior"], linewidth=1.4, marker="o", ms=4, label="model"
    )
    x, y = _WORDS[kind]
    ax.set(xlim=(0, 1), ylim=(0, 1), xlabel=x, ylabel=y)
    ax.set_aspect("equal")
    ax.set_title("Calibration on held-out rows")
    ax.legend(loc="upper left")
    return ax
