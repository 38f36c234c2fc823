"""Appendix B.3 of the paper: score function against relaxed draws, and against all flips.

One problem of figure 3 (500 rows, σ = 0.3, the process that made them known, 80 random rows as
candidates, α = 0.05), so that only λ is learnt. Two kinds of runs:

- `path`: the objective over steps and CPU seconds. The score function with four subsets and the
  relaxed gradient with one draw score straight from the kernel blocks, as the paper does; the score
  function scores by statistics as well, natural all-flip updates only so.
- `variance`: of each gradient at the same λ, for several numbers of draws.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import final

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from winnowgp.data import Dataset
from winnowgp.estimators import kernel_from
from winnowgp.experiments.experiment import Experiment, Scope, claim
from winnowgp.experiments.gradient_noise import GradientNoise, flip_draws, gradient_draws
from winnowgp.experiments.inclusion_path import (
    InclusionPath,
    climb_gradient,
    climb_naturally,
    objective_of,
)
from winnowgp.experiments.level import MARGIN
from winnowgp.experiments.runs import Row
from winnowgp.experiments.synthetic import ALPHA, CANDIDATES, GAMMA, N, sampled
from winnowgp.gradients import Relaxed, ScoreFunction, Temperature
from winnowgp.models import SparseGP
from winnowgp.plots import COLOURS, PROCEDURES, Trajectory, draw_trajectories, saved, styled
from winnowgp.point_processes import Bernoulli, SquaredCardinality
from winnowgp.selection import SubsetStatistics, select_naturally
from winnowgp.typing import ScoreMasks, ScoreWeights

SIGMA, SEEDS = 0.3, 3
MARKS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 300, 400, 500, 600)
NATURAL_MARKS = (0, 1, 2, 5, 10, 20, 50, 100)
DRAWS = 500
"""Subsets behind every value of the objective."""
REFERENCE = 1000
"""Subsets behind the gradient that biases are measured against."""
PLACES = {"start": "at λ = ½", "midway": "midway", "end": "where natural updates end"}
"""Where variances are measured; midway in the logits."""
NAMES = {
    "score": "score function",
    "score by statistics": "score function, by statistics",
    "relaxed": "relaxed",
    "natural": "natural all-flip",
    "flips": "all flips",
}


@final
class Problem:
    """Rows, the process that made them, and statistics of the candidates."""

    def __init__(self, settings: Row, device: str) -> None:
        drawn = sampled("noise", SIGMA, rows=settings["N"], seed=settings["seed"])
        self.data = Dataset(drawn.X.to(device), drawn.Y.to(device))
        kernel = kernel_from("rbf", 1).initialize(**{"base_kernel.lengthscale": GAMMA})
        # Rows are drawn independently: the first are as random as any.
        candidates = self.data.X[: settings["candidates"]]
        self.model = SparseGP(kernel, candidates, noise=SIGMA**2).requires_grad_(False)
        self.prior = SquaredCardinality(self.model.K, settings["alpha"])
        self.seed = settings["seed"]

    def statistics(self) -> SubsetStatistics:
        """Of the candidates, from a pass over the rows."""
        return self.model.subset_statistics(self.data)

    def generator(self) -> torch.Generator:
        """The same at every call."""
        return torch.Generator(device=self.data.X.device).manual_seed(self.seed)

    def place(self, name: str) -> Bernoulli:
        """One of `PLACES`."""
        share = list(PLACES).index(name) / 2
        found = select_naturally(
            self.statistics(), prior=self.prior, generator=self.generator(), max_steps=100
        )
        return Bernoulli(share * found.q.logits)


@final
class Estimators(Experiment):
    """Objective over time, and variance of the gradient."""

    name = "estimators"
    title = "appendix B.3: score function, relaxed and all-flip gradients; objective and variance"

    def settings(self, scope: Scope, rows: Sequence[Row]) -> list[Row]:
        seeds = range(scope.seeds or (1 if scope.quick else SEEDS))
        paths: list[Row] = [
            {"kind": "path", "gradient": "relaxed", "samples": 1},
            {"kind": "path", "gradient": "score", "samples": 4},
            {"kind": "path", "gradient": "score by statistics", "samples": 4},
        ]
        marks = [mark for mark in MARKS if mark <= 100] if scope.quick else list(MARKS)
        paths = [{**path, "marks": marks, "draws": DRAWS} for path in paths]
        natural = {"kind": "path", "gradient": "natural", "marks": list(NATURAL_MARKS)}
        paths.append({**natural, "draws": DRAWS})
        few, many = ([1, 4], [1, 4]) if scope.quick else ([1, 4, 16], [1, 4, 16, 64])
        noises: list[Row] = [
            {"gradient": "relaxed", "temperature": 1.0, "samples": few},
            {"gradient": "relaxed", "temperature": 0.1, "samples": few},
            {"gradient": "flips", "samples": few},
            {"gradient": "score", "samples": many},
        ]
        places = list(PLACES)[:: 2 if scope.quick else 1]
        repeats = 100 if scope.quick else 200
        variances = [
            {"kind": "variance", **noise, "at": place, "repeats": repeats, "reference": REFERENCE}
            for noise in noises
            for place in places
        ]
        problem = {"N": N, "candidates": CANDIDATES, "alpha": ALPHA}
        return [{**run, **problem, "seed": seed} for run in variances + paths for seed in seeds]

    def measured(self, settings: Row, scope: Scope) -> Row:
        problem = Problem(settings, scope.device)
        if settings["kind"] == "path":
            return _path(problem, settings)
        return _variance(problem, settings)

    def draw(self, rows: Sequence[Row], path: Path) -> Path:
        paths = _by([row for row in rows if row["kind"] == "path"], "gradient")
        noises = [row for row in rows if row["kind"] == "variance"]
        with styled():
            figure = Figure(figsize=(11, 6.6))
            at_places = _by(noises, "at")
            grid = figure.add_gridspec(2, 2 * len(at_places))
            left = figure.add_subplot(grid[0, : len(at_places)])
            right = figure.add_subplot(grid[0, len(at_places) :], sharey=left)
            draw_trajectories([_way(mine, "cpu") for mine in paths], ax=left)
            draw_trajectories([_way(mine, "steps") for mine in paths], ax=right)
            left.set(xscale="log", xlabel="CPU seconds", ylabel="objective (nats)")
            right.set(xscale="symlog", xlabel="steps")
            right.legend(loc="lower right")
            for i, mine in enumerate(at_places):
                ax = figure.add_subplot(grid[1, 2 * i : 2 * i + 2])
                _draw_noise(mine, ax)
                ax.set_ylabel("" if i else "variance of the gradient (nats²)")
        return saved(figure, path)

    def claims(self, rows: Sequence[Row]) -> list[str]:
        paths = {
            m[0]["gradient"]: m for m in _by([r for r in rows if r["kind"] == "path"], "gradient")
        }
        noises = [row for row in rows if row["kind"] == "variance"]
        return [*_path_claims(paths), *_noise_claims(noises)]


def _path(problem: Problem, settings: Row) -> Row:
    objective = objective_of(problem.statistics(), problem.prior, draws=settings["draws"])
    path = InclusionPath(objective, settings["marks"])
    if settings["gradient"] == "natural":
        climb_naturally(path, problem.statistics, prior=problem.prior, generator=problem.generator)
    else:
        relaxed = settings["gradient"] == "relaxed"
        climb_gradient(
            path,
            Relaxed(settings["samples"]) if relaxed else ScoreFunction(settings["samples"]),
            lambda: _score(problem, settings["gradient"]),
            prior=problem.prior,
            like=problem.data.X,
            generator=problem.generator(),
        )
    assert path.last is not None
    return {
        "steps": path.steps,
        "cpu": [round(seconds, 4) for seconds in path.seconds],
        "objective": [round(value, 2) for value in path.objective],
        "expected": round(path.last.mean_count().item(), 2),
    }


def _score(problem: Problem, name: str) -> ScoreMasks | ScoreWeights:
    """What answers a gradient's questions."""
    if name == "score by statistics":
        return problem.statistics().value
    blocks = problem.model.subset_objective(problem.data)
    return blocks.relaxed_value if name == "relaxed" else blocks.value


