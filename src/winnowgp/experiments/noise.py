"""Figure 2 of the paper: exact and sparse posteriors of one function at three noise levels.

The paper prints no settings. Here a function is drawn from a GP with an RBF kernel of variance and
lengthscale 1 on [0, 10] and observed at 100 inputs; only σ changes, the draws of function, inputs
and noise do not. Kernel and noise are fixed at the values that generated the data, so that
log p(y) − L(Z) is the KL divergence to the one exact posterior. α and the phases are those of the
synthetic experiment.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import final

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from winnowgp.bounds import exact_log_marginal
from winnowgp.data import Dataset
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
from winnowgp.experiments.sizes import LEARNING_RATE
from winnowgp.linalg import cholesky
from winnowgp.models import Posterior, SparseGP
from winnowgp.models.kernels import covariance
from winnowgp.plots import Curve, draw_posterior_1d
from winnowgp.plots.style import COLOURS, save_figure, styled
from winnowgp.point_processes import SquaredCardinality
from winnowgp.training import FastSchedule, FitResult, FixedAlpha, PaperSchedule, Schedule, fit

SIGMAS = (0.1, 0.3, 1.0)
N, CANDIDATES, ALPHA, REACH = 100, 50, 0.05, 10.0
SEEDS = 5
# The seed whose rows hold the curves of the figure.
DRAWN = 0
NAMES = {"exact": "the exact posterior", **PROCEDURE_NAMES}


@dataclass(frozen=True, slots=True)
class Observed:
    """Noisy observations of a function, and the function along a grid."""

    data: Dataset
    grid: Float[Tensor, "G 1"]
    truth: Float[Tensor, " G"]


def observed(seed: int, sigma: float, *, rows: int = N, reach: float = REACH) -> Observed:
    """Draw function, inputs and noise; for one seed, only the scale of the noise depends on σ."""
    generator = torch.Generator().manual_seed(seed)
    options = {"generator": generator, "dtype": torch.float64}
    x = reach * torch.rand(rows, 1, **options).sort(0).values
    grid = torch.linspace(0, reach, 101, dtype=torch.float64)[:, None]
    both = torch.cat([x, grid])
    L = cholesky(covariance(_kernel(), both, both)).L
    f = (L @ torch.randn(len(both), **options)).detach()
    y = f[:rows] + sigma * torch.randn(rows, **options)
    return Observed(Dataset.of(x, y), grid, f[rows:])


@final
class Noise(Experiment):
    """The exact posterior and two procedures with fifty candidates, at three noise levels."""

    name = "noise"
    title = "figure 2: with more noise an accurate posterior needs fewer inducing points"

    def settings(self, scope: Scope, rows: Sequence[Row]) -> list[Row]:
        seeds = range(scope.seeds or (2 if scope.quick else SEEDS))
        steps = (
            {"pre": 50, "process": 300, "post": 50}
            if scope.quick
            else {"pre": 200, "process": 600, "post": 200}
        )
        selection = {"candidates": CANDIDATES, "alpha": ALPHA}
        kinds: list[Row] = [
            {"kind": "exact"},
            {"kind": "paper", **selection, "steps": steps, "learning_rate": LEARNING_RATE},
            {"kind": "fast", **selection},
        ]
        return [
            {**kind, "seed": seed, "sigma": sigma, "N": N, "reach": REACH}
            for seed in seeds
            for sigma in SIGMAS
            for kind in kinds
        ]

    def run(self, settings: Row, scope: Scope) -> Row:
        seed, sigma = settings["seed"], settings["sigma"]
        observations = observed(seed, sigma, rows=settings["N"], reach=settings["reach"])
        drawn = seed == DRAWN
        if settings["kind"] == "exact":
            # With an inducing point at every row the sparse posterior is exact.
            data = observations.data
            curve = _curve(_model(data.X, sigma).posterior(data), observations.grid)
            row = {"mean_sd": round(curve.sd.mean().item(), 4)}
            return row if not drawn else {**row, **_figure_columns(observations, curve)}
        fitted = _fitted(settings, observations.data)
        row = {
            "points": fitted.posterior.M,
            "expected": round(fitted.selection.inclusion.sum().item(), 2),
            "kl": round(_evidence(observations.data, sigma) - fitted.elbo, 4),
        }
        if drawn:
            row["curve"] = curve_to_row(_curve(fitted.posterior, observations.grid))
        return row

    def draw(self, rows: Sequence[Row], path: Path) -> Path:
        shown = [row for row in rows if row["seed"] == DRAWN]
        exact = {row["sigma"]: row for row in shown if row["kind"] == "exact"}
        with styled():
            figure = Figure(figsize=(11, 6.6))
            panels = figure.subplots(3, len(SIGMAS), sharex=True, sharey="col", squeeze=False)
            for row in shown:
                kind, sigma = row["kind"], row["sigma"]
                ax = panels[list(NAMES).index(kind), SIGMAS.index(sigma)]
                _draw_panel(row, exact[sigma], ax)
                detail = "" if kind == "exact" else f", M = {row['points']}"
                ax.set_title(f"σ = {sigma:g}, {NAMES[kind]}{detail}")
                ax.set(xlabel="x" if kind == "fast" else "", ylabel="y" if sigma == 0.1 else "")
            panels[0, 0].legend(loc="upper right", fontsize=7)
        return save_figure(figure, path)

    def claims(self, rows: Sequence[Row]) -> list[str]:
        by = {kind: [row for row in rows if row["kind"] == kind] for kind in NAMES}
        sd = _means(by["exact"], "mean_sd")
        lines = [
            claim(
                "with more noise the exact posterior is more uncertain",
                agrees=_rising(sd),
                evidence="mean sd of f for σ = 0.1, 0.3, 1: " + ", ".join(f"{s:.3f}" for s in sd),
            )
        ]
        for kind in ("paper", "fast"):
            points, kl = _means(by[kind], "points"), _means(by[kind], "kl")
            seeds = {row["seed"] for row in by[kind]}
            each = [_means([r for r in by[kind] if r["seed"] == seed], "points") for seed in seeds]
            lines.append(
                claim(
                    f"with more noise fewer inducing points are selected, {NAMES[kind]}",
                    agrees=_rising(points[::-1]),
                    evidence=", ".join(f"{p:.1f}" for p in points)
                    + f" on average, fewer at every step in {sum(_rising(e[::-1]) for e in each)} "
                    f"of {len(each)} seeds; KL to the exact posterior "
                    + ", ".join(f"{k:.2f}" for k in kl)
                    + " nats",
                )
            )
        return lines


def _kernel() -> Kernel:
    return kernel_from("rbf", 1).double()


def _model(points: Float[Tensor, "K 1"], sigma: float) -> SparseGP:
    """Return a model with the kernel and noise of the data; only inducing points are trained."""
    model = SparseGP(_kernel(), points, noise=sigma**2)
    model.kernel.requires_grad_(False)
    model.likelihood.requires_grad_(False)
    return model


def _fitted(settings: Row, data: Dataset) -> FitResult[SparseGP]:
    generator = torch.Generator().manual_seed(settings["seed"])
    rows = torch.randperm(data.N, generator=generator)[: settings["candidates"]]
    schedule: Schedule = FastSchedule(FixedAlpha(settings["alpha"]))
    if settings["kind"] == "paper":
        prior = SquaredCardinality(settings["candidates"], settings["alpha"])
        steps = settings["steps"]
        schedule = PaperSchedule(
            prior,
            pre=steps["pre"],
            joint=steps["process"],
            post=steps["post"],
            learning_rate=settings["learning_rate"],
        )
    model = _model(data.X[rows], settings["sigma"])
    return fit(model, data, schedule=schedule, generator=generator)


def _evidence(data: Dataset, sigma: float) -> float:
    Kff = covariance(_kernel(), data.X, data.X).detach()
    return exact_log_marginal(Kff, Y=data.Y, noise=Kff.new_tensor(sigma**2)).item()


def _figure_columns(observations: Observed, curve: Curve) -> Row:
    """Return the data, the function and the exact posterior, without its inducing points."""
    bare = Curve(curve.grid, curve.mean, curve.sd, curve.points[:0], curve.heights[:0])
    return {
        "x": to_lists(observations.data.X[:, 0]),
        "y": to_lists(observations.data.Y[:, 0]),
        "truth": to_lists(observations.truth),
        "curve": curve_to_row(bare),
    }


def _curve(posterior: Posterior, grid: Float[Tensor, "G 1"]) -> Curve:
    along = posterior.predict(grid)
    Z = posterior.Z
    sd = along.variance[:, 0].sqrt()
    return Curve(grid[:, 0], along.mean[:, 0], sd, Z[:, 0], posterior.predict_mean(Z)[:, 0])


def _draw_panel(row: Row, exact: Row, ax: Axes) -> None:
    curve = curve_from_row(row["curve"])
    x, y, truth = (to_tensor(exact[name]) for name in ("x", "y", "truth"))
    colour = PROCEDURE_COLOURS.get(row["kind"], COLOURS["second"])
    draw_posterior_1d(curve, x, y, ax=ax, colour=colour)
    ax.plot(curve.grid, truth, "k--", linewidth=0.8, label="function")


def _means(rows: Sequence[Row], column: str) -> list[float]:
    """Return the mean of a column over seeds, for each σ."""
    groups = [[row[column] for row in rows if row["sigma"] == sigma] for sigma in SIGMAS]
    return [fmean(group) for group in groups]


def _rising(values: Sequence[float]) -> bool:
    return all(a < b for a, b in pairwise(values))
