"""Calibration: coverage of central intervals and PIT histograms, from quantiles of predictions."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from measure import Row, markdown, mean

Values = NDArray[np.float64]

COVERAGE = (0.5, 0.9, 0.95, 0.99)
"""Probabilities of the central intervals."""
DECILES = tuple(round(0.1 * i, 1) for i in range(1, 10))
LEVELS = tuple(sorted({*DECILES, *(round(0.5 + s * c / 2, 4) for c in COVERAGE for s in (-1, 1))}))
"""Levels of the quantiles that coverage and histogram need."""


def calibration(quantiles: Values, y: Values) -> Row:
    """Return the coverage of central intervals, and the shares of rows between deciles.

    The shares are a histogram of the probability integral transform, F(y), with ten bins: 0.1 each
    if predictions are calibrated. A value that equals quantiles counts as covered, and belongs to
    the first bin that it ends.

    >>> y = np.array([-3.0, 0.0, 0.09, 3.0])
    >>> row = calibration(np.tile(np.array(LEVELS)[:, None] - 0.5, 4), y)
    >>> row["coverage_90"], row["pit"]
    (0.5, [0.25, 0.0, 0.0, 0.0, 0.25, 0.25, 0.0, 0.0, 0.0, 0.25])

    Args:
        quantiles: of each row at `LEVELS`, `[Q N]`.
        y: targets `[N]`.
    """
    at = dict(zip(LEVELS, quantiles, strict=True))
    row: Row = {}
    for share in COVERAGE:
        low, high = (at[round(0.5 + side * share / 2, 4)] for side in (-1, 1))
        row[f"coverage_{round(100 * share)}"] = float(((low <= y) & (y <= high)).mean())
    bins = np.sum([y > at[level] for level in DECILES], axis=0)
    row["pit"] = [float(np.mean(bins == number)) for number in range(10)]
    return row


def coverage_tables(
    groups: Mapping[tuple[Any, ...], Sequence[Row]], order: Sequence[str] = ()
) -> str:
    """Return a heading and a Markdown table of the mean coverage of each interval: a line per
    method and a column per table.

    Args:
        groups: rows by table and method.
        order: methods that come first, in this order.
    """
    tables, methods = _names(groups, order)

    def covered(table: str, method: str, share: float) -> str:
        rows = groups.get((table, method), ())
        return f"{mean(r[f'coverage_{round(100 * share)}'] for r in rows):.2f}" if rows else ""

    header = ["method", *(f">{table}" for table in tables)]
    parts = []
    for share in COVERAGE:
        lines = [[f"`{m}`", *(covered(table, m, share) for table in tables)] for m in methods]
        parts += [f"### {round(100 * share)} % intervals", markdown(header, lines)]
    return "\n\n".join(parts)


def _names(
    groups: Mapping[tuple[Any, ...], Sequence[Row]], order: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the tables and the methods of groups."""
    tables, methods = (list(dict.fromkeys(key[i] for key in groups)) for i in (0, 1))
    known = [method for method in order if method in methods]
    return tables, [*known, *(method for method in methods if method not in known)]


def draw_histograms(
    groups: Mapping[tuple[Any, ...], Sequence[Row]], path: Path, order: Sequence[str] = ()
) -> None:
    """Draw the mean PIT histogram of each group: a row per method, a column per table.

    Args:
        groups: rows by table and method.
        path: the file.
        order: methods that come first, in this order.
    """
    from matplotlib.figure import Figure

    from winnowgp.plots.style import COLOURS, save_figure, styled

    tables, methods = _names(groups, order)
    with styled():
        figure = Figure(figsize=(1.6 * len(tables) + 1, 0.75 * len(methods) + 0.6))
        axes = figure.subplots(len(methods), len(tables), squeeze=False, sharex=True, sharey=True)
        for (table, method), rows in groups.items():
            shares = np.mean([row["pit"] for row in rows], axis=0)
            ax = axes[methods.index(method), tables.index(table)]
            ax.bar(np.arange(10) + 0.5, shares, width=0.9, color=COLOURS["posterior"])
        for i, method in enumerate(methods):
            axes[i, 0].set_ylabel(method, rotation=0, ha="right", va="center")
        for j, table in enumerate(tables):
            axes[0, j].set_title(table)
        for ax in axes.flat:
            if not ax.patches:
                # Its label may be that of the row.
                ax.spines[:].set_visible(False)
                ax.set(xticks=[], yticks=[])
                continue
            ax.axhline(0.1, color=COLOURS["data"], linewidth=0.8)
            ax.set(xticks=[], yticks=[], ylim=(0, 0.35))
        figure.supxlabel("share of test rows between predicted deciles; 0.1 each if calibrated")
    save_figure(figure, path)
