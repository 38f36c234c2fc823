"""Figure 1 of the paper on the package's own data."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from winnowgp.data import Dataset, hills
from winnowgp.estimators import kernel_from
from winnowgp.experiments.base import (
    PROCEDURE_NAMES,
    Experiment,
    Row,
    Scope,
    claim,
    curve_of,
    curve_row,
    numbers,
    rounded,
)
from winnowgp.models import Posterior, SparseGP
from winnowgp.plots import draw_illustration, saved
from winnowgp.plots import paper as illustration
from winnowgp.plots.regression import Curve
from winnowgp.point_processes import Bernoulli, SquaredCardinality
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

SEEDS = 3
# The seed whose rows hold the curves of the figure.
DRAWN = 0
# Where the hills begin to be steep: half of the path.
MIDDLE = 4.0


@dataclass(frozen=True, slots=True)
class Illustrated:
    """The figure's numbers, and the fit behind them."""

    picture: illustration.Illustration
    fit: FitResult
    full_bound: float
    """The bound with all candidates before any was dropped, in nats."""


@final
class _MidwayCallback:
    """Keeps the step in the middle of learning inclusion."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.kept: Progress | None = None

    def __call__(self, progress: Progress) -> None:
        if progress.phase == "inclusion" and progress.step == self.step:
            self.kept = progress


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
) -> Illustrated:
    """Train with all candidates, learn which to keep, refit, and remember three moments."""
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
    callback = _MidwayCallback(max(process // 4, 1))
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

    assert callback.kept is not None
    picture = illustration.Illustration(
        x=data.X[:, 0],
        y=data.Y[:, 0],
        before=_curve(before, data),
        midway=_midway(callback.kept, generator),
        after=_curve(fitted.posterior, data),
    )
    return Illustrated(picture, fitted, full_bound)


@final
class Illustration(Experiment):
    """A curve that is smooth at first and rough later; the paper's training and the fast one."""

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

    def measured(self, settings: Row, scope: Scope) -> Row:
        if settings["kind"] == "fast":
            return _measured_fast(settings)
        found = illustrate(
            n_candidates=settings["candidates"],
            alpha=settings["alpha"],
            learning_rate=settings["learning_rate"],
            seed=settings["seed"],
            **settings["steps"],
        )
        midway = found.picture.midway
        row = {
            "points": found.fit.posterior.M,
            "expected": round(found.fit.selection.inclusion.sum().item(), 2),
            "bound": round(found.fit.elbo, 3),
            "full_bound": round(found.full_bound, 3),
            "midway": {
                "step": midway.step,
                "candidates": rounded(midway.candidates),
                "inclusion": rounded(midway.inclusion),
                "draws": midway.draws.int().tolist(),
            },
        }
        if settings["seed"] != DRAWN:
            return row
        x, y = rounded(found.picture.x), rounded(found.picture.y)
        before, after = curve_row(found.picture.before), curve_row(found.picture.after)
        return {**row, "x": x, "y": y, "before": before, "after": after}

    def draw(self, rows: Sequence[Row], path: Path) -> Path:
        shown = {row["kind"]: row for row in rows if row["seed"] == DRAWN}
        paper, fast = shown["paper"], shown.get("fast")
        midway = paper["midway"]
        picture = illustration.Illustration(
            x=numbers(paper["x"]),
            y=numbers(paper["y"]),
            before=curve_of(paper["before"]),
            midway=illustration.Midway(
                midway["step"],
                numbers(midway["candidates"]),
                numbers(midway["inclusion"]),
                torch.tensor(midway["draws"], dtype=torch.bool),
            ),
            after=curve_of(paper["after"]),
            fast=None if fast is None else curve_of(fast["after"]),
        )
        return saved(draw_illustration(picture), path)

    def claims(self, rows: Sequence[Row]) -> list[str]:
        paper = [row for row in rows if row["kind"] == "paper"]
        halves = [_inclusion_by_half(row["midway"]) for row in paper]
        lines = [
            claim(
                "midway, uninformative points are less likely to be included",
                agrees=all(smooth < rough for smooth, rough in halves),
                found="mean probability on the smooth and on the rough half: "
                + "; ".join(f"{smooth:.2f} and {rough:.2f}" for smooth, rough in halves),
            )
        ]
        full = {row["seed"]: row["full_bound"] for row in paper}
        for kind, name in PROCEDURE_NAMES.items():
            kept = [row for row in rows if row["kind"] == kind and row["seed"] in full]
            lines += [
                claim(
                    f"a small set of highly informative points remains, {name}",
                    agrees=all(2 * row["points"] < row["candidates"] for row in kept),
                    found="; ".join(
                        f"{row['points']} of {row['candidates']}, bound {row['bound']:.1f} after "
                        f"{full[row['seed']]:.1f} nats with all"
                        for row in kept
                    ),
                )
            ]
        return lines


def _measured_fast(settings: Row) -> Row:
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
    return {**row, "after": curve_row(_curve(fitted.posterior, data))}


def _model(data: Dataset, n_candidates: int, generator: torch.Generator) -> SparseGP:
    chosen = torch.randperm(data.N, generator=generator)[:n_candidates]
    return SparseGP(kernel_from("rbf", data.D), data.X[chosen])


def _inclusion_by_half(midway: Row) -> tuple[float, float]:
    where, inclusion = numbers(midway["candidates"]), numbers(midway["inclusion"])
    smooth = where < MIDDLE
    return inclusion[smooth].mean().item(), inclusion[~smooth].mean().item()


def _midway(progress: Progress, generator: torch.Generator) -> illustration.Midway:
    assert progress.inclusion is not None
    (inclusion,), (candidates,) = progress.inclusion, progress.candidates
    draws = Bernoulli.from_inclusion(inclusion).sample(3, generator=generator)
    return illustration.Midway(progress.step, candidates[:, 0], inclusion, draws)


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
