"""Figures 3 and 4: a panel a level, a row of panels a group."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Literal

from matplotlib.figure import Figure

from winnowgp.experiments.level import CHOOSING, NAMES, Level, grouped
from winnowgp.plots import (
    COLOURS,
    PROCEDURES,
    ChosenSizes,
    SizePanel,
    draw_size_panel,
    saved,
    styled,
)

_COLOURS = {**PROCEDURES, "auto": COLOURS["second"]}
_MARKERS = {"paper": "o", "fast": "D", "auto": "s"}


def draw_levels(
    levels: Sequence[Level],
    path: Path,
    *,
    column: str,
    said: str,
    titles: Callable[[Level], str],
    scale: Literal["linear", "symlog"] = "linear",
) -> Path:
    """A column against the number of points: fixed numbers in grey, procedures in colour.

    Args:
        column: the quantity of the rows that is drawn.
        said: its name for the axis.
        titles: of each panel.
        scale: of the axis.
    """
    groups = [mine for _, mine in grouped(levels)]
    wide = max(len(mine) for mine in groups)
    with styled():
        figure = Figure(figsize=(2.6 * wide, 2.3 * len(groups) + 0.4))
        axes = figure.subplots(len(groups), wide, squeeze=False, sharex="row")
        for row, mine in zip(axes, groups, strict=True):
            for ax, level in zip(row, mine, strict=False):
                draw_size_panel(_panel(level, column, titles(level)), ax=ax)
                ax.set_yscale(scale)
            for ax in row[len(mine) :]:
                ax.set_axis_off()
            row[0].set_ylabel(said)
        for ax in axes[-1]:
            ax.set_xlabel("number of points")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return saved(figure, path)


def _panel(level: Level, column: str, title: str) -> SizePanel:
    sizes, curves = level.curves(column)
    by_size = list(zip(*curves, strict=True))
    return SizePanel(
        title=title,
        sizes=sizes,
        middle=[fmean(values) for values in by_size],
        low=[min(values) for values in by_size],
        high=[max(values) for values in by_size],
        name=NAMES["fixed"],
        chosen=[_chosen(level, kind, column) for kind in CHOOSING if level.of_kind(kind)],
    )


def _chosen(level: Level, kind: str, column: str) -> ChosenSizes:
    rows, numbers = level.of_kind(kind), level.numbers(kind).values()
    return ChosenSizes(
        name=NAMES[kind],
        colour=_COLOURS[kind],
        expected=fmean(numbers),
        sizes=[size for row in rows for size in row["kept"]],
        values=[value for row in rows for value in row[column]],
        marker=_MARKERS[kind],
    )
