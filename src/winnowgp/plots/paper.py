"""Panels of the paper's figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from winnowgp.plots.regression import Curve, draw_posterior_1d
from winnowgp.plots.style import COLOURS, PROCEDURES, styled

# Figure 1 of the paper: all candidates, inclusion midway, the few that remain.


@dataclass(frozen=True, slots=True)
class Midway:
    """The point process in the middle of learning, with a few draws from it."""

    step: int
    candidates: Float[Tensor, " K"]
    inclusion: Float[Tensor, " K"]
    draws: Bool[Tensor, "S K"]


@dataclass(frozen=True, slots=True)
class Illustration:
    """Three moments of a one-dimensional fit."""

    x: Float[Tensor, " N"]
    y: Float[Tensor, " N"]
    before: Curve
    midway: Midway
    after: Curve
    fast: Curve | None = None
    """What the fast schedule keeps of the same candidates, if that is to be shown."""


def draw_illustration(result: Illustration) -> Figure:
    """Panels from left to right, the second one with the sampled subsets underneath."""
    curves = [(result.before, "(a) all candidates", "paper")]
    curves += [(result.after, "(c) after selection and refit", "paper")]
    if result.fast is not None:
        curves.append((result.fast, "(d) the same candidates, fast schedule", "fast"))
    with styled():
        figure = Figure(figsize=(13 / 3 * (len(curves) + 1), 3.8))
        grid = figure.add_gridspec(2, len(curves) + 1, height_ratios=[3, 1])
        left = figure.add_subplot(grid[:, 0])
        top = figure.add_subplot(grid[0, 1], sharex=left)
        bottom = figure.add_subplot(grid[1, 1], sharex=left)
        right = [
            figure.add_subplot(grid[:, column], sharex=left, sharey=left)
            for column in range(2, len(curves) + 1)
        ]
        for ax, (curve, title, procedure) in zip([left, *right], curves, strict=True):
            colour = PROCEDURES[procedure]
            draw_posterior_1d(curve, result.x, result.y, ax=ax, colour=colour)
            ax.set_title(title)
            ax.legend(loc="upper left")
        _draw_inclusion(result.midway, top)
        _draw_draws(result.midway, bottom)
    return figure


def _draw_inclusion(midway: Midway, ax: Axes) -> None:
    ax.vlines(midway.candidates, 0, midway.inclusion, color=COLOURS["inclusion"], linewidth=1)
    ax.scatter(midway.candidates, midway.inclusion, s=20, color=COLOURS["inclusion"], zorder=3)
    ax.set(ylim=(-0.03, 1.08), ylabel="probability of inclusion")
    ax.set_title(f"(b) inclusion after {midway.step} steps, and sampled subsets")
    ax.tick_params(labelbottom=False)


def _draw_draws(midway: Midway, ax: Axes) -> None:
    for row, draw in enumerate(midway.draws):
        chosen = midway.candidates[draw]
        ax.scatter(chosen, [row] * len(chosen), s=16, color=COLOURS["points"])
    labels = [f"{int(draw.sum())} points" for draw in midway.draws]
    ax.set_yticks(range(len(labels)), labels)
    ax.set(xlabel="x", ylim=(len(labels) - 0.5, -0.5))


# A deep process of one dimension, layer by layer, and the density that comes out.


# Of Okabe and Ito's palette, what the two procedures leave.
_LAYERS = ("#009E73", "#CC79A7", "#E69F00", "#7f7f7f")


@dataclass(frozen=True, slots=True)
class DensityMap:
    """A predictive density on a grid."""

    x: Float[Tensor, " X"]
    y: Float[Tensor, " Y"]
    density: Float[Tensor, "Y X"]
    low: Float[Tensor, " X"]
    """The 5 % quantile at each x."""
    high: Float[Tensor, " X"]
    """The 95 % quantile at each x."""


def draw_density(
    found: DensityMap, x: Float[Tensor, " N"], y: Float[Tensor, " N"], *, ax: Axes
) -> Axes:
    """The density as shades, its central nine tenths as lines, and the data."""
    grid = (found.x.numpy(), found.y.numpy(), found.density.numpy())
    ax.pcolormesh(*grid, cmap="Blues", shading="auto", rasterized=True)
    for edge, label in ((found.low, "5 % and 95 %"), (found.high, None)):
        ax.plot(found.x, edge, color=COLOURS["posterior"], linewidth=0.8, label=label)
    ax.scatter(x, y, s=7, marker="x", linewidths=0.6, color=COLOURS["inclusion"], label="data")
    ax.set(xlabel="x", ylabel="y")
    return ax


def draw_layer_sizes(sizes: Mapping[str, Sequence[Sequence[int]]], *, ax: Axes) -> Axes:
    """Numbers of points by layer: one group a label, one dot a run, and their mean.

    Args:
        sizes: for each label the sizes of every run, one number a layer.
    """
    layers = max(len(run) for runs in sizes.values() for run in runs)
    for layer in range(layers):
        offset = (layer - (layers - 1) / 2) * 0.22
        colour = _LAYERS[layer % len(_LAYERS)]
        for place, runs in enumerate(sizes.values()):
            values = [run[layer] for run in runs]
            named = f"layer {layer + 1}" if place == 0 else None
            where = [place + offset] * len(values)
            ax.scatter(where, values, s=14, color=colour, alpha=0.6, linewidths=0, label=named)
            mean = sum(values) / len(values)
            ax.hlines(mean, place + offset - 0.08, place + offset + 0.08, color=colour)
    ax.set_xticks(range(len(sizes)), list(sizes))
    ax.set(ylabel="inducing points", ylim=(0, None))
    ax.legend()
    return ax


# What a number of points buys when somebody sets it, and what procedures chose.


@dataclass(frozen=True, slots=True)
class ChosenSizes:
    """Sets that one procedure kept."""

    name: str
    colour: str
    expected: float
    """Where the line stands."""
    sizes: Sequence[float]
    values: Sequence[float]
    """A dot for each set."""
    marker: str = "o"


@dataclass(frozen=True, slots=True)
class SizePanel:
    """A curve with a band, and procedures beside it."""

    title: str
    sizes: Sequence[float]
    middle: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    name: str
    chosen: Sequence[ChosenSizes] = field(default_factory=list)


def draw_size_panel(panel: SizePanel, *, ax: Axes) -> Axes:
    """The curve in grey, each procedure with a dashed line and its dots in a colour of its own."""
    grey = COLOURS["data"]
    ax.fill_between(panel.sizes, panel.low, panel.high, color=grey, alpha=0.25, linewidth=0)
    ax.plot(panel.sizes, panel.middle, color=grey, linewidth=1.4, label=panel.name)
    for found in panel.chosen:
        ax.axvline(found.expected, color=found.colour, linestyle="--", linewidth=1)
        ax.scatter(
            found.sizes,
            found.values,
            s=16,
            marker=found.marker,
            facecolors="none",
            edgecolors=found.colour,
            linewidths=0.9,
            zorder=3,
            label=found.name,
        )
    ax.set_title(panel.title)
    return ax


# What accuracy costs: one dot a model.


@dataclass(frozen=True, slots=True)
class Tradeoff:
    """Models of one kind."""

    name: str
    cost: list[float]
    accuracy: list[float]
    labels: list[str]
    """What stands beside each dot; empty for none."""


def draw_tradeoff(
    grid: Tradeoff,
    ours: list[Tradeoff],
    *,
    ax: Axes,
    colours: Sequence[str] = (COLOURS["inclusion"], COLOURS["posterior"], COLOURS["second"]),
) -> Axes:
    """A grid in grey, and procedures that chose for themselves in colour, joined by a line."""
    ax.scatter(grid.cost, grid.accuracy, s=16, color=COLOURS["data"], alpha=0.7, label=grid.name)
    best = max(ours, key=lambda each: max(each.accuracy, default=-inf), default=None)
    for colour, found in zip(colours, ours, strict=False):
        ax.plot(
            found.cost, found.accuracy, color=colour, marker="o", markersize=5, label=found.name
        )
        # Above the uppermost line and below the others, where lines that rise leave room.
        beside: dict[str, Any] = {"xytext": (-5, 4), "ha": "right"}
        if len(ours) == 1 or found is not best:
            beside = {"xytext": (5, -9), "ha": "left"}
        for x, y, label in zip(found.cost, found.accuracy, found.labels, strict=False):
            ax.annotate(
                label, (x, y), textcoords="offset points", fontsize=7, color=colour, **beside
            )
    ax.legend(loc="lower right")
    return ax


# A quantity along a way, as the middle and the range of several runs.


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One line."""

    name: str
    colour: str
    x: Sequence[float]
    middle: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    dashed: bool = False


def draw_trajectories(trajectories: Sequence[Trajectory], *, ax: Axes) -> Axes:
    """Lines with dots where something was measured, and a band from the lowest to the highest."""
    for each in trajectories:
        ax.fill_between(each.x, each.low, each.high, color=each.colour, alpha=0.2, linewidth=0)
        ax.plot(
            each.x,
            each.middle,
            color=each.colour,
            linestyle="--" if each.dashed else "-",
            linewidth=1.3,
            marker="o",
            markersize=3,
            label=each.name,
        )
    return ax
