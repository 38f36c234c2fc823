"""Figure 2 of the paper: exact against sparse posteriors of one function under three noises.

The paper prints no settings. Here a function is drawn from a process with an RBF kernel of
variance and lengthscale 1 on [0, 10] and observed at 100 places; only σ changes, the draws behind
function, places and noise do not. Kernel and noise are held at the values that made the data, so
that log p(y) − L(Z) is the KL divergence to the one exact posterior. α and the phases are those of
the synthetic experiment.
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
from winnowgp.experiments.sizes import LEARNING_RATE
from winnowgp.linalg import cholesky
from winnowgp.models import Posterior, SparseGP
from winnowgp.models.kernels import covariance
from winnowgp.plots import COLOURS, PROCEDURES, Curve, draw_posterior_1d, saved, styled
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
    """A function and noisy observations of it."""

    data: Dataset
    grid: Float[Tensor, "G 1"]
    truth: Float[Tensor, " G"]
    """The function along the grid."""


def observed(seed: int, sigma: float, *, rows: int = N, reach: float = REACH) -> Observed:
    """The same function, places and standard noise for every σ."""
    generator = torch.Generator().manual_seed(seed)
    draw = {"generator": generator, "dtype": torch.float64}
    x = reach * torch.rand(rows, 1, **draw).sort(0).values
    grid = torch.linspace(0, reach, 101, dtype=torch.float64)[:, None]
    both = torch.cat([x, grid])
    L = cholesky(covariance(_kernel(), both, both)).L
    f = (L @ torch.randn(len(both), **draw)).detach()
    y = f[:rows] + sigma * torch.randn(rows, **draw)
    return Observed(Dataset.of(x, y), grid, f[rows:])


@final
class Noise(Experiment):
    """Three noises; the exact posterior, and what two procedures keep of fifty candidates."""

    name = "noise"
    title = "figure 2: the more noise, the fewer points an accurate posterior needs"

    def settings(self, scope: Scope, rows: Sequence[Row]) -> list[Row]:
        seeds = range(scope.seeds or (2 if scope.quick else SEEDS))
        steps = (
            {"pre": 50, "process": 300, "post": 50}
            if scope.quick
            else {"pre": 200, "process": 600, "post": 200}
        )
        chosen = {"candidates": CANDIDATES, "alpha": ALPHA}
        kinds: list[Row] = [
            {"kind": "exact"},
            {"kind": "paper", **chosen, "steps": steps, "learning_rate": LEARNING_RATE},
            {"kind": "fast", **chosen},
        ]
        return [
            {**kind, "seed": seed, "sigma": sigma, "N": N, "reach": REACH}
            for seed in seeds
            for sigma in SIGMAS
            for kind in kinds
        ]

    def measured(self, settings: Row, scope: Scope) -> Row:
        seed, sigma = settings["seed"], settings["sigma"]
        found = observed(seed, sigma, rows=settings["N"], reach=settings["reach"])
        drawn = seed == DRAWN
        if settings["kind"] == "exact":
            # With a point at every row nothing is left out.
            posterior = _model(found.data, found.data.X, sigma).posterior(found.data)
            row = {"mean_sd": round(_curve(posterior, found.grid).sd.mean().item(), 4)}
            return row if not drawn else {**row, **_scene(found, posterior)}
        fitted = _fitted(settings, found.data)
        row = {
            "points": fitted.posterior.M,
            "expected": round(fitted.selection.inclusion.sum().item(), 2),
            "kl": round(_evidence(found.data, sigma) - fitted.elbo, 4),
        }
        if drawn:
            row["curve"] = curve_row(_curve(fitted.posterior, found.grid))
        return row

    def draw(self, rows: Sequence[Row], path: Path) -> Path:
        shown = [row for row in rows if row["seed"] == DRAWN]
        scenes = {row["sigma"]: row for row in shown if row["kind"] == "exact"}
        with styled():
            figure = Figure(figsize=(11, 6.6))
            panels = figure.subplots(3, len(SIGMAS), sharex=True, sharey="col", squeeze=False)
            for row in shown:
                kind, sigma = row["kind"], row["sigma"]
                ax = panels[list(NAMES).index(kind), SIGMAS.index(sigma)]
                _draw_panel(row, scenes[sigma], ax)
                detail = "" if kind == "exact" else f": {row['points']} points"
                ax.set_title(f"σ = {sigma:g}, {NAMES[kind]}{detail}")
                ax.set(xlabel="x" if kind == "fast" else "", ylabel="y" if sigma == 0.1 else "")
            panels[0, 0].legend(loc="upper right", fontsize=7)
        return saved(figure, path)

    def claims(self, rows: Sequence[Row]) -> list[str]:
        by = {kind: [row for row in rows if row["kind"] == kind] for kind in NAMES}
        sd = _means(by["exact"], "mean_sd")
        lines = [
            claim(
                "with more noise the exact posterior is more uncertain",
                agrees=_rising(sd),
                found="mean sd of f for σ = 0.1, 0.3, 1: " + ", ".join(f"{s:.3f}" for s in sd),
            )
        ]
        for kind in ("paper", "fast"):
            points, kl = _means(by[kind], "points"), _means(by[kind], "kl")
            seeds = {row["seed"] for row in by[kind]}
            each = [_means([r for r in by[kind] if r["seed"] == seed], "points") for seed in seeds]
            lines += [
                claim(
                    f"with more noise fewer points are kept, {NAMES[kind]}",
                    agrees=_rising(points[::-1]),
                    found=", ".join(f"{p:.1f}" for p in points)
                    + f" points on average, in {sum(_rising(e[::-1]) for e in each)} of "
                    f"{len(each)} seeds at every step; KL to the exact posterior "
                    + ", ".join(f"{k:.2f}" for k in kl)
                    + " nats",
                )
            ]
        return lines


def _kernel() -> Kernel:
    return kernel_from("rbf", 1).double()


def _model(data: Dataset, points: Float[Tensor, "K 1"], sigma: float) -> SparseGP:
    """Kernel and noise as they made the data; only the points can move."""
    model = SparseGP(_kernel(), points, noise=sigma**2)
    model.kernel.requires_grad_(False)
    model.likelihood.requires_grad_(False)
    return model


def _fitted(settings: Row, data: Dataset) -> FitResult[SparseGP]:
    generator = torch.Generator().manual_seed(settings["seed"])
    chosen = torch.randperm(data.N, generator=generator)[: settings["candidates"]]
    schedule: Schedule = FastSchedule(FixedAlpha(settings["alpha"]))
    if settings["kind"] == "paper":
        prior = SquaredCardinality(settings["candidates"], settings["alpha"])
        rate = settings["learning_rate"]
        steps = settings["steps"]
        schedule = PaperSchedule(
            prior,
            pre=steps["pre"],
            joint=steps["process"],
            post=steps["post"],
            learning_rate=rate,
        )
    model = _model(data, data.X[chosen], settings["sigma"])
    return fit(model, data, schedule=schedule, generator=generator)


def _evidence(data: Dataset, sigma: float) -> float:
    Kff = covariance(_kernel(), data.X, data.X).detach()
    return exact_log_marginal(Kff, Y=data.Y, noise=Kff.new_tensor(sigma**2)).item()


def _scene(found: Observed, posterior: Posterior) -> Row:
    """What all panels of one σ share."""
    curve = _curve(posterior, found.grid)
    bare = Curve(curve.grid, curve.mean, curve.sd, curve.points[:0], curve.heights[:0])
    return {
        "x": rounded(found.data.X[:, 0]),
        "y": rounded(found.data.Y[:, 0]),
        "truth": rounded(found.truth),
        "curve": curve_row(bare),
    }


def _curve(posterior: Posterior, grid: Float[Tensor, "G 1"]) -> Curve:
    along = posterior.predict(grid)
    Z = posterior.Z
    sd = along.variance[:, 0].sqrt()
    return Curve(grid[:, 0], along.mean[:, 0], sd, Z[:, 0], posterior.predict_mean(Z)[:, 0])


def _draw_panel(row: Row, scene: Row, ax: Axes) -> None:
    curve, (x, y) = curve_of(row["curve"]), (numbers(scene["x"]), numbers(scene["y"]))
    colour = PROCEDURES.get(row["kind"], COLOURS["second"])
    draw_posterior_1d(curve, x, y, ax=ax, colour=colour)
    ax.plot(curve.grid, numbers(scene["truth"]), "k--", linewidth=0.8, label="function")


def _means(rows: Sequence[Row], column: str) -> list[float]:
    """Over seeds, for each σ in turn."""
    groups = [[row[column] for row in rows if row["sigma"] == sigma] for sigma in SIGMAS]
    return [fmean(group) for group in groups]


def _rising(values: Sequence[float]) -> bool:
    return all(a < b for a, b in pairwise(values))
