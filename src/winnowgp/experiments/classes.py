"""Where a classifier keeps its points: two moons, candidates on a grid."""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from sklearn.datasets import make_moons
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.models import VariationalGP
from winnowgp.plots import ClassMap, draw_classes_2d, saved, styled
from winnowgp.point_processes import SquaredCardinality
from winnowgp.training import FastSchedule, FitResult, PaperSchedule, Schedule, fit

SIDE = 10

N = 600


@dataclass(frozen=True, slots=True)
class Classes:
    """The data, and what each schedule found."""

    X: Float[Tensor, "N 2"]
    labels: Int[Tensor, " N"]
    maps: dict[str, ClassMap]


def run_classes(*, seed: int = 0, epochs: tuple[int, int, int] = (300, 500, 300)) -> Classes:
    """Fit both schedules to two noisy moons, from the same grid of 10 × 10 candidates.

    The candidates are frozen for the fast schedule, so that the picture shows which of them it
    keeps; the paper's moves them while it learns.
    """
    X, y = make_moons(N, noise=0.22, random_state=seed)
    data = Dataset.of(torch.from_numpy(X), torch.from_numpy(y).double())
    low, high = data.X.amin(0), data.X.amax(0)
    steps = torch.linspace(0, 1, SIDE, dtype=torch.float64)
    grid = torch.cartesian_prod(*(low[d] + steps * (high[d] - low[d]) for d in range(2)))
    pre, joint, post = epochs
    prior = SquaredCardinality(len(grid), 0.05)
    schedules: dict[str, tuple[Schedule, bool]] = {
        "fast": (FastSchedule(), False),
        "paper": (PaperSchedule(prior, pre=pre, joint=joint, post=post), True),
    }
    maps = {}
    for name, (schedule, moves) in schedules.items():
        kernel = ScaleKernel(RBFKernel(ard_num_dims=2))
        model = VariationalGP(kernel, grid, likelihood=BernoulliLikelihood())
        model.candidates.requires_grad_(moves)
        generator = torch.Generator().manual_seed(seed)
        fitted = fit(model, data, schedule=schedule, generator=generator)
        held = (grid[:, None] != fitted.posterior.Z).any(-1).all(1)
        idle = fitted.candidates[0][~fitted.selection.mask] if moves else grid[held]
        maps[name] = _map(fitted, data, idle)
    return Classes(data.X, data.Y[:, 0].long(), maps)


def _map(fitted: FitResult[VariationalGP], data: Dataset, idle: Float[Tensor, "J 2"]) -> ClassMap:
    margin = 0.15 * (data.X.amax(0) - data.X.amin(0))
    low, high = data.X.amin(0) - margin, data.X.amax(0) + margin
    steps = torch.linspace(0, 1, 120, dtype=torch.float64)
    x, y = (low[d] + steps * (high[d] - low[d]) for d in range(2))
    grid = torch.cartesian_prod(y, x).flip(1)
    probability = fitted.posterior.predict(grid, observed=True).mean
    return ClassMap(
        x=x,
        y=y,
        probability=probability.reshape(len(y), len(x)).detach(),
        idle=idle,
        points=fitted.posterior.Z,
    )


def classes_picture(found: Classes, path: Path) -> Path:
    """One panel a schedule."""
    with styled():
        figure = Figure(figsize=(9, 4.1))
        panels = figure.subplots(1, len(found.maps), sharex=True, sharey=True)
        for ax, (name, class_map) in zip(panels, found.maps.items(), strict=True):
            draw_classes_2d(class_map, found.X, found.labels, ax=ax)
            ax.set_title(f"{name} schedule")
            ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    return saved(figure, path)


if __name__ == "__main__":
    classes_picture(run_classes(), Path(sys.argv[1]))
