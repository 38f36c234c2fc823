"""Figure 7 of the paper: a GP-LVM of single-cell expressions with candidates on a grid.

The latent positions start at principal components; the 15 × 15 candidates are fixed, α = 3. The
paper's procedure trains the point process throughout 300 epochs; the fast schedule has the same
candidates and α. With the settings of the scripts that the authors released, the candidates move
too, and the point process is trained after the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isqrt
from pathlib import Path
from statistics import fmean
from typing import final

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from winnowgp.data import MaskedMatrix, Standardiser
from winnowgp.data.catalogue import load_table
from winnowgp.experiments.base import (
    PROCEDURE_COLOURS,
    PROCEDURE_NAMES,
    RELEASED_NAMES,
    Experiment,
    Row,
    Scope,
    claim,
    process_options,
    to_lists,
    to_tensor,
)
from winnowgp.models import LatentVariableGP
from winnowgp.plots.latent import LatentMap, draw_latent_map
from winnowgp.plots.style import save_figure, styled
from winnowgp.point_processes import SquaredCardinality
from winnowgp.training import (
    FastSchedule,
    FitResult,
    FixedAlpha,
    PaperSchedule,
    Progress,
    Schedule,
    fit,
    principal_latents,
)
from winnowgp.training.adam import Adam

SIDE, REACH = 15, 3.0
ALPHA = 3.0
EPOCHS, QUICK_EPOCHS = 300, 60
SEEDS = 5
SHARED = {"candidates": SIDE**2, "reach": REACH, "alpha": ALPHA}
# Every hyper-parameter starts at 1.
START = {"start_variance": 1.0, "start_lengthscale": 1.0, "start_noise": 1.0}
PAPER = {
    "learning_rate": 0.01,
    "process_learning_rate": 0.2,
    "subsets": 4,
    "start_inclusion": 0.5,
    **START,
}
# Number of new candidates per round, of rounds, and of L-BFGS iterations after the last one.
FAST = {"fresh": 100, "rounds": 3, "iterations": 300, **START}
# The settings of the scripts that the authors released.
RELEASED: Row = {
    **SHARED,
    **START,
    "alpha": 5.0,
    "epochs": {"held": 200, "free": 800, "process": 200, "post": 500},
    "learning_rate": 0.02,
    "process_learning_rate": 0.5,
    "subsets": 64,
    "start_inclusion": 0.1,
}
QUICK_RELEASED_EPOCHS = {"held": 10, "free": 20, "process": 20, "post": 10}
NAMES = {**PROCEDURE_NAMES, **RELEASED_NAMES}
# The steps that the figure shows, as shares of the training.
MOMENTS = (0.01, 0.1, 0.33, 1.0)
# The seed whose rows hold the figure.
DRAWN = 0


@dataclass(frozen=True, slots=True)
class Training:
    """The history and the result of one fit."""

    stages: tuple[str, ...]
    """Cell stage of each row, which the model does not use."""
    start: Float[Tensor, "N 2"]
    """Principal components, the initial latent positions."""
    frames: tuple[LatentMap, ...]
    """The embedding after every step."""
    fitted: FitResult[LatentVariableGP]

    def moments(self) -> list[LatentMap]:
        """Return the frames that the figure shows."""
        count = len(self.frames)
        return [self.frames[min(max(round(m * count), 1), count) - 1] for m in MOMENTS]


def paper_settings(seed: int = 0, *, epochs: int = EPOCHS) -> Row:
    """Return the settings of a run of the paper's procedure."""
    return {"kind": "paper", "epochs": epochs, "seed": seed, **SHARED, **PAPER}


