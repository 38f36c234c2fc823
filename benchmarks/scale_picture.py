"""A picture of how seconds and memory grow, from the files of results alone."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from records import Row, recorded
from winnowgp.plots.style import COLOURS, saved, styled

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "scale.png"
MARKS: dict[str, Any] = {"marker": "o", "markersize": 4, "linewidth": 1.4}


def draw() -> Path:
    """Replace the picture of the documentation."""
    with styled():
        return saved(drawn(), PICTURE)


def drawn() -> Figure:
    """Time against rows, memory against rows, time against points."""
    figure = Figure(figsize=(9, 3))
    time, memory, size = figure.subplots(1, 3)
    rows, points, fits = (recorded(f"scale/{name}") for name in ("rows", "points", "fits"))
    lines = {"bound and gradient": "", "statistics": "statistics_", "choice": "selection_"}
    for ax, found, x in ((time, rows, "rows"), (size, points, "points")):
        for (name, prefix), colour in zip(
            lines.items(), ("posterior", "second", "inclusion"), strict=True
        ):
            _line(ax, found, x, f"{prefix}cpu_s", label=name, color=COLOURS[colour])
        ax.set(xscale="log", yscale="log", xlabel=x, ylabel="CPU seconds")
    time.set_title("128 points")
    time.legend(loc="upper left")
    K = [row["points"] for row in points]
    size.set_xticks(K, [str(k) for k in K])
    size.set_xticks([], minor=True)
    size.set_title(f"{points[0]['rows']:,} rows")
    for name, found, colour in (
        ("bound and gradient", rows, "posterior"),
        ("whole fit", fits, "points"),
    ):
        if found:
            _line(memory, found, "rows", "peak_mib", label=name, color=COLOURS[colour])
    style: dict[str, Any] = {"color": COLOURS["data"], "linewidth": 1, "linestyle": ":"}
    memory.axhline(rows[0]["imports_mib"], label="imports alone", **style)
    memory.set(xscale="log", xlabel="rows", ylabel="peak memory (MiB)", ylim=(0, None))
    memory.set_title("Memory, rows in a file")
    memory.legend(loc="best")
    return figure


def _line(ax: Axes, rows: list[Row], x: str, y: str, *, label: str, color: str) -> None:
    ax.plot([r[x] for r in rows], [r[y] for r in rows], label=label, color=color, **MARKS)
