"""Figure 5 from its rows: layers, the density that comes out, and points per layer over seeds."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from winnowgp.experiments.curves import curve_of, numbers
from winnowgp.experiments.procedures import PROCEDURE_NAMES
from winnowgp.experiments.runs import Row
from winnowgp.plots import (
    PROCEDURES,
    DensityMap,
    draw_curve,
    draw_density,
    draw_layer_sizes,
    saved,
    styled,
)


def square_wave_picture(rows: Sequence[Row], path: Path, *, drawn: int) -> Path:
    """A line of panels for each procedure, from the seed `drawn`; all seeds on the right."""
    chosen = [row for row in rows if row["kind"] in PROCEDURE_NAMES]
    shown = [row for row in chosen if row["seed"] == drawn]
    layers = len(shown[0]["layers"])
    with styled():
        figure = Figure(figsize=(14, 2.6 * len(shown)))
        grid = figure.add_gridspec(len(shown), layers + 2, width_ratios=[1] * layers + [1.5, 1])
        for line, row in enumerate(shown):
            axes = [figure.add_subplot(grid[line, column]) for column in range(layers + 1)]
            _draw_line(row, axes)
        right = figure.add_subplot(grid[:, -1])
        kinds = dict.fromkeys(row["kind"] for row in chosen)
        sizes = {k: [row["sizes"] for row in chosen if row["kind"] == k] for k in kinds}
        draw_layer_sizes(sizes, ax=right)
        right.set_title("points per layer, all seeds")
    return saved(figure, path)


def _draw_line(row: Row, axes: Sequence[Axes]) -> None:
    kind, density = row["kind"], row["density"]
    for number, (ax, curve) in enumerate(zip(axes, row["layers"], strict=False)):
        draw_curve(curve_of(curve), ax=ax, colour=PROCEDURES[kind])
        ax.set_title(f"layer {number + 1}: {len(curve['points'])} points")
        ax.set(xlabel="x" if number == 0 else f"output of layer {number}")
    axes[0].set_ylabel(PROCEDURE_NAMES[kind])
    found = DensityMap(
        numbers(density["x"]),
        numbers(density["y"]),
        numbers(density["shades"]),
        numbers(density["low"]),
        numbers(density["high"]),
    )
    draw_density(found, numbers(row["x"]), numbers(row["y"]), ax=axes[-1])
    axes[-1].set_ylim(density["y"][0], density["y"][-1])
    axes[-1].set_title(f"posterior density, test log density {row['log_density']:.2f}")
