"""Figure 1 of the paper: all candidates, inclusion midway, the few that remain."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from winnowgp.plots.posterior_1d import Curve, draw_posterior_1d
from winnowgp.plots.style import COLOURS, PROCEDURES, styled


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
