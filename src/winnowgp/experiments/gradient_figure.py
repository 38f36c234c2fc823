"""The figure of appendix B.3: how gradients climb, and how they vary."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from winnowgp.experiments.alike import alike
from winnowgp.experiments.runs import Row
from winnowgp.plots import COLOURS, PROCEDURES, Trajectory, draw_trajectories, saved, styled

NAMES = {
    "score": "score function",
    "score by statistics": "score function, by statistics",
    "relaxed": "relaxed",
    "natural": "natural all-flip",
    "flips": "all flips",
}
PLACES = {"start": "at λ = ½", "midway": "midway", "end": "where natural updates end"}
_LEAST = 0.1
_BESIDE: Row = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
_COLOURS = {
    "score": PROCEDURES["paper"],
    "score by statistics": PROCEDURES["paper"],
    "relaxed": COLOURS["second"],
    "natural": PROCEDURES["fast"],
    "flips": PROCEDURES["fast"],
}


def draw_gradients(rows: Sequence[Row], path: Path) -> Path:
    """The objective over CPU seconds and over steps above, variances at several λ below."""
    walked = [row for row in rows if row["kind"] == "path"]
    # Of the paper's α; the others are there for what a step costs.
    weakest = min(row["alpha"] for row in walked)
    paths = alike([row for row in walked if row["alpha"] == weakest], "gradient")
    noises = [row for row in rows if row["kind"] == "variance"]
    with styled():
        figure = Figure(figsize=(11, 6.6))
        at_places = alike(noises, "at")
        grid = figure.add_gridspec(2, 2 * len(at_places))
        left = figure.add_subplot(grid[0, : len(at_places)])
        right = figure.add_subplot(grid[0, len(at_places) :], sharey=left)
        best = _best_by_seed(paths)
        draw_trajectories([_way(mine, "cpu", best) for mine in paths], ax=left)
        draw_trajectories([_way(mine, "steps", best) for mine in paths], ax=right)
        said = "below the best objective (nats)"
        left.set(xscale="log", yscale="log", xlabel="CPU seconds", ylabel=said)
        right.set(xscale="symlog", xlabel="steps", xlim=(-0.1, None))
        right.legend(**_BESIDE)
        below = [figure.add_subplot(grid[1, 2 * i : 2 * i + 2]) for i in range(len(at_places))]
        for ax, mine in zip(below, at_places, strict=True):
            _draw_noise(mine, ax)
        below[0].set_ylabel("variance of the gradient (nats²)")
        below[-1].legend(**_BESIDE)
    return saved(figure, path)


def _draw_noise(rows: Sequence[Row], ax: Axes) -> None:
    """Variance against draws, a line a gradient, all at the same λ."""
    draw_trajectories([_noise(mine) for mine in alike(rows, "gradient", "temperature")], ax=ax)
    ax.set(xscale="log", yscale="log", xlabel="draws a step")
    counts = max((row["samples"] for row in rows), key=len)
    ax.set_xticks(counts, [str(count) for count in counts])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_title(f"gradient {PLACES[rows[0]['at']]}")


def _best_by_seed(paths: Sequence[Sequence[Row]]) -> dict[int, float]:
    rows = [row for mine in paths for row in mine]
    seeds = {row["seed"] for row in rows}
    return {seed: max(max(r["objective"]) for r in rows if r["seed"] == seed) for seed in seeds}


def _way(rows: Sequence[Row], x: str, best: dict[int, float]) -> Trajectory:
    """How far one gradient is below; runs that stopped sooner end their share of the line."""
    name, most = rows[0]["gradient"], max(len(row["steps"]) for row in rows)
    at = [[row for row in rows if len(row["steps"]) > i] for i in range(most)]
    values = [
        # The best itself is below by nothing, which a logarithm cannot show.
        [max(best[row["seed"]] - row["objective"][i], _LEAST) for row in mine]
        for i, mine in enumerate(at)
    ]
    return Trajectory(
        NAMES[name],
        _COLOURS[name],
        [fmean([row[x][i] for row in mine]) for i, mine in enumerate(at)],
        [fmean(each) for each in values],
        [min(each) for each in values],
        [max(each) for each in values],
        dashed=name == "score by statistics",
    )


def _noise(rows: Sequence[Row]) -> Trajectory:
    name, temperature = rows[0]["gradient"], rows[0].get("temperature")
    values = list(zip(*(row["variance"] for row in rows), strict=True))
    return Trajectory(
        NAMES[name] + (f", τ = {temperature:g}" if temperature else ""),
        _COLOURS[name],
        rows[0]["samples"],
        [fmean(each) for each in values],
        [min(each) for each in values],
        [max(each) for each in values],
        dashed=temperature == 0.1,
    )
