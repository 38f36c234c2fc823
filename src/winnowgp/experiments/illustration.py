"""Figure 1 of the paper: of fifty candidates the few that matter remain.

The data are the package's own: a curve that is smooth at first and rough later. The figure shows
the paper's procedure before, during and after the selection, and the result of the fast schedule.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from winnowgp.data import Dataset, hills
from winnowgp.estimators.kernels import kernel_from
from winnowgp.experiments.base import (
    PROCEDURE_COLOURS,
    PROCEDURE_NAMES,
    Experiment,
    Row,
    Scope,
    claim,
    curve_from_row,
    curve_to_row,
    to_lists,
    to_tensor,
)
from winnowgp.models import Posterior, SparseGP
from winnowgp.plots import Curve, draw_posterior_1d
from winnowgp.plots.style import COLOURS, save_figure, styled
from winnowgp.point_processes import Bernoulli, SquaredCardinality
from winnowgp.report.summary import counted
from winnowgp.training import (
    Callback,
    FastSchedule,
    FitResult,
    FixedAlpha,
    PaperSchedule,
    Progress,
    fit,
)
from winnowgp.training.adam import Adam
from winnowgp.training.callbacks import notify

CANDIDATES, ALPHA, LEARNING_RATE = 50, 0.2, 0.03
PRE, PROCESS, POST = 400, 300, 200
SEEDS = 5
# The seed whose rows hold the curves of the figure.
DRAWN = 0
# Input that separates the smooth half of the curve from the rough one.
MIDDLE = 4.0


@dataclass(frozen=True, slots=True)
class InclusionSnapshot:
    """The point process in the middle of its training, with a few draws from it."""

    step: int
    candidates: Float[Tensor, " K"]
    inclusion: Float[Tensor, " K"]
    draws: Bool[Tensor, "S K"]


@dataclass(frozen=True, slots=True)
class Panels:
    """The contents of the figure."""

    x: Float[Tensor, " N"]
    y: Float[Tensor, " N"]
    before: Curve
    midway: InclusionSnapshot
    after: Curve
    fast: Curve | None = None
    """The result of the fast schedule with the same candidates; None to leave it out."""


@dataclass(frozen=True, slots=True)
class IllustrationResult:
    """The contents of the figure, and the fit behind them."""

    panels: Panels
    fit: FitResult[SparseGP]
    full_bound: float
    """The ELBO with all candidates before the selection, in nats."""


@final
class _SnapshotCallback:
    """Stores the progress at one step of learning inclusion."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.snapshot: Progress | None = None

    def __call__(self, progress: Progress) -> None:
        if progress.phase == "inclusion" and progress.step == self.step:
            self.snapshot = progress