def run_gplvm(settings: Row, *, device: str = "cpu") -> Training:
    """Fit a GP-LVM to qPCR as the settings of a row specify.

    The candidates stay on their grid, except that released runs hold them for some epochs only,
    unless `grid_held` is set.
    """
    table = load_table("qpcr")
    entries = MaskedMatrix.of(Standardiser.of(table.values).forward(table.values).to(device))
    generator = torch.Generator(device=device).manual_seed(settings["seed"])
    start = principal_latents(entries, 2, generator=generator)
    kernel = ScaleKernel(RBFKernel(ard_num_dims=2)).double()
    lengthscale = {"base_kernel.lengthscale": settings["start_lengthscale"]}
    kernel.initialize(outputscale=settings["start_variance"], **lengthscale)
    candidates = _grid_of(settings).to(device)
    noise = settings["start_noise"]
    model = LatentVariableGP(kernel, start, candidates=candidates, noise=noise)
    model.candidates.requires_grad_(False)
    frames: list[LatentMap] = []

    def record(progress: Progress) -> None:
        assert progress.latents is not None
        points = candidates
        if settings["kind"] == "released":
            if progress.inclusion is None:
                # The model is trained alone before and after the point process.
                return
            (points,) = progress.candidates
        if progress.inclusion is None:
            inclusion = _present(candidates, progress.candidates[0])
        else:
            (inclusion,) = progress.inclusion
        frames.append(
            LatentMap(
                title=f"step {len(frames) + 1}: {inclusion.sum().item():.0f} points",
                latents=progress.latents.cpu(),
                deviation=None,
                candidates=points.cpu(),
                inclusion=inclusion.cpu(),
            )
        )

    schedule = _schedule(settings)
    if settings["kind"] == "released":
        Adam(settings["epochs"]["held"]).maximise(
            lambda: model.bound(entries, generator=generator),
            [([p for p in model.parameters() if p.requires_grad], settings["learning_rate"])],
            scale=float(entries.count),
            on_step=lambda step, value: None,
        )
        model.candidates.requires_grad_(not settings.get("grid_held", False))
    fitted = fit(model, entries, schedule=schedule, generator=generator, callbacks=record)
    return Training(table.labels, start, tuple(frames), fitted)


def _schedule(settings: Row) -> Schedule:
    alpha = settings["alpha"]
    if settings["kind"] == "fast":
        return FastSchedule(
            FixedAlpha(alpha),
            n_candidates=settings["fresh"],
            rounds=settings["rounds"],
            iterations=settings["iterations"],
        )
    epochs = settings["epochs"]
    phases = {"joint": epochs}
    if settings["kind"] == "released":
        phases = {"pre": epochs["free"], "joint": epochs["process"], "post": epochs["post"]}
    return PaperSchedule(
        SquaredCardinality(settings["candidates"], alpha),
        learning_rate=settings["learning_rate"],
        **phases,
        **process_options(settings),
    )


def grid(side: int = SIDE, reach: float = REACH) -> Float[Tensor, "K 2"]:
    """Return candidates on a regular grid over the square that the prior N(0, I) covers."""
    steps = torch.linspace(-reach, reach, side, dtype=torch.float64)
    return torch.cartesian_prod(steps, steps)


def neighbour_accuracy(X: Float[Tensor, "N Q"], stages: tuple[str, ...]) -> float:
    """Return the share of rows whose nearest neighbour in the embedding has the same stage."""
    distance = torch.cdist(X, X).fill_diagonal_(torch.inf)
    nearest = distance.argmin(1).tolist()
    return sum(stages[i] == stages[j] for i, j in enumerate(nearest)) / len(stages)


