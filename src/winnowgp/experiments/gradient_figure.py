"""Figure and claims of the gradient study."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from winnowgp.experiments.base import Row, alike, claim
from winnowgp.experiments.sizes import MARGIN
from winnowgp.plots import COLOURS, PROCEDURES, Trajectory, draw_trajectories, saved, styled

# What appendix B.3 says of gradients, and what we say, judged from rows.


_PATHS = ("score", "relaxed", "natural")

_NOISES = (("score", None), ("flips", None), ("relaxed", 0.1), ("relaxed", 1.0))


def gradient_claims(rows: Sequence[Row]) -> list[str]:
    """A line each, of paths and of variances; none while runs that it rests on are missing."""
    walked = [row for row in rows if row["kind"] == "path"]
    weakest = min((row["alpha"] for row in walked), default=0.0)
    paths = alike([row for row in walked if row["alpha"] == weakest], "gradient")
    noises = [row for row in rows if row["kind"] == "variance"]
    by_name = {mine[0]["gradient"]: mine for mine in paths}
    by_kind = {
        (mine[0]["gradient"], mine[0].get("temperature")): mine
        for mine in alike(noises, "gradient", "temperature")
    }
    return [
        *(_path_claims(by_name) if _level([by_name.get(name, []) for name in _PATHS]) else []),
        *_cost_claims(walked),
        *(_noise_claims(by_kind) if _level([by_kind.get(key, []) for key in _NOISES]) else []),
    ]


def _level(groups: Sequence[Sequence[Row]]) -> bool:
    """Whether all have rows of the same seeds and places."""
    keys = [sorted((row["seed"], row.get("at", "")) for row in rows) for rows in groups]
    return bool(keys[0]) and all(each == keys[0] for each in keys)


def _path_claims(paths: dict[str, list[Row]]) -> list[str]:
    """What the appendix says of the two gradients, then what we say of the third."""
    ends = {name: [row["objective"][-1] for row in mine] for name, mine in paths.items()}
    score, relaxed, natural = (fmean(ends[name]) for name in ("score", "relaxed", "natural"))
    target = {row["seed"]: row for row in paths["score"]}
    sooner = [_sooner(row, target[row["seed"]]) for row in paths["natural"]]
    reached = [ratio for ratio in sooner if ratio is not None]
    rows = paths["score"][0]["N"]
    return [
        claim(
            "score function and relaxed gradient give comparable results",
            agrees=abs(score - relaxed) <= MARGIN * rows,
            found=f"they end at {score:.1f} and {relaxed:.1f} nats; {MARGIN} nats a row apart "
            "would still count as comparable",
        ),
        claim(
            "beyond the paper: natural all-flip updates end no lower than the score function",
            agrees=natural >= score,
            found=f"{natural:.1f} against {score:.1f} nats",
        ),
        claim(
            "beyond the paper: and are there sooner",
            agrees=len(reached) == len(sooner) and min(reached) > 1,
            found=f"where the score function ends after {min(reached):.0f} to {max(reached):.0f} "
            "times less CPU time"
            if reached
            else "they never get there",
        ),
    ]


def _cost_claims(paths: Sequence[Row]) -> list[str]:
    """What a step costs at each α, judged where fewer than half of the candidates are kept."""
    lines = []
    for mine in alike(paths, "alpha"):
        by = {of[0]["gradient"]: of for of in alike(mine, "gradient")}
        score, relaxed = by.get("score", []), by.get("relaxed", [])
        if not _level([score, relaxed]):
            continue
        expected, K = fmean([row["expected"] for row in score]), score[0]["candidates"]
        ms = {name: fmean([_step_ms(row) for row in of]) for name, of in by.items()}
        found = (
            f"α = {mine[0]['alpha']:g}: {ms['score']:.1f} ms with four subsets of {expected:.0f} "
            f"points on average, {ms['relaxed']:.1f} ms with one relaxed draw of all {K}, "
            f"{ms['score'] / ms['relaxed']:.2f} times as much"
        )
        if quick := ms.get("score by statistics"):
            found += f"; {quick:.1f} ms by statistics, {quick / ms['relaxed']:.2f} times"
        if expected < K / 2:
            said = "a step of the score function costs less where the prior is strong"
            lines.append(claim(said, agrees=ms["score"] < ms["relaxed"], found=found))
        else:
            lines.append(f"a step where the prior is weak and most points are kept: {found}")
    return lines


def _noise_claims(by: dict[tuple[str, float | None], list[Row]]) -> list[str]:
    ratios = _ratios(by["score", None], by["flips", None], samples=4)
    cold, hot = (fmean([_relative_bias(r) for r in by["relaxed", t]]) for t in (0.1, 1.0))
    growth = _ratios(by["relaxed", 0.1], by["relaxed", 1.0], samples=4)
    return [
        claim(
            "beyond the paper: all flips vary less than the score function with as many subsets",
            agrees=min(ratios) > 1,
            found=f"{min(ratios):.3g} to {max(ratios):.3g} times less variance with four subsets",
        ),
        claim(
            "a lower temperature lessens the bias of the relaxed gradient and adds variance",
            agrees=cold < hot and min(growth) > 1,
            found=f"mean bias {100 * cold:.0f} % of the gradient at τ = 0.1 and {100 * hot:.0f} % "
            f"at τ = 1; {min(growth):.3g} to {max(growth):.3g} times the variance",
        ),
    ]


def _step_ms(row: Row) -> float:
    """Of a step in the second half of a path, when the size has settled."""
    half = len(row["steps"]) // 2
    steps = row["steps"][-1] - row["steps"][half]
    return 1e3 * (row["cpu"][-1] - row["cpu"][half]) / steps


def _sooner(natural: Row, score: Row) -> float | None:
    """Times less CPU time until the objective that the score function ends with."""
    for seconds, objective in zip(natural["cpu"], natural["objective"], strict=True):
        if objective >= score["objective"][-1]:
            return score["cpu"][-1] / seconds
    return None


def _ratios(first: Sequence[Row], second: Sequence[Row], *, samples: int) -> list[float]:
    """Of variances at the same λ."""
    at = {(row["at"], row["seed"]): row for row in second}
    index = [row["samples"].index(samples) for row in (first[0], second[0])]
    return [
        row["variance"][index[0]] / at[row["at"], row["seed"]]["variance"][index[1]]
        for row in first
    ]


def _relative_bias(row: Row) -> float:
    """Length of the bias in lengths of the gradient, from the estimates with the most draws."""
    return (max(row["bias"][-1], 0.0) / row["norm"]) ** 0.5


# The figure of appendix B.3: how gradients climb, and how they vary.


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
