"""Draw the inducing points that a classifier selects from a grid of candidates on two moons.

python -m winnowgp.experiments.classes PATH.png
"""

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
from winnowgp.plots.predictions import ClassMap, draw_classes_2d
from winnowgp.plots.style import save_figure, styled
from winnowgp.point_processes import SquaredCardinality
from winnowgp.training import FastSchedule, FitResult, PaperSchedule, Schedule, fit

SIDE, N = 10, 600


@dataclass(frozen=True, slots=True)
class Classes:
    """The data, and the classifier of each schedule."""

    X: Float[Tensor, "N 2"]
    labels: Int[Tensor, " N"]
    maps: dict[str, ClassMap]


def run_classes(*, seed: int = 0, epochs: tuple[int, int, int] = (300, 500, 300)) -> Classes:
    """Fit both schedules to two noisy moons with the same 10 × 10 candidates.

    The candidates are fixed for the fast schedule, so that the figure shows which of them it
    selects; the paper's schedule trains their locations too.
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
        unused = (grid[:, None] != fitted.posterior.Z).any(-1).all(1)
        idle = fitted.candidates[0][~fitted.selection.mask] if moves else grid[unused]
        maps[name] = _class_map(fitted, data, idle)
    return Classes(data.X, data.Y[:, 0].long(), maps)


def _class_map(
    fitted: FitResult[VariationalGP], data: Dataset, idle: Float[Tensor, "J 2"]
) -> ClassMap:
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


def draw_classes(result: Classes, path: Path) -> Path:
    """Draw one panel per schedule."""
    with styled():
        figure = Figure(figsize=(9, 4.1))
        panels = figure.subplots(1, len(result.maps), sharex=True, sharey=True)
        for ax, (name, class_map) in zip(panels, result.maps.items(), strict=True):
            draw_classes_2d(class_map, result.X, result.labels, ax=ax)
            ax.set_title(f"{name} schedule")
            ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    return save_figure(figure, path)


if __name__ == "__main__":
    draw_classes(run_classes(), Path(sys.argv[1]))
