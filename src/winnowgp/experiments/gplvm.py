"""Section 5.3 of the paper: a GP-LVM of single-cell expressions whose points follow the cloud."""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from winnowgp.data import Entries, Standardiser, load_table
from winnowgp.models import LatentVariableGP
from winnowgp.plots import LatentMap, draw_latent_map, saved, saved_frames, styled
from winnowgp.point_processes import SquaredCardinality
from winnowgp.training import JointLatent, LatentFit, Progress, fit_latent, principal_latents

SIDE = 15
ALPHA = 3.0
EPOCHS = 300
# The moments that the figure shows, as shares of the training.
MOMENTS = (0.01, 0.1, 0.33, 1.0)


@dataclass(frozen=True, slots=True)
class Training:
    """What was seen on the way, and what came of it."""

    stages: tuple[str, ...]
    """Cell stage of each row, which the model never sees."""
    start: Float[Tensor, "N 2"]
    """Principal components."""
    frames: tuple[LatentMap, ...]
    fitted: LatentFit[LatentVariableGP]


def run_gplvm(*, seed: int = 0, epochs: int = EPOCHS) -> Training:
    """The paper's setting: PCA start, a fixed grid of 15 × 15 candidates, α = 3, all else learnt.

    Hyper-parameters start at 1. The candidates cover the square that the prior N(0, I) does.
    """
    table = load_table("qpcr")
    entries = Entries.of(Standardiser.of(table.values).forward(table.values))
    generator = torch.Generator().manual_seed(seed)
    start = principal_latents(entries, 2, generator=generator)
    kernel = ScaleKernel(RBFKernel(ard_num_dims=2)).double()
    kernel.initialize(**{"outputscale": 1.0, "base_kernel.lengthscale": 1.0})
    model = LatentVariableGP(kernel, start, candidates=grid(), noise=1.0)
    model.candidates.requires_grad_(False)
    frames: list[LatentMap] = []

    def watch(progress: Progress) -> None:
        assert progress.latents is not None
        assert progress.inclusion is not None
        frames.append(
            LatentMap(
                title=f"epoch {progress.step}: {progress.inclusion.sum().item():.0f} points "
                "expected",
                latents=progress.latents,
                deviation=None,
                candidates=progress.candidates,
                inclusion=progress.inclusion,
            )
        )

    schedule = JointLatent(SquaredCardinality(SIDE**2, ALPHA), epochs=epochs)
    fitted = fit_latent(model, entries, schedule=schedule, generator=generator, on_progress=watch)
    return Training(table.labels, start, tuple(frames), fitted)


def grid(side: int = SIDE, reach: float = 3.0) -> Float[Tensor, "K 2"]:
    """Candidates on a square."""
    steps = torch.linspace(-reach, reach, side, dtype=torch.float64)
    return torch.cartesian_prod(steps, steps)


def neighbour_accuracy(X: Float[Tensor, "N Q"], stages: tuple[str, ...]) -> float:
    """How often a row's nearest neighbour on the map is of its own stage."""
    distance = torch.cdist(X, X).fill_diagonal_(torch.inf)
    nearest = distance.argmin(1).tolist()
    return sum(stages[i] == stages[j] for i, j in enumerate(nearest)) / len(stages)


def gplvm_picture(found: Training, path: Path) -> Path:
    """Four moments of the training."""
    count = len(found.frames)
    chosen = [found.frames[min(max(round(m * count), 1), count) - 1] for m in MOMENTS]
    with styled():
        figure = Figure(figsize=(15, 4.3))
        panels = figure.subplots(1, len(chosen), sharex=True, sharey=True)
        for ax, moment in zip(panels, chosen, strict=True):
            draw_latent_map(moment, found.stages, ax=ax)
        for ax in panels[1:]:
            ax.set(ylabel="")
        handles, names = panels[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=len(names), markerscale=2)
    return saved(figure, path)


if __name__ == "__main__":
    training = run_gplvm()
    for name in map(Path, sys.argv[1:]):
        if name.suffix in (".gif", ".html"):
            saved_frames(
                training.frames[:: max(1, len(training.frames) // 60)], training.stages, name
            )
        else:
            gplvm_picture(training, name)
