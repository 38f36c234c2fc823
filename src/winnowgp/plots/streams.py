"""Figures of a stream: size, log density and seconds of each batch, and which points left."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy import ndarray

from winnowgp.errors import InputError
from winnowgp.plots.style import COLOURS, Animation
from winnowgp.report.summary import counted

# Of a batch before it was learnt; a longer label would not fit beside small axes.
_DENSITY = "log density\n(nats)"


def draw_stream(batches: Sequence[Any], axes: Sequence[Axes], *, first: int = 1) -> Sequence[Axes]:
    """Draw the inducing points, log density and seconds of each batch, one below the other.

    The log density is that of the batch before it was learnt, per observation.

    Args:
        batches: records of the batches, such as `batches_` of an estimator.
        axes: three axes.
        first: number of the first of these batches.
    """
    points, density, seconds = axes
    numbers = range(first, first + len(batches))
    points.plot(numbers, [b.points for b in batches], color=COLOURS["points"], label="in use")
    points.bar(numbers, [b.added for b in batches], color=COLOURS["posterior"], label="added")
    points.bar(numbers, [-b.dropped for b in batches], color=COLOURS["data"], label="dropped")
    points.set_ylabel("inducing points")
    points.legend(loc="upper left", fontsize=8)
    density.plot(numbers, [b.log_density for b in batches], color=COLOURS["posterior"])
    density.set_ylabel(_DENSITY)
    seconds.plot(numbers, [b.seconds for b in batches], color=COLOURS["posterior"])
    seconds.set(ylabel="seconds", xlabel="batch", ylim=(0, None))
    for ax in axes:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return axes


def draw_point_history(
    history: Sequence[Float[ndarray, "_ D"]],
    ids: Sequence[Int[ndarray, " _"]],
    *,
    ax: Axes,
    column: int = 0,
) -> Axes:
    """Draw one coordinate of the inducing points after each batch.

    A line joins the locations of a point before and after a batch; those that left are crosses.

    Args:
        history: `inducing_points_` after each batch.
        ids: `point_ids_` after each batch.
        column: the coordinate.
    """
    before: dict[int, float] = {}
    for number, (locations, own) in enumerate(zip(history, ids, strict=True), start=1):
        here = dict(zip(own.tolist(), locations[:, column].tolist(), strict=True))
        for point in here.keys() & before.keys():
            path = [before[point], here[point]]
            ax.plot([number - 1, number], path, color=COLOURS["data"], linewidth=0.6, zorder=1)
        ax.scatter([number] * len(here), [*here.values()], s=9, color=COLOURS["points"])
        left = [place for point, place in before.items() if point not in here]
        ax.scatter([number] * len(left), left, s=20, marker="x", color=COLOURS["inclusion"])
        before = here
    ax.set(xlabel="batch", ylabel="location")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return ax


@final
@dataclass(frozen=True, slots=True)
class StreamFrame:
    """A model after one batch of a stream, for one frame of an animation.

    Two coordinates are drawn: two of several input columns, or one input column and the target.
    """

    rows: Float[ndarray, "N 2"]
    """Rows of the batch."""
    points: Float[ndarray, "M 2"]
    """Inducing points after the batch."""
    ids: Int[ndarray, " M"]
    """Their numbers."""
    log_density: float
    """Mean log density of the batch before it was learnt, in nats."""
    curve: Float[ndarray, "G 3"] | None
    """Inputs, means and standard deviations of new observations, for one input column."""
    labels: tuple[str, str]
    """Names of the coordinates."""

    @classmethod
    def of(
        cls,
        model: Any,
        X: Float[ndarray, "N D"],
        y: Any,
        *,
        columns: tuple[int, int] = (0, 1),
        grid: Float[ndarray, " G"] | None = None,
    ) -> "StreamFrame":
        """Return the frame of an estimator that has just learnt a batch with `partial_fit`.

        Args:
            model: the estimator; a `SparseGPRegressor` of one target if there is one input column.
            X: inputs of the batch.
            y: targets of the batch.
            columns: the columns to draw, if there are several.
            grid: inputs at which to predict, if there is one input column; None to draw no curve.
        """
        Z, ids, density = model.inducing_points_, model.point_ids_, model.batches_[-1].log_density
        if X.shape[1] > 1:
            names = (f"input {columns[0] + 1}", f"input {columns[1] + 1}")
            return cls(X[:, columns], Z[:, columns], ids, density, None, names)
        heights = model.predict(Z) if len(Z) else np.zeros(0)
        curve = None
        if grid is not None:
            curve = np.column_stack([grid, *model.predict(grid[:, None], return_std=True)])
        rows, points = np.column_stack([X[:, 0], y]), np.column_stack([Z[:, 0], heights])
        return cls(rows, points, ids, density, curve, ("input", "target"))


def draw_stream_frame(
    frames: Sequence[StreamFrame], index: int, axes: Sequence[Axes]
) -> Sequence[Axes]:
    """Draw the batch and the inducing points of one frame, and the log density up to it.

    Points that this batch added are large, points that it dropped are crosses where they were, and
    lines lead from where a point was before. All frames have the same axes.

    Args:
        frames: all frames.
        index: number of the frame, from 0.
        axes: two axes, for the points and for the log density.
    """
    ax, density = axes
    now = frames[index]
    ax.scatter(*now.rows.T, s=10, color=COLOURS["data"], linewidths=0, label="batch")
    if now.curve is not None:
        grid, mean, sd = now.curve.T
        ax.plot(grid, mean, color=COLOURS["posterior"], linewidth=1.2)
        band = (mean - 2 * sd, mean + 2 * sd)
        ax.fill_between(grid, *band, color=COLOURS["posterior"], alpha=0.2, linewidth=0)
    old, new = (_located(frames[i]) if i >= 0 else {} for i in (index - 1, index))
    for point in old.keys() & new.keys():
        ax.plot(*np.transpose([old[point], new[point]]), color=COLOURS["data"], linewidth=0.8)
    for name, places, colour, size, marker in (
        ("in use", [new[p] for p in new if p in old], "points", 22, "o"),
        ("added", [new[p] for p in new if p not in old], "second", 45, "o"),
        ("dropped", [old[p] for p in old if p not in new], "inclusion", 40, "x"),
    ):
        x, y = np.reshape(places, (-1, 2)).T
        ax.scatter(x, y, s=size, marker=marker, color=COLOURS[colour], zorder=3, label=name)
    every = np.concatenate([np.concatenate([f.rows, f.points]) for f in frames])
    ax.set(xlim=_limits(every[:, 0]), ylim=_limits(every[:, 1]))
    ax.set(xlabel=now.labels[0], ylabel=now.labels[1])
    ax.set_title(f"batch {index + 1}: {counted(len(now.points))}")
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    values = np.array([frame.log_density for frame in frames])
    density.plot(range(1, index + 2), values[: index + 1], color=COLOURS["posterior"], marker=".")
    density.set(xlim=(0.5, len(frames) + 0.5), ylim=_limits(values[np.isfinite(values)]))
    density.set(xlabel="batch", ylabel=_DENSITY)
    density.xaxis.set_major_locator(MaxNLocator(integer=True))
    return axes


def save_stream_animation(
    frames: Sequence[StreamFrame], path: Path, *, frames_per_second: int = 3
) -> Path:
    """Save a stream as a GIF or as an HTML page with a slider.

    Args:
        frames: a frame of each batch.
        path: ends in .gif or .html, which determines the format.
        frames_per_second: frame rate of a GIF.
    """
    if not frames:
        raise InputError("`frames` must have at least one frame; got none.")

    def draw(figure: Figure, index: int) -> None:
        draw_stream_frame(frames, index, tuple(figure.subplots(2, 1, height_ratios=[3, 1])))

    animation = Animation(
        draw,
        frames=len(frames),
        size=(8, 5.6),
        title="A stream",
        alt="inducing points and log density after each batch",
    )
    return animation.save(path, frames_per_second=frames_per_second)


def _located(frame: StreamFrame) -> dict[int, list[float]]:
    """Return the location of each inducing point by its number."""
    return dict(zip(frame.ids.tolist(), frame.points.tolist(), strict=True))


def _limits(values: Float[ndarray, " N"]) -> tuple[float, float]:
    """Return limits of an axis, with a margin."""
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 0.0)
    margin = 0.05 * (high - low) or 1.0
    return low - margin, high + margin