def illustrate(
    *,
    callbacks: Sequence[Callback] = (),
    n_candidates: int = CANDIDATES,
    alpha: float = ALPHA,
    pre: int = PRE,
    process: int = PROCESS,
    post: int = POST,
    learning_rate: float = LEARNING_RATE,
    seed: int = 0,
) -> IllustrationResult:
    """Run the paper's procedure: train with all candidates, learn inclusion, prune and refit.

    Args:
        callbacks: called at every step.
        n_candidates: number of candidates, which start at random rows.
        alpha: strength of the prior.
        pre: steps with all candidates.
        process: steps that also train the inclusion probabilities.
        post: steps after pruning.
        learning_rate: learning rate of Adam.
        seed: seed of the candidates and of the draws.
    """
    data, generator = hills(), torch.Generator().manual_seed(seed)
    model = _model(data, n_candidates, generator)

    def report(step: int, value: float) -> None:
        notify(callbacks, Progress.of(model, "pre-train", step, pre, value))

    Adam(pre).maximise(
        lambda: model.bound(data),
        [(model.parameters(), learning_rate)],
        scale=data.N,
        on_step=report,
    )
    before = model.posterior(data)
    full_bound = model.bound(data).item()
    callback = _SnapshotCallback(max(process // 4, 1))
    schedule = PaperSchedule(
        SquaredCardinality(model.K, alpha),
        pre=0,
        joint=process,
        post=post,
        learning_rate=learning_rate,
    )
    fitted = fit(
        model, data, schedule=schedule, generator=generator, callbacks=(callback, *callbacks)
    )

    assert callback.snapshot is not None
    panels = Panels(
        x=data.X[:, 0],
        y=data.Y[:, 0],
        before=_curve(before, data),
        midway=_midway(callback.snapshot, generator),
        after=_curve(fitted.posterior, data),
    )
    return IllustrationResult(panels, fitted, full_bound)


def draw_panels(panels: Panels) -> Figure:
    """Draw the figure; the second panel has the sampled subsets underneath."""
    curves = [(panels.before, "(a) all candidates", "paper")]
    curves += [(panels.after, "(c) after selection and refit", "paper")]
    if panels.fast is not None:
        curves.append((panels.fast, "(d) the same candidates, fast schedule", "fast"))
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
            colour = PROCEDURE_COLOURS[procedure]
            draw_posterior_1d(curve, panels.x, panels.y, ax=ax, colour=colour)
            ax.set_title(title)
            ax.legend(loc="upper left")
        _draw_inclusion(panels.midway, top)
        _draw_subsets(panels.midway, bottom)
    return figure


def _draw_inclusion(midway: InclusionSnapshot, ax: Axes) -> None:
    ax.vlines(midway.candidates, 0, midway.inclusion, color=COLOURS["inclusion"], linewidth=1)
    ax.scatter(midway.candidates, midway.inclusion, s=20, color=COLOURS["inclusion"], zorder=3)
    ax.set(ylim=(-0.03, 1.08), ylabel="inclusion probability")
    ax.set_title(f"(b) inclusion after {midway.step} steps, and sampled subsets")
    ax.tick_params(labelbottom=False)


def _draw_subsets(midway: InclusionSnapshot, ax: Axes) -> None:
    for row, mask in enumerate(midway.draws):
        subset = midway.candidates[mask]
        ax.scatter(subset, [row] * len(subset), s=16, color=COLOURS["points"])
    labels = [counted(int(mask.sum()), "point") for mask in midway.draws]
    ax.set_yticks(range(len(labels)), labels)
    ax.set(xlabel="x", ylim=(len(labels) - 0.5, -0.5))


@final
class Illustration(Experiment):
    """The paper's procedure and the fast schedule on one curve."""

    name = "illustration"
    title = "figure 1: of fifty candidates the few that matter remain"

    def settings(self, scope: Scope, rows: Sequence[Row]) -> list[Row]:
        seeds = range(scope.seeds or (1 if scope.quick else SEEDS))
        share = 0.5 if scope.quick else 1.0
        steps = {"pre": int(share * PRE), "process": int(share * PROCESS), "post": POST}
        both = {"candidates": CANDIDATES, "alpha": ALPHA}
        paper = {"kind": "paper", "steps": steps, "learning_rate": LEARNING_RATE}
        return [
            {**own, "seed": seed, **both} for seed in seeds for own in (paper, {"kind": "fast"})
        ]

    def run(self, settings: Row, scope: Scope) -> Row:
        if settings["kind"] == "fast":
            return _run_fast(settings)
        result = illustrate(
            n_candidates=settings["candidates"],
            alpha=settings["alpha"],
            learning_rate=settings["learning_rate"],
            seed=settings["seed"],
            **settings["steps"],
        )
        midway, panels = result.panels.midway, result.panels
        row = {
            "points": result.fit.posterior.M,
            "expected": round(result.fit.selection.inclusion.sum().item(), 2),
            "bound": round(result.fit.elbo, 3),
            "full_bound": round(result.full_bound, 3),
            "midway": {
                "step": midway.step,
                "candidates": to_lists(midway.candidates),
                "inclusion": to_lists(midway.inclusion),
                "draws": midway.draws.int().tolist(),
            },
        }
        if settings["seed"] != DRAWN:
            return row
        x, y = to_lists(panels.x), to_lists(panels.y)
        before, after = curve_to_row(panels.before), curve_to_row(panels.after)
        return {**row, "x": x, "y": y, "before": before, "after": after}

    def draw(self, rows: Sequence[Row], path: Path) -> Path:
        shown = {row["kind"]: row for row in rows if row["seed"] == DRAWN}
        paper, fast = shown["paper"], shown.get("fast")
        midway = paper["midway"]
        panels = Panels(
            x=to_tensor(paper["x"]),
            y=to_tensor(paper["y"]),
            before=curve_from_row(paper["before"]),
            midway=InclusionSnapshot(
                midway["step"],
                to_tensor(midway["candidates"]),
                to_tensor(midway["inclusion"]),
                torch.tensor(midway["draws"], dtype=torch.bool),
            ),
            after=curve_from_row(paper["after"]),
            fast=None if fast is None else curve_from_row(fast["after"]),
        )
        return save_figure(draw_panels(panels), path)

    def claims(self, rows: Sequence[Row]) -> list[str]:
        paper = [row for row in rows if row["kind"] == "paper"]
        halves = [_inclusion_by_half(row["midway"]) for row in paper]
        lines = [
            claim(
                "midway, uninformative candidates have lower inclusion probabilities",
                agrees=all(smooth < rough for smooth, rough in halves),
                evidence="mean probability on the smooth and on the rough half: "
                + "; ".join(f"{smooth:.2f} and {rough:.2f}" for smooth, rough in halves),
            )
        ]
        full = {row["seed"]: row["full_bound"] for row in paper}
        for kind, name in PROCEDURE_NAMES.items():
            runs = [row for row in rows if row["kind"] == kind and row["seed"] in full]
            if not runs:
                continue
            lines.append(
                claim(
                    f"a small set of highly informative inducing points remains, {name}",
                    agrees=all(2 * row["points"] < row["candidates"] for row in runs),
                    evidence="; ".join(
                        f"{row['points']} of {row['candidates']}, ELBO {row['bound']:.1f} after "
                        f"{full[row['seed']]:.1f} nats with all"
                        for row in runs
                    ),
                )
            )
        return lines


def _run_fast(settings: Row) -> Row:
    data, generator = hills(), torch.Generator().manual_seed(settings["seed"])
    model = _model(data, settings["candidates"], generator)
    schedule = FastSchedule(FixedAlpha(settings["alpha"]))
    fitted = fit(model, data, schedule=schedule, generator=generator)
    row = {
        "points": fitted.posterior.M,
        "expected": round(fitted.selection.inclusion.sum().item(), 2),
        "bound": round(fitted.elbo, 3),
    }
    if settings["seed"] != DRAWN:
        return row
    return {**row, "after": curve_to_row(_curve(fitted.posterior, data))}


def _model(data: Dataset, n_candidates: int, generator: torch.Generator) -> SparseGP:
    rows = torch.randperm(data.N, generator=generator)[:n_candidates]
    return SparseGP(kernel_from("rbf", data.D), data.X[rows])


def _inclusion_by_half(midway: Row) -> tuple[float, float]:
    locations, inclusion = to_tensor(midway["candidates"]), to_tensor(midway["inclusion"])
    smooth = locations < MIDDLE
    return inclusion[smooth].mean().item(), inclusion[~smooth].mean().item()


def _midway(progress: Progress, generator: torch.Generator) -> InclusionSnapshot:
    assert progress.inclusion is not None
    (inclusion,), (candidates,) = progress.inclusion, progress.candidates
    draws = Bernoulli.from_inclusion(inclusion).sample(3, generator=generator)
    return InclusionSnapshot(progress.step, candidates[:, 0], inclusion, draws)


def _curve(posterior: Posterior, data: Dataset) -> Curve:
    x = data.X[:, 0]
    grid: Tensor = torch.linspace(float(x.min()), float(x.max()), 200, dtype=x.dtype)
    prediction = posterior.predict(grid[:, None], observed=True)
    return Curve(
        grid=grid,
        mean=prediction.mean[:, 0],
        sd=prediction.variance[:, 0].sqrt(),
        points=posterior.Z[:, 0],
        heights=posterior.predict_mean(posterior.Z)[:, 0],
    )
