"""Figures of predictions: posteriors of one and two inputs, effects of inputs, calibration."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from torch import Tensor

from winnowgp.plots.style import COLOURS, plain, styled
from winnowgp.report.summary import counted

# Uniform in lightness, and the same to every common colour vision.
_COLOUR_MAP, _LEVELS = "cividis", 12
_CYCLE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# Characters of a label beside an axis of a panel.
_LONGEST_LABEL = 24
_CALIBRATION_LABELS = {
    "interval": ("nominal level of the interval", "share of held-out rows within it"),
    "class": ("predicted probability", "observed frequency"),
}


@dataclass(frozen=True, slots=True)
class Curve:
    """A posterior of one input, evaluated on a grid."""

    grid: Float[Tensor, " G"]
    mean: Float[Tensor, " G"]
    sd: Float[Tensor, " G"]
    """Standard deviation along the grid."""
    points: Float[Tensor, " M"]
    """Locations of the inducing points."""
    heights: Float[Tensor, " M"]
    """Posterior mean at the inducing points."""


@dataclass(frozen=True, slots=True)
class Surface:
    """A predicted mean of two inputs on a grid, and the inducing points."""

    x: Float[Tensor, " G"]
    y: Float[Tensor, " H"]
    mean: Float[Tensor, "H G"]
    points: Float[Tensor, "M 2"]


@dataclass(frozen=True, slots=True)
class ClassMap:
    """The probability of the second of two classes on a grid of two inputs."""

    x: Float[Tensor, " G"]
    y: Float[Tensor, " H"]
    probability: Float[Tensor, "H G"]
    idle: Float[Tensor, "J 2"]
    """Candidates that were not selected, at their locations at the time of the selection."""
    points: Float[Tensor, "M 2"]
    """Inducing points."""


def draw_curve(curve: Curve, *, ax: Axes, colour: str = COLOURS["posterior"]) -> Axes:
    """Draw the mean, a band of two standard deviations, and the inducing points on the mean."""
    lower, upper = curve.mean - 2 * curve.sd, curve.mean + 2 * curve.sd
    ax.fill_between(
        curve.grid, lower, upper, color=colour, alpha=0.25, linewidth=0, label="mean ± 2 sd"
    )
    ax.plot(curve.grid, curve.mean, color=colour, linewidth=1.2)
    if len(curve.points):
        ax.scatter(
            curve.points,
            curve.heights,
            s=22,
            facecolors="white",
            edgecolors=COLOURS["points"],
            linewidths=1.1,
            zorder=3,
            label=counted(len(curve.points)),
        )
    return ax


def draw_posterior_1d(
    curve: Curve,
    x: Float[Tensor, " N"],
    y: Float[Tensor, " N"],
    *,
    ax: Axes,
    colour: str = COLOURS["posterior"],
) -> Axes:
    """Draw a posterior of one input over the data: mean, band and inducing points.

    The band has two standard deviations on either side of the mean.

    Args:
        curve: the posterior on a grid.
        x: inputs of the data.
        y: targets of the data.
        colour: colour of mean, band and inducing points.
    """
    ax.scatter(x, y, s=9, marker="x", linewidths=0.7, color=COLOURS["data"], label="data")
    draw_curve(curve, ax=ax, colour=colour)
    ax.set(xlabel="x", ylabel="y")
    return ax


def draw_processes(
    x: Float[np.ndarray, " G"],
    mean: Float[np.ndarray, "G Q"],
    sd: Float[np.ndarray, "G Q"],
    points: Sequence[Float[np.ndarray, " _"]],
    *,
    ax: Axes,
) -> Axes:
    """Draw the processes of a model along one input, each with its inducing points.

    Inducing points are marks below the curves, a row for each process.

    Args:
        x: grid of the input, in increasing order.
        mean: posterior means, from `predict_processes`.
        sd: posterior standard deviations; bands have two of them.
        points: inducing points of each process along the input.
    """
    lower, upper = mean - 2 * sd, mean + 2 * sd
    least, span = lower.min(), max(upper.max() - lower.min(), 1e-12)
    for q, own in enumerate(points):
        colour, label = _CYCLE[q % len(_CYCLE)], f"process {q + 1}: {counted(len(own))}"
        ax.fill_between(x, lower[:, q], upper[:, q], color=colour, alpha=0.2, linewidth=0)
        ax.plot(x, mean[:, q], color=colour, linewidth=1.2, label=label)
        height = least - (0.08 + 0.06 * q) * span
        ax.scatter(own, [height] * len(own), marker="|", s=30, color=colour)
    ax.set(xlabel="x", title="processes and their inducing points")
    ax.legend(fontsize="small")
    return ax


def draw_surface_2d(
    surface: Surface, X: Float[Tensor, "N 2"], targets: Float[Tensor, " N"], *, ax: Axes
) -> Axes:
    """Draw contours of the mean, the rows in the colour of their target, and inducing points.

    A row that has the colour of its surroundings is predicted well. `X` may have no rows.
    """
    grid = surface.x.numpy(), surface.y.numpy(), surface.mean.numpy()
    ends = [surface.mean.min(), surface.mean.max()]
    ends += [targets.min(), targets.max()] if len(X) else []
    low, high = min(ends).item(), max(ends).item()
    contours = ax.contourf(*grid, levels=_LEVELS, cmap=_COLOUR_MAP, vmin=low, vmax=high)
    ax.contour(*grid, levels=contours.levels, colors="white", linewidths=0.4, linestyles="solid")
    rows = ax.scatter(
        X[:, 0],
        X[:, 1],
        c=targets,
        cmap=_COLOUR_MAP,
        vmin=low,
        vmax=high,
        s=16,
        edgecolors="white",
        linewidths=0.4,
        label="data" if len(X) else None,
    )
    _draw_inducing_points(surface.points, ax=ax)
    ax.figure.colorbar(rows if len(X) else contours, ax=ax, label="mean")
    return ax


def draw_classes_2d(
    classes: ClassMap, X: Float[Tensor, "N 2"], labels: Int[Tensor, " N"], *, ax: Axes
) -> Axes:
    """Draw the probability, its contour at one half, the rows, candidates and inducing points."""
    first, second = COLOURS["posterior"], COLOURS["inclusion"]
    extent = (classes.x[0].item(), classes.x[-1].item(), classes.y[0].item(), classes.y[-1].item())
    ax.imshow(
        classes.probability.numpy(),
        origin="lower",
        extent=extent,
        cmap=LinearSegmentedColormap.from_list("classes", [first, "#ffffff", second]),
        vmin=0,
        vmax=1,
        alpha=0.45,
        aspect="auto",
    )
    grid = classes.x.numpy(), classes.y.numpy(), classes.probability.numpy()
    ax.contour(*grid, levels=[0.5], colors="black", linewidths=1.2)
    for label, colour, marker in ((0, first, "o"), (1, second, "s")):
        rows = X[labels == label]
        ax.scatter(rows[:, 0], rows[:, 1], s=7, c=colour, marker=marker, alpha=0.7, linewidths=0)
    ax.scatter(
        classes.idle[:, 0],
        classes.idle[:, 1],
        s=14,
        facecolors="none",
        edgecolors=COLOURS["data"],
        linewidths=0.6,
        label=f"{len(classes.idle)} candidates not selected",
    )
    _draw_inducing_points(classes.points, ax=ax, fill="white")
    # Candidates outside the grid must not widen the axes.
    ax.set(xlim=extent[:2], ylim=extent[2:])
    return ax


def draw_calibration(pairs: Sequence[Sequence[float]], *, kind: str, ax: Axes) -> Axes:
    """Draw nominal against observed shares, and the diagonal of perfect calibration.

    Args:
        pairs: nominal and observed share of each level.
        kind: "interval" for central intervals, "class" for class probabilities.
    """
    nominal, observed = zip(*pairs, strict=True)
    ax.plot([0, 1], [0, 1], color=COLOURS["data"], linewidth=0.8, linestyle="--", label="perfect")
    colour = COLOURS["posterior"]
    ax.plot(nominal, observed, color=colour, linewidth=1.4, marker="o", ms=4, label="model")
    xlabel, ylabel = _CALIBRATION_LABELS[kind]
    ax.set(xlim=(0, 1), ylim=(0, 1), xlabel=xlabel, ylabel=ylabel)
    ax.set_aspect("equal")
    ax.set_title("Calibration on held-out rows")
    ax.legend(loc="upper left")
    return ax


def draw_effects(effects: Sequence[Any], *, target: str) -> Figure:
    """Draw the effect of each input on the prediction, one panel per input.

    Grey bars below the curves show where the rows of the table are.

    Args:
        effects: `Summary["effects"]`, or `Summary["terms"]`.
        target: the name of the target.
    """
    across = min(len(effects), 3)
    down = ceil(len(effects) / across)
    with styled():
        figure = Figure(figsize=(3.6 * across, 2.7 * down))
        panels = figure.subplots(down, across, squeeze=False, sharey=True).ravel()
        for ax, effect in zip(panels, effects, strict=False):
            _draw_effect(effect, ax=ax)
        for ax in panels[len(effects) :]:
            ax.set_visible(False)
        for ax in panels[::across]:
            ax.set_ylabel(shortened(target))
        if len(effects[0]["curves"]) > 1:
            panels[0].legend()
    return figure


def draw_importance(importance: Any, *, ax: Axes, most: int = 20) -> Axes:
    """Draw the importance of each column by permutation, with two standard errors.

    Args:
        importance: `Summary["importance"]`, or the result of `permutation_importance`.
        most: largest number of columns that are drawn.
    """
    columns = importance["columns"][:most]
    names = [shortened(column["column"]) for column in columns]
    rows = range(len(columns))
    errors = [2 * column["standard_error"] for column in columns]
    ax.barh(rows, [c["loss"] for c in columns], xerr=errors, color=COLOURS["posterior"], height=0.6)
    ax.axvline(0, color=COLOURS["data"], linewidth=0.8)
    ax.set_yticks(rows, names)
    ax.invert_yaxis()
    ax.set_xlabel(f"loss of {importance['measure']}")
    title = f"Columns permuted on {importance['rows']} held-out rows (± 2 standard errors)"
    # To the left of the axis, above the names: long names leave the axes little width.
    ax.set_title(title, x=0, ha="left", wrap=True)
    return ax


def shortened(text: str, most: int = _LONGEST_LABEL) -> str:
    """Return a text that fits beside an axis.

    >>> shortened("a" * 40)
    'aaaaaaaaaaaaaaaaaaaaaaa…'
    """
    return plain(text if len(text) <= most else f"{text[: most - 1]}…")


def date_axis(axis: Axis) -> None:
    """Show days since 1970, which is matplotlib's convention too, as dates."""
    locator = AutoDateLocator(minticks=3, maxticks=6)
    axis.set_major_locator(locator)
    axis.set_major_formatter(ConciseDateFormatter(locator))


