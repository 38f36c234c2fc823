"""Pictures of the comparison with other libraries: density and coverage against CPU seconds."""

from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

from measure import Row, grouped, mean
from winnowgp.plots.style import COLOURS, save_figure, styled

REACH = 4.0
"""A panel of densities ends this many times as far below the best one as their median."""

FAMILIES: dict[str, tuple[str, str, str]] = {
    "winnowgp": ("winnowgp", COLOURS["inclusion"], "o"),
    "gpflow-sgpr": ("GPflow SGPR, M = 32, 128, 512", COLOURS["posterior"], "s"),
    "gpytorch-svgp": ("GPyTorch SVGP, M = 32, 128, 512", COLOURS["second"], "D"),
    "gpytorch-exact": ("GPyTorch exact GP", "#CC79A7", "v"),
    "sklearn-gpr": ("scikit-learn GP", "#E69F00", "^"),
    "gpboost": ("GPBoost, Vecchia (VIF: open)", "#56B4E9", "P"),
    "catboost": ("CatBoost (stopped early: open)", "#999999", "<"),
    "ngboost": ("NGBoost (stopped early: open)", "#666666", "X"),
    "xgb-distribution": ("XGBDistribution", "#333333", ">"),
    "lightgbm": ("LightGBM", "#333333", "p"),
}
"""Name, colour and marker of the methods whose names begin so."""
OURS = "winnowgp"
SWEPT = ("gpflow-sgpr", "gpytorch-svgp")
OPEN = ("-stopped", "-vif")
"""Ends of the names of methods whose markers are open."""

PICTURES = {
    "peers-density": ("log_density", "test log density"),
    "peers-coverage": ("coverage_90", "share within 90 % intervals"),
}
"""Column and label of each file."""

Value = Callable[[str, str, str], float]
"""Returns the value of a method: table, method and column in, number out."""


def family(method: str) -> str:
    """Return the family of a method.

    >>> family("gpflow-sgpr-32"), family("catboost-stopped")
    ('gpflow-sgpr', 'catboost')
    """
    return next(start for start in FAMILIES if method.startswith(start))


def draw(rows: Sequence[Row], tables: Sequence[str], folder: Path, *, value: Value) -> None:
    """Draw a panel per table: density and coverage against the CPU seconds of the fit.

    Markers and not labels tell methods apart, because methods are often close to each other; ours
    is above the others. Fits on a GPU, whose seconds are those of a clock, have a ring. Densities
    far below the others are at the lower edge of a panel, with their value.

    Args:
        rows: fits; those that failed are left out.
        tables: tables with a panel, in this order.
        folder: folder of the pictures.
        value: returns the mean of a column that is shown for a method.
    """
    good = [row for row in rows if "error" not in row]
    for file, (column, label) in PICTURES.items():
        with styled():
            lines = -(-len(tables) // 3)
            figure = Figure(figsize=(10.5, 3.1 * lines + 0.9))
            axes = figure.subplots(lines, 3, squeeze=False).flatten()
            shown: set[str] = set()
            for ax, table in zip(axes, tables, strict=False):
                own = [row for row in good if row["table"] == table and column in row]
                shown |= _draw_panel(ax, own, table, column, value)
                ax.set(title=table, xscale="log", xlabel="CPU seconds of the fit", ylabel=label)
                ax.xaxis.set_minor_formatter(NullFormatter())
            for ax in axes[len(tables) :]:
                ax.set_axis_off()
            handles = [_handle(start) for start in FAMILIES if start in shown]
            ring = _ring(label="on a GPU, seconds of a clock")
            if any("device" in row for row in good):
                handles.append(Line2D([], [], **ring))
            figure.legend(handles=handles, loc="outside lower center", ncols=4)
        save_figure(figure, folder / f"{file}.png")


def _draw_panel(ax: Axes, rows: Sequence[Row], table: str, column: str, value: Value) -> set[str]:
    """Draw the methods of one table, and return their families."""
    points = {
        method: (
            mean(row.get("cpu_s") or row["wall_s"] for row in own),
            value(table, method, column),
        )
        for (method,), own in grouped(rows, "method").items()
    }
    on_gpu = {row["method"] for row in rows if "device" in row}
    lowest = lower_edge([y for _, y in points.values()]) if column == "log_density" else -inf
    lines: dict[str, list[tuple[float, float]]] = {}
    for method, (seconds, height) in points.items():
        start = family(method)
        _, colour, marker = FAMILIES[start]
        inside = "white" if method.endswith(OPEN) else colour
        # An artist at the edge of the axes is not clipped.
        style: dict[str, Any] = {"color": colour, "ls": "", "ms": 6, "zorder": 3, "clip_on": False}
        if start == OURS:
            style |= {"ms": 8, "zorder": 4}
        at = seconds, max(height, lowest)
        ax.plot(*at, marker=marker, markerfacecolor=inside, **style)
        if method in on_gpu:
            ax.plot(*at, **_ring())
        if height < lowest:
            label = f"{height:.2f}".replace("-", "−")
            offset: dict[str, Any] = {"xytext": (0, 6), "textcoords": "offset points"}
            ax.annotate(label, at, ha="center", fontsize=7, color=colour, **offset)
        else:
            lines.setdefault(start, []).append(at)
    for start, curve in lines.items():
        if start in SWEPT:
            ax.plot(*zip(*sorted(curve), strict=True), color=FAMILIES[start][1], lw=1)
    if lowest > -inf:
        ax.set_ylim(lowest, None)
    if column == "coverage_90":
        ax.axhline(0.9, color=COLOURS["points"], linewidth=0.8)
    return {family(method) for method in points}


def lower_edge(densities: Sequence[float]) -> float:
    """Return the lowest density of a panel; −∞ if all are shown.

    >>> lower_edge([1.0, 0.9, 0.8, -3.0]), lower_edge([1.0, 0.8, 0.6])
    (0.4, -inf)
    """
    if not densities:
        return -inf
    best = max(densities)
    edge = best - REACH * (best - median(densities))
    return round(edge, 10) if min(densities) < edge else -inf


def _handle(start: str) -> Line2D:
    name, colour, marker = FAMILIES[start]
    style = "-" if start in SWEPT else ""
    return Line2D([], [], color=colour, marker=marker, ms=6, ls=style, lw=1, label=name)


def _ring(**options: Any) -> dict[str, Any]:
    return {"marker": "o", "ms": 11, "mfc": "none", "mec": "black", "mew": 0.8, "ls": "", **options}