@final
class Gplvm(Experiment):
    """The embedding at four steps of each procedure."""

    name = "gplvm"
    title = "figure 7: a GP-LVM whose inducing points are active near the latent positions"
    tables = ("qpcr",)
    has_released = True

    def settings(self, scope: Scope, rows: Sequence[Row]) -> list[Row]:
        seeds = range(scope.seeds or (1 if scope.quick else SEEDS))
        if scope.released:
            quick = {"epochs": QUICK_RELEASED_EPOCHS, "subsets": 4} if scope.quick else {}
            return [{"kind": "released", "seed": seed, **RELEASED, **quick} for seed in seeds]
        epochs = QUICK_EPOCHS if scope.quick else EPOCHS
        # With given candidates the fast schedule is deterministic: one seed suffices.
        fast = {"kind": "fast", "seed": DRAWN, **SHARED, **FAST}
        return [*(paper_settings(seed, epochs=epochs) for seed in seeds), fast]

    def run(self, settings: Row, scope: Scope) -> Row:
        training = run_gplvm(settings, device=scope.device)
        latents = training.fitted.model.latents.mean.detach().cpu()
        moments = training.moments()
        row: Row = {
            "points": training.fitted.model.K,
            "bound": round(training.fitted.elbo, 2),
            "accuracy": round(neighbour_accuracy(latents, training.stages), 4),
            "start_accuracy": round(neighbour_accuracy(training.start.cpu(), training.stages), 4),
            "distances": [_distances(moment) for moment in moments],
            "switched": [_switched(*pair) for pair in pairwise(moments)],
        }
        if settings["seed"] != DRAWN:
            return row
        names = list(dict.fromkeys(training.stages))
        return {
            **row,
            "stages": names,
            "stage": [names.index(stage) for stage in training.stages],
            "moments": [
                {
                    "title": moment.title,
                    "latents": to_lists(moment.latents, 2),
                    "inclusion": to_lists(moment.inclusion, 2),
                }
                | (
                    {"candidates": to_lists(moment.candidates, 2)}
                    if settings["kind"] == "released"
                    else {}
                )
                for moment in moments
            ],
        }

    def draw(self, rows: Sequence[Row], path: Path) -> Path:
        shown = [row for row in rows if row["seed"] == DRAWN]
        with styled():
            figure = Figure(figsize=(15, 4.1 * len(shown)))
            panels = figure.subplots(
                len(shown), len(MOMENTS), sharex=True, sharey=True, squeeze=False
            )
            for line, row in zip(panels, shown, strict=True):
                labels = [row["stages"][number] for number in row["stage"]]
                for ax, moment in zip(line, row["moments"], strict=True):
                    draw_latent_map(_map(moment, row), labels, ax=ax)
                    ax.set(xlabel="", ylabel="")
                line[0].set_ylabel(NAMES[row["kind"]], color=PROCEDURE_COLOURS[row["kind"]])
            handles, names = panels[0, 0].get_legend_handles_labels()
            figure.legend(
                handles, names, loc="outside lower center", ncols=len(names), markerscale=2
            )
        return save_figure(figure, path)

    def claims(self, rows: Sequence[Row]) -> list[str]:
        lines = []
        for kind, name in NAMES.items():
            last = [row["distances"][-1] for row in rows if row["kind"] == kind]
            if not last:
                continue
            lines.append(
                claim(
                    f"the active candidates are those near the latent positions, {name}",
                    agrees=all(None not in pair and pair[0] < pair[1] for pair in last),
                    evidence="mean distance to the nearest cell at the end, active and inactive: "
                    + "; ".join(f"{active} and {idle}" for active, idle in last),
                )
            )
        # The fast schedule removes candidates and never adds one.
        learnt = [kind for kind in ("paper", "released") if any(r["kind"] == kind for r in rows)]
        return [*lines, *(_switching(rows, kind) for kind in learnt), _quality(rows)]


def _switching(rows: Sequence[Row], kind: str) -> str:
    switched = [row["switched"][-1] for row in rows if row["kind"] == kind]
    return claim(
        f"further candidates become active as the latent positions move, {NAMES[kind]}",
        agrees=all(on > 0 for on, _ in switched),
        evidence="activated and deactivated between the third step shown and the last: "
        + "; ".join(f"{on} and {off}" for on, off in switched),
    )


def _quality(rows: Sequence[Row]) -> str:
    texts = [f"PCA {rows[0]['start_accuracy']:.3f}"]
    for kind, name in NAMES.items():
        runs = [row for row in rows if row["kind"] == kind]
        if not runs:
            continue
        sizes = ", ".join(str(row["points"]) for row in runs)
        accuracy, bound = (fmean([r[column] for r in runs]) for column in ("accuracy", "bound"))
        texts.append(f"{name} {accuracy:.3f} ({sizes} inducing points, ELBO {bound:.0f} nats)")
    return "share of nearest neighbours of the same cell stage: " + ", ".join(texts)


def _present(candidates: Float[Tensor, "K 2"], points: Float[Tensor, "M 2"]) -> Float[Tensor, " K"]:
    """Return one for each candidate that is an inducing point, and zero for the others."""
    return (candidates[:, None] == points).all(-1).any(1).to(candidates.dtype)


def _distances(moment: LatentMap) -> list[float | None]:
    """Return the mean distance of active and of inactive candidates to their nearest row."""
    nearest = torch.cdist(moment.candidates, moment.latents).amin(1)
    active = moment.inclusion > 0.5
    sides = nearest[active], nearest[~active]
    return [round(side.mean().item(), 3) if len(side) else None for side in sides]


def _switched(before: LatentMap, after: LatentMap) -> list[int]:
    """Return how many candidates became active, and how many inactive."""
    was, now = before.inclusion > 0.5, after.inclusion > 0.5
    return [int((now & ~was).sum()), int((was & ~now).sum())]


def _grid_of(row: Row) -> Float[Tensor, "K 2"]:
    return grid(isqrt(row["candidates"]), row["reach"])


def _map(moment: Row, row: Row) -> LatentMap:
    moved = moment.get("candidates")
    return LatentMap(
        title=moment["title"],
        latents=to_tensor(moment["latents"]),
        deviation=None,
        candidates=_grid_of(row) if moved is None else to_tensor(moved),
        inclusion=to_tensor(moment["inclusion"]),
    )