def _draw_effect(effect: Any, *, ax: Axes) -> None:
    """Draw the prediction as one input changes, with a band of two standard deviations.

    If noise depends on the inputs, a lighter band with dotted ends holds 95 % of observations.
    """
    categorical = effect["kind"] == "category"
    at = range(len(effect["at"])) if categorical else effect["at"]
    for colour, curve in zip(_CYCLE, effect["curves"], strict=False):
        mean, label = curve["mean"], plain(curve["label"]) or None
        if categorical:
            error = None
            if curve["lower"]:
                below = [m - low for m, low in zip(mean, curve["lower"], strict=True)]
                above = [high - m for m, high in zip(mean, curve["upper"], strict=True)]
                error = [below, above]
            if "observed" in curve:
                ax.vlines(at, *curve["observed"], color=colour, linestyle="dotted", linewidth=1.0)
            ax.errorbar(at, mean, yerr=error, fmt="o", ms=4, color=colour, label=label)
            continue
        if "observed" in curve:
            ax.fill_between(at, *curve["observed"], color=colour, alpha=0.1, linewidth=0)
            for end in curve["observed"]:
                ax.plot(at, end, color=colour, linewidth=0.8, linestyle="dotted")
        if curve["lower"]:
            ax.fill_between(
                at, curve["lower"], curve["upper"], color=colour, alpha=0.25, linewidth=0
            )
        ax.plot(at, mean, color=colour, linewidth=1.4, label=label)
    ends = (-0.5, len(effect["at"]) - 0.5) if categorical else (at[0], at[-1])
    if categorical:
        # All of up to 15 labels fit beside each other.
        every = ceil(len(at) / 15)
        categories = [shortened(category, 14) for category in effect["at"]]
        ax.set_xticks(list(at)[::every], categories[::every], rotation=35, ha="right")
        ax.set_xlim(ends)
    if effect["kind"] == "date":
        date_axis(ax.xaxis)
    if effect["counts"]:
        _draw_density(effect["counts"], ends, ax=ax)
    if effect["term"]:
        ax.set_title(shortened(effect["term"]))
    note = f"\n({effect['note']})" if effect["note"] else ""
    ax.set_xlabel(f"{shortened(effect['column'], 34)}{note}")


def _draw_density(counts: Sequence[int], ends: tuple[float, float], *, ax: Axes) -> None:
    """Draw grey bars from the lower edge of the panel, up to a sixth of its height."""
    width = (ends[1] - ends[0]) / len(counts)
    most = max(*counts, 1)
    ax.bar(
        [ends[0] + i * width for i in range(len(counts))],
        [n / most / 6 for n in counts],
        width=0.95 * width,
        align="edge",
        color=COLOURS["data"],
        alpha=0.3,
        linewidth=0,
        zorder=0,
        transform=ax.get_xaxis_transform(),
    )


def _draw_inducing_points(points: Float[Tensor, "M 2"], *, ax: Axes, fill: str = "none") -> None:
    """Draw rings with a white rim, which are visible on any colour."""
    ax.scatter(
        points[:, 0],
        points[:, 1],
        s=46,
        facecolors=fill,
        edgecolors=COLOURS["points"],
        linewidths=1.4,
        path_effects=[withStroke(linewidth=3.0, foreground="white")],
        zorder=3,
        label=counted(len(points)),
    )
    ax.set(xlabel="first input", ylabel="second input")
