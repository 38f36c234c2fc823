"""Plots of fitted functions: posterior, effects, surfaces, calibration."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.dates import ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from torch import Tensor

from winnowgp.plots.style import COLOURS, plain, styled

# Kept points over a map of two inputs.


def draw_kept_points(points: Float[Tensor, "M 2"], *, ax: Axes, fill: str = "none") -> None:
    """Rings with a white rim, to be seen on any shade, and what the axes are."""
    ax.scatter(
        points[:, 0],
        points[:, 1],
        s=46,
        facecolors=fill,
        edgecolors=COLOURS["points"],
        linewidths=1.4,
        path_effects=[withStroke(linewidth=3.0, foreground="white")],
        zorder=3,
        label=f"{len(points)} inducing points",
    )
    ax.set(xlabel="first input", ylabel="second input")


# A one-dimensional fit: data, posterior, inducing points.


@dataclass(frozen=True, slots=True)
class Curve:
    """A posterior along a grid, and its inducing points with the mean there."""

    grid: Float[Tensor, " G"]
    mean: Float[Tensor, " G"]
    sd: Float[Tensor, " G"]
    points: Float[Tensor, " M"]
    heights: Float[Tensor, " M"]


def draw_curve(curve: Curve, *, ax: Axes, colour: str = COLOURS["posterior"]) -> Axes:
    """A mean with a band of two standard deviations, and the points on it, if it has any."""
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
            label=f"{len(curve.points)} inducing points",
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
    """The curve over the data."""
    ax.scatter(x, y, s=9, marker="x", linewidths=0.7, color=COLOURS["data"], label="data")
    draw_curve(curve, ax=ax, colour=colour)
    ax.set(xlabel="x", ylabel="y")
    return ax


# Whether probabilities mean what they say.


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


# What each input does.


_CYCLE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def draw_effects(effects: Sequence[Any], *, target: str) -> Figure:
    """A panel an input, up to three abreast.

    Args:
        effects: `Summary["effects"]`.
        target: what is predicted.
    """
    across = min(len(effects), 3)
    down = ceil(len(effects) / across)
    with styled():
        figure = Figure(figsize=(3.6 * across, 2.7 * down))
        panels = figure.subplots(down, across, squeeze=False, sharey=True).ravel()
        for ax, effect in zip(panels, effects, strict=False):
            draw_effect(effect, ax=ax)
        for ax in panels[len(effects) :]:
            ax.set_visible(False)
        for ax in panels[::across]:
            ax.set_ylabel(plain(target))
        if len(effects[0]["curves"]) > 1:
            panels[0].legend()
    return figure


def draw_effect(effect: Any, *, ax: Axes) -> Axes:
    """The prediction as one input changes, with a band of two standard deviations."""
    words = effect["kind"] == "words"
    at = range(len(effect["at"])) if words else effect["at"]
    for colour, curve in zip(_CYCLE, effect["curves"], strict=False):
        label = plain(curve["label"]) or None
        if words:
            error = None
            if curve["lower"]:
                error = [
                    [m - low for m, low in zip(curve["mean"], curve["lower"], strict=True)],
                    [high - m for m, high in zip(curve["mean"], curve["upper"], strict=True)],
                ]
            ax.errorbar(at, curve["mean"], yerr=error, fmt="o", ms=4, color=colour, label=label)
            continue
        if curve["lower"]:
            ax.fill_between(
                at, curve["lower"], curve["upper"], color=colour, alpha=0.25, linewidth=0
            )
        ax.plot(at, curve["mean"], color=colour, linewidth=1.4, label=label)
    if words:
        ax.set_xticks(
            list(at), [plain(word[:12]) for word in effect["at"]], rotation=30, ha="right"
        )
        ax.set_xlim(-0.5, len(effect["at"]) - 0.5)
    if effect["kind"] == "date":
        ax.xaxis_date()  # days since 1970, as here
        ax.xaxis.set_major_formatter(ConciseDateFormatter(ax.xaxis.get_major_locator()))
    ax.set_xlabel(plain(effect["column"]))
    return ax


# A two-dimensional regression: the mean as contours, data in its colours, kept points.


# Even in lightness from end to end, and the same to every common colour vision.
_SHADES = "cividis"

_LEVELS = 12


@dataclass(frozen=True, slots=True)
class Surface:
    """A predicted mean on a grid, and where the points that carry it are."""

    x: Float[Tensor, " G"]
    y: Float[Tensor, " H"]
    mean: Float[Tensor, "H G"]
    points: Float[Tensor, "M 2"]


def draw_surface_2d(
    found: Surface, X: Float[Tensor, "N 2"], targets: Float[Tensor, " N"], *, ax: Axes
) -> Axes:
    """Contours of the mean, rows in the colour of what was observed there, points as rings.

    A row that disappears into its surroundings is predicted well. There may be no rows at all.
    """
    surface = found.x.numpy(), found.y.numpy(), found.mean.numpy()
    ends = [found.mean.min(), found.mean.max(), *([targets.min(), targets.max()] if len(X) else [])]
    low, high = min(ends).item(), max(ends).item()
    filled = ax.contourf(*surface, levels=_LEVELS, cmap=_SHADES, vmin=low, vmax=high)
    ax.contour(*surface, levels=filled.levels, colors="white", linewidths=0.4, linestyles="solid")
    rows = ax.scatter(
        X[:, 0],
        X[:, 1],
        c=targets,
        cmap=_SHADES,
        vmin=low,
        vmax=high,
        s=16,
        edgecolors="white",
        linewidths=0.4,
        label="data" if len(X) else None,
    )
    draw_kept_points(found.points, ax=ax)
    ax.figure.colorbar(rows if len(X) else filled, ax=ax, label="mean")
    return ax


# A two-dimensional classification: probabilities, the boundary, candidates and kept points.


@dataclass(frozen=True, slots=True)
class ClassMap:
    """Probability of the second of two classes on a grid, and where points may be and are."""

    x: Float[Tensor, " G"]
    y: Float[Tensor, " H"]
    probability: Float[Tensor, "H G"]
    idle: Float[Tensor, "J 2"]
    """Candidates that were not kept, where they stood when the choice was made."""
    points: Float[Tensor, "M 2"]


def draw_classes_2d(
    found: ClassMap, X: Float[Tensor, "N 2"], labels: Int[Tensor, " N"], *, ax: Axes
) -> Axes:
    """Rows in two colours over the probability, its contour at one half, idle candidates as small
    rings, kept points as large ones."""
    first, second = COLOURS["posterior"], COLOURS["inclusion"]
    shades = LinearSegmentedColormap.from_list("classes", [first, "#ffffff", second])
    extent = (found.x[0].item(), found.x[-1].item(), found.y[0].item(), found.y[-1].item())
    ax.imshow(
        found.probability.numpy(),
        origin="lower",
        extent=extent,
        cmap=shades,
        vmin=0,
        vmax=1,
        alpha=0.45,
        aspect="auto",
    )
    surface = found.x.numpy(), found.y.numpy(), found.probability.numpy()
    ax.contour(*surface, levels=[0.5], colors="black", linewidths=1.2)
    for label, colour, marker in ((0, first, "o"), (1, second, "s")):
        rows = X[labels == label]
        ax.scatter(rows[:, 0], rows[:, 1], s=7, c=colour, marker=marker, alpha=0.7, linewidths=0)
    ax.scatter(
        found.idle[:, 0],
        found.idle[:, 1],
        s=14,
        facecolors="none",
        edgecolors=COLOURS["data"],
        linewidths=0.6,
        label=f"{len(found.idle)} candidates not kept",
    )
    draw_kept_points(found.points, ax=ax, fill="white")
    # Candidates that wandered off the map do not stretch it.
    ax.set(xlim=extent[:2], ylim=extent[2:])
    return ax