def _variance(problem: Problem, settings: Row) -> Row:
    q, statistics, generator = (
        problem.place(settings["at"]),
        problem.statistics(),
        problem.generator(),
    )
    reference = flip_draws(
        statistics, q, samples=1, repeats=settings["reference"], generator=generator
    )
    blocks, repeats = problem.model.subset_objective(problem.data), settings["repeats"]
    found = []
    for samples in settings["samples"]:
        if settings["gradient"] == "flips":
            draws = flip_draws(statistics, q, samples=samples, repeats=repeats, generator=generator)
        else:
            relaxed = settings["gradient"] == "relaxed"
            draws = gradient_draws(
                _relaxed(samples, settings["temperature"]) if relaxed else ScoreFunction(samples),
                blocks.relaxed_value if relaxed else statistics.value,
                q,
                repeats=repeats,
                generator=generator,
            )
        found.append(GradientNoise.of(draws, reference))
    return {
        "variance": [_short(noise.variance) for noise in found],
        "bias": [_short(noise.bias) for noise in found],
        "norm": _short(reference.mean(0).square().sum().item()),
    }


def _relaxed(samples: int, temperature: float) -> Relaxed:
    return Relaxed(samples, Temperature(temperature, temperature, 1))


def _draw_noise(rows: Sequence[Row], ax: Axes) -> None:
    """Variance against draws, a line a gradient, all at the same λ."""
    draw_trajectories([_noise(mine) for mine in _by(rows, "gradient", "temperature")], ax=ax)
    ax.set(xscale="log", yscale="log", xlabel="draws a step")
    counts = max((row["samples"] for row in rows), key=len)
    ax.set_xticks(counts, [str(count) for count in counts])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_title(f"gradient {PLACES[rows[0]['at']]}")
    ax.legend(loc="best")


