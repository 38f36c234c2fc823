"""Appendix B.3 of the paper: gradients of E_q[L(Z)] by score function and by relaxation.

Natural updates by all marginal gains are added. The problem is one of figure 3 (500 rows, σ = 0.3,
80 random rows as candidates, α = 0.05) with known kernel and noise, so that only the inclusion
probabilities λ are learnt. There are two kinds of runs:

- `path`: the objective over steps and CPU seconds, at that α and, for the cost of a step under a
  strong prior, at α = 1. The score function with four subsets and the relaxed gradient with one
  draw use the kernel blocks, as in the paper; the score function also uses subset statistics, and
  natural updates only those.
- `variance`: the variance of each gradient at the same λ, for several numbers of draws.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, final

import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.estimators.kernels import kernel_from
from winnowgp.experiments import gradient_estimates
from winnowgp.experiments.base import (
    PROCEDURE_COLOURS,
    Experiment,
    Row,
    Scope,
    claim,
    group_rows,
)
from winnowgp.experiments.sizes import MARGIN
from winnowgp.experiments.synthetic import ALPHA, CANDIDATES, PROCESS, N, sampled
from winnowgp.gradients import Gradient, Relaxed, ScoreFunction, Temperature
from winnowgp.linalg import single_thread
from winnowgp.models import SparseGP
from winnowgp.plots.style import COLOURS, save_figure, styled
from winnowgp.point_processes import Bernoulli, SquaredCardinality
from winnowgp.selection import SubsetStatistics, fit_inclusion
from winnowgp.selection.natural import InclusionFit
from winnowgp.typing import ScoreMasks, ScoreWeights

SIGMA = 0.3
SEEDS = {"path": 5, "variance": 3}
"""Number of seeds by kind of run: variances take minutes per seed, and differ tenfold or more."""
STRONG_ALPHA = 1.0
"""Strength of the prior under which fewer than half of the candidates are included."""
MARKS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 300, 400, 500, 600)
NATURAL_MARKS = (0, 1, 2, 5, 10, 20, 50, 100)
DRAWS = 500
"""Number of subsets for every value of the objective."""
REFERENCE = 1000
"""Number of subsets for the gradient that biases are measured against."""
POSITIONS = {"start": "at λ = ½", "midway": "midway", "end": "at the end of natural updates"}
"""λ = ½, half the logits at which natural updates end, and these logits."""

NAMES = {
    "score": "score function",
    "score by statistics": "score function, by statistics",
    "relaxed": "relaxed",
    "natural": "natural updates",
    "flips": "marginal gains",
}
_COLOURS = {
    "score": PROCEDURE_COLOURS["paper"],
    "score by statistics": PROCEDURE_COLOURS["paper"],
    "relaxed": COLOURS["second"],
    "natural": PROCEDURE_COLOURS["fast"],
    "flips": PROCEDURE_COLOURS["fast"],
}
# A logarithmic axis cannot show a gap of zero to the best objective.
_SMALLEST_GAP = 0.1
_BESIDE: Row = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}


@final
class GradientVariance(Experiment):
    """The objective over time, and the variance of the gradient."""

    name = "estimators"
    title = "appendix B.3: score function, relaxed and natural gradients; objective and variance"

    def settings(self, scope: Scope, rows: Sequence[Row]) -> list[Row]:
        few = scope.seeds or (1 if scope.quick else None)
        problem = {"N": N, "sigma": SIGMA, "candidates": CANDIDATES, "process": PROCESS}
        weak, strong = ({**problem, "alpha": alpha} for alpha in (ALPHA, STRONG_ALPHA))
        paths = _path_settings(scope)
        sampling = [path for path in paths if path["gradient"] != "natural"]
        return [
            {**run, "seed": seed}
            for run in (
                *({**variance, **weak} for variance in _variance_settings(scope)),
                *({**path, **weak} for path in paths),
                *({**path, **strong} for path in sampling),
            )
            for seed in range(few or SEEDS[run["kind"]])
        ]

    def runs_alone(self, settings: Row) -> bool:
        return settings["kind"] == "path"

    def run(self, settings: Row, scope: Scope) -> Row:
        problem = _Problem(settings, scope.device)
        if settings["kind"] == "path":
            with single_thread():
                return _run_path(problem, settings)
        return _run_variance(problem, settings)

    def draw(self, rows: Sequence[Row], path: Path) -> Path:
        paths = [row for row in rows if row["kind"] == "path"]
        # The figure shows the paper's α; stronger priors only serve the claim about costs.
        alpha = min(row["alpha"] for row in paths)
        paths = group_rows([row for row in paths if row["alpha"] == alpha], "gradient")
        variances = group_rows([row for row in rows if row["kind"] == "variance"], "at")
        with styled():
            figure = Figure(figsize=(11, 6.6))
            grid = figure.add_gridspec(2, 2 * len(variances))
            left = figure.add_subplot(grid[0, : len(variances)])
            right = figure.add_subplot(grid[0, len(variances) :], sharey=left)
            best = _best_by_seed(paths)
            for members in paths:
                _draw_path(members, "cpu", best, ax=left)
                _draw_path(members, "steps", best, ax=right)
            label = "gap to the best objective (nats)"
            left.set(xscale="log", yscale="log", xlabel="CPU seconds", ylabel=label)
            right.set(xscale="symlog", xlabel="steps", xlim=(-0.1, None))
            right.legend(**_BESIDE)
            below = [figure.add_subplot(grid[1, 2 * i : 2 * i + 2]) for i in range(len(variances))]
            for ax, members in zip(below, variances, strict=True):
                _draw_variances(members, ax=ax)
            below[0].set_ylabel("variance of the gradient (nats²)")
            below[-1].legend(**_BESIDE)
        return save_figure(figure, path)

    def claims(self, rows: Sequence[Row]) -> list[str]:
        paths = [row for row in rows if row["kind"] == "path"]
        alpha = min((row["alpha"] for row in paths), default=0.0)
        by_name = {
            members[0]["gradient"]: members
            for members in group_rows([r for r in paths if r["alpha"] == alpha], "gradient")
        }
        by_kind = {
            (members[0]["gradient"], members[0].get("temperature")): members
            for members in group_rows(
                [row for row in rows if row["kind"] == "variance"], "gradient", "temperature"
            )
        }
        names = ("score", "relaxed", "natural")
        kinds = (("score", None), ("flips", None), ("relaxed", 0.1), ("relaxed", 1.0))
        comparable_paths = _same_runs([by_name.get(name, []) for name in names])
        comparable_variances = _same_runs([by_kind.get(kind, []) for kind in kinds])
        return [
            *(_path_claims(by_name) if comparable_paths else []),
            *_cost_claims(paths),
            *(_variance_claims(by_kind) if comparable_variances else []),
        ]


@final
class _Problem:
    """The data, and a model with the kernel and noise that generated them."""

    def __init__(self, settings: Row, device: str) -> None:
        sigma, process = settings["sigma"], settings["process"]
        sample = sampled("noise", sigma, rows=settings["N"], seed=settings["seed"], process=process)
        self.data = Dataset(sample.X.to(device), sample.Y.to(device))
        kernel = kernel_from("rbf", 1).initialize(**{"base_kernel.lengthscale": process["gamma"]})
        # The rows are independent draws, so the first ones are random rows.
        candidates = self.data.X[: settings["candidates"]]
        self.model = SparseGP(kernel, candidates, noise=sigma**2).requires_grad_(False)
        self.prior = SquaredCardinality(self.model.K, settings["alpha"])
        self.seed = settings["seed"]

    def statistics(self) -> SubsetStatistics:
        return self.model.subset_statistics(self.data)

    def generator(self) -> torch.Generator:
        """Return a generator in the same state at every call."""
        return torch.Generator(device=self.data.X.device).manual_seed(self.seed)

    def q_at(self, position: str) -> Bernoulli:
        """Return q(Z) at one of `POSITIONS`."""
        share = list(POSITIONS).index(position) / 2
        return Bernoulli(share * self.natural_selection(max_steps=100).q.logits)

    def natural_selection(self, *, max_steps: int) -> InclusionFit:
        """Optimise λ by natural updates; computing the statistics is a part of it."""
        return fit_inclusion(
            self.statistics(), prior=self.prior, generator=self.generator(), max_steps=max_steps
        )


def _path_settings(scope: Scope) -> list[Row]:
    marks = [mark for mark in MARKS if mark <= 100] if scope.quick else list(MARKS)
    sampling = {"marks": marks, "draws": DRAWS, "learning_rate": gradient_estimates.LEARNING_RATE}
    return [
        {"kind": "path", "gradient": "relaxed", "samples": 1, **sampling},
        {"kind": "path", "gradient": "score", "samples": 4, **sampling},
        {"kind": "path", "gradient": "score by statistics", "samples": 4, **sampling},
        {"kind": "path", "gradient": "natural", "marks": list(NATURAL_MARKS), "draws": DRAWS},
    ]


def _variance_settings(scope: Scope) -> list[Row]:
    few, many = ([1, 4], [1, 4]) if scope.quick else ([1, 4, 16], [1, 4, 16, 64])
    gradients: list[Row] = [
        {"gradient": "relaxed", "temperature": 1.0, "samples": few},
        {"gradient": "relaxed", "temperature": 0.1, "samples": few},
        {"gradient": "flips", "samples": few},
        {"gradient": "score", "samples": many},
    ]
    repeats = {"repeats": 100 if scope.quick else 200, "reference": REFERENCE}
    return [
        {"kind": "variance", **gradient, "at": position, **repeats}
        for gradient in gradients
        for position in list(POSITIONS)[:: 2 if scope.quick else 1]
    ]


def _run_path(problem: _Problem, settings: Row) -> Row:
    objective = gradient_estimates.objective_of(
        problem.statistics(), problem.prior, draws=settings["draws"]
    )
    path, name = (
        gradient_estimates.OptimisationPath(objective, settings["marks"]),
        settings["gradient"],
    )

    def make_score() -> ScoreMasks | ScoreWeights:
        if name == "score by statistics":
            return problem.statistics().value
        blocks = problem.model.subset_objective(problem.data)
        return blocks.relaxed_value if name == "relaxed" else blocks.value

    if name == "natural":
        # Each mark has a run of its own, from the start.
        for steps in path.marks:
            path.restart_clock()
            selection = problem.natural_selection(max_steps=steps)
            path.record(steps, selection.q)
            if selection.converged:
                break
    else:
        estimator = Relaxed if name == "relaxed" else ScoreFunction
        gradient_estimates.optimise_by_gradient(
            path,
            estimator(settings["samples"]),
            make_score,
            prior=problem.prior,
            learning_rate=settings["learning_rate"],
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


def _run_variance(problem: _Problem, settings: Row) -> Row:
    q, statistics = problem.q_at(settings["at"]), problem.statistics()
    blocks, generator = problem.model.subset_objective(problem.data), problem.generator()

    def gains(samples: int, repeats: int) -> Float[Tensor, "R K"]:
        return gradient_estimates.marginal_gain_draws(
            statistics, q, samples=samples, repeats=repeats, generator=generator
        )

    def estimates(samples: int, repeats: int) -> Float[Tensor, "R K"]:
        gradient: Gradient[Any] = ScoreFunction(samples)
        score: ScoreMasks | ScoreWeights = statistics.value
        if settings["gradient"] == "relaxed":
            tau = settings["temperature"]
            gradient, score = Relaxed(samples, Temperature(tau, tau, 1)), blocks.relaxed_value
        return gradient_estimates.gradient_draws(
            gradient, score, q, repeats=repeats, generator=generator
        )

    reference = gains(1, settings["reference"])
    draws = gains if settings["gradient"] == "flips" else estimates
    noises = [
        gradient_estimates.GradientNoise.of(draws(samples, settings["repeats"]), reference)
        for samples in settings["samples"]
    ]
    return {
        "variance": [_four_digits(noise.variance) for noise in noises],
        "bias": [_four_digits(noise.bias) for noise in noises],
        "norm": _four_digits(reference.mean(0).square().sum().item()),
    }


def _four_digits(value: float) -> float:
    return float(f"{value:.4g}")


def _same_runs(groups: Sequence[Sequence[Row]]) -> bool:
    """Return whether all groups have rows of the same seeds and positions."""
    keys = [sorted((row["seed"], row.get("at", "")) for row in rows) for rows in groups]
    return bool(keys[0]) and all(each == keys[0] for each in keys)


def _path_claims(paths: dict[str, list[Row]]) -> list[str]:
    score, relaxed, natural = (
        fmean([row["objective"][-1] for row in paths[name]])
        for name in ("score", "relaxed", "natural")
    )
    score_rows = {row["seed"]: row for row in paths["score"]}
    speed_ups = [_speed_up(row, score_rows[row["seed"]]) for row in paths["natural"]]
    reached = [ratio for ratio in speed_ups if ratio is not None]
    rows = paths["score"][0]["N"]
    return [
        claim(
            "score function and relaxed gradient give comparable results",
            agrees=abs(score - relaxed) <= MARGIN * rows,
            evidence=f"they end at {score:.1f} and {relaxed:.1f} nats; a difference of {MARGIN} "
            "nats per observation would count as comparable",
        ),
        claim(
            "beyond the paper: natural updates end at least as high as the score function",
            agrees=natural >= score,
            evidence=f"{natural:.1f} against {score:.1f} nats",
        ),
        claim(
            "beyond the paper: natural updates reach the score function's objective sooner",
            agrees=len(reached) == len(speed_ups) and min(reached) > 1,
            evidence=f"in {min(reached):.0f} to {max(reached):.0f} times less CPU time"
            if reached
            else "they never reach it",
        ),
    ]


def _cost_claims(paths: Sequence[Row]) -> list[str]:
    """Compare the cost of a step; judged if fewer than half of the candidates are included."""
    lines = []
    for members in group_rows(paths, "alpha"):
        by_name = {rows[0]["gradient"]: rows for rows in group_rows(members, "gradient")}
        score, relaxed = by_name.get("score", []), by_name.get("relaxed", [])
        if not _same_runs([score, relaxed]):
            continue
        expected, K = fmean([row["expected"] for row in score]), score[0]["candidates"]
        ms = {name: fmean([_step_ms(row) for row in rows]) for name, rows in by_name.items()}
        evidence = (
            f"α = {members[0]['alpha']:g}: {ms['score']:.1f} ms with four subsets of "
            f"{expected:.0f} candidates on average, {ms['relaxed']:.1f} ms with one relaxed draw "
            f"of all {K}, a ratio of {ms['score'] / ms['relaxed']:.2f}"
        )
        if quick := ms.get("score by statistics"):
            evidence += f"; {quick:.1f} ms by statistics, a ratio of {quick / ms['relaxed']:.2f}"
        if expected < K / 2:
            statement = "a step of the score function costs less if the prior is strong"
            lines.append(claim(statement, agrees=ms["score"] < ms["relaxed"], evidence=evidence))
        else:
            lines.append(f"cost of a step if the prior is weak: {evidence}")
    return lines


def _variance_claims(by_kind: dict[tuple[str, float | None], list[Row]]) -> list[str]:
    ratios = _variance_ratios(by_kind["score", None], by_kind["flips", None], samples=4)
    cold, hot = (fmean([_relative_bias(r) for r in by_kind["relaxed", t]]) for t in (0.1, 1.0))
    growth = _variance_ratios(by_kind["relaxed", 0.1], by_kind["relaxed", 1.0], samples=4)
    return [
        claim(
            "beyond the paper: marginal gains vary less than the score function with as many "
            "subsets",
            agrees=min(ratios) > 1,
            evidence=f"{min(ratios):.3g} to {max(ratios):.3g} times less variance with four "
            "subsets",
        ),
        claim(
            "a lower temperature reduces the bias of the relaxed gradient and adds variance",
            agrees=cold < hot and min(growth) > 1,
            evidence=f"mean bias {100 * cold:.0f} % of the gradient at τ = 0.1 and "
            f"{100 * hot:.0f} % at τ = 1; {min(growth):.3g} to {max(growth):.3g} times the "
            "variance",
        ),
    ]


def _step_ms(row: Row) -> float:
    """Return milliseconds per step in the second half of a path, where |Z| has settled."""
    half = len(row["steps"]) // 2
    steps = row["steps"][-1] - row["steps"][half]
    return 1e3 * (row["cpu"][-1] - row["cpu"][half]) / steps


def _speed_up(natural: Row, score: Row) -> float | None:
    """Return the ratio of CPU times until the objective at which the score function ends."""
    for seconds, objective in zip(natural["cpu"], natural["objective"], strict=True):
        if objective >= score["objective"][-1]:
            return score["cpu"][-1] / seconds
    return None


def _variance_ratios(first: Sequence[Row], second: Sequence[Row], *, samples: int) -> list[float]:
    """Return the ratios of variances at the same position and seed."""
    matches = {(row["at"], row["seed"]): row for row in second}
    i, j = (rows[0]["samples"].index(samples) for rows in (first, second))
    return [row["variance"][i] / matches[row["at"], row["seed"]]["variance"][j] for row in first]


def _relative_bias(row: Row) -> float:
    """Return the norm of the bias relative to the gradient, at the largest number of draws."""
    return (max(row["bias"][-1], 0.0) / row["norm"]) ** 0.5


def _best_by_seed(paths: Sequence[Sequence[Row]]) -> dict[int, float]:
    rows = [row for members in paths for row in members]
    seeds = {row["seed"] for row in rows}
    return {seed: max(max(r["objective"]) for r in rows if r["seed"] == seed) for seed in seeds}


def _draw_path(rows: Sequence[Row], column: str, best: dict[int, float], *, ax: Axes) -> None:
    """Draw the gap of one gradient to the best objective; shorter runs drop out of the mean."""
    name, longest = rows[0]["gradient"], max(len(row["steps"]) for row in rows)
    running = [[row for row in rows if len(row["steps"]) > i] for i in range(longest)]
    x = [fmean([row[column][i] for row in members]) for i, members in enumerate(running)]
    gaps = [
        [max(best[row["seed"]] - row["objective"][i], _SMALLEST_GAP) for row in members]
        for i, members in enumerate(running)
    ]
    dashed = name == "score by statistics"
    draw_band(x, gaps, name=NAMES[name], colour=_COLOURS[name], dashed=dashed, ax=ax)


def _draw_variances(rows: Sequence[Row], *, ax: Axes) -> None:
    """Draw the variance at one position against the number of draws, a line per gradient."""
    for members in group_rows(rows, "gradient", "temperature"):
        name, temperature = members[0]["gradient"], members[0].get("temperature")
        variances = list(zip(*(row["variance"] for row in members), strict=True))
        draw_band(
            members[0]["samples"],
            variances,
            name=NAMES[name] + (f", τ = {temperature:g}" if temperature else ""),
            colour=_COLOURS[name],
            dashed=temperature == 0.1,
            ax=ax,
        )
    ax.set(xscale="log", yscale="log", xlabel="draws per step")
    counts = max((row["samples"] for row in rows), key=len)
    ax.set_xticks(counts, [str(count) for count in counts])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_title(f"gradient {POSITIONS[rows[0]['at']]}")


def draw_band(
    x: Sequence[float],
    values: Sequence[Sequence[float]],
    *,
    name: str,
    colour: str,
    dashed: bool,
    ax: Axes,
) -> None:
    """Draw the mean of several runs as a line with dots, and their range as a band.

    Args:
        values: the values of all runs at each x.
    """
    low, high = [min(each) for each in values], [max(each) for each in values]
    ax.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
    style: Row = {"linestyle": "--" if dashed else "-", "linewidth": 1.3, "marker": "o"}
    ax.plot(x, [fmean(each) for each in values], color=colour, markersize=3, label=name, **style)