def _path_claims(paths: dict[str, list[Row]]) -> list[str]:
    """What the appendix says of the two gradients, then what we say of the third."""
    ends = {name: [row["objective"][-1] for row in mine] for name, mine in paths.items()}
    score, relaxed, natural = (_mean(ends[name]) for name in ("score", "relaxed", "natural"))
    costs = {name: _mean([_step_ms(row) for row in paths[name]]) for name in ("score", "relaxed")}
    expected = _mean([row["expected"] for row in paths["score"]])
    sooner = [_sooner(*pair) for pair in zip(paths["natural"], paths["score"], strict=True)]
    reached = [ratio for ratio in sooner if ratio is not None]
    rows, K = paths["score"][0]["N"], paths["score"][0]["candidates"]
    return [
        claim(
            "score function and relaxed gradient give comparable results",
            agrees=abs(score - relaxed) <= MARGIN * rows,
            found=f"they end at {score:.1f} and {relaxed:.1f} nats; {MARGIN} nats a row apart "
            "would still count as comparable",
        ),
        claim(
            "a step of the score function costs less where the prior is strong",
            agrees=costs["score"] < costs["relaxed"],
            found=f"{costs['score']:.1f} ms with four subsets of {expected:.0f} points on average, "
            f"{costs['relaxed']:.1f} ms with one relaxed draw of all {K}",
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


def _noise_claims(noises: Sequence[Row]) -> list[str]:
    by = {
        (m[0]["gradient"], m[0].get("temperature")): m
        for m in _by(noises, "gradient", "temperature")
    }
    ratios = _ratios(by["score", None], by["flips", None], samples=4)
    cold, hot = (_mean([_relative_bias(r) for r in by["relaxed", t]]) for t in (0.1, 1.0))
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


def _way(rows: Sequence[Row], x: str) -> Trajectory:
    """One gradient's objective; runs that stopped sooner end their share of the line."""
    name, most = rows[0]["gradient"], max(len(row["steps"]) for row in rows)
    at = [[row for row in rows if len(row["steps"]) > i] for i in range(most)]
    values = [[row["objective"][i] for row in mine] for i, mine in enumerate(at)]
    return Trajectory(
        NAMES[name],
        _COLOURS[name],
        [_mean([row[x][i] for row in mine]) for i, mine in enumerate(at)],
        [_mean(each) for each in values],
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
        [_mean(each) for each in values],
        [min(each) for each in values],
        [max(each) for each in values],
        dashed=temperature == 0.1,
    )


_COLOURS = {
    "score": PROCEDURES["paper"],
    "score by statistics": PROCEDURES["paper"],
    "relaxed": COLOURS["second"],
    "natural": PROCEDURES["fast"],
    "flips": PROCEDURES["fast"],
}


def _by(rows: Sequence[Row], *columns: str) -> list[list[Row]]:
    """Rows that agree in some columns, in the order in which they came."""
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(column) for column in columns), []).append(row)
    return list(found.values())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _short(value: float) -> float:
    return float(f"{value:.4g}")
