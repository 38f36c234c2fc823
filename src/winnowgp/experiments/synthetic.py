"""Figure 3 of the paper: the less points tell, the fewer are kept; data from a known process.

Five hundred values of a process with an RBF kernel on [0, 100]. One of three things grows: the
noise, the lengthscale, or how tightly the inputs cluster. Four kinds of runs:

- `fixed`: 20, 25, .., 80 points that nobody chose, 1000 updates each.
- `paper`: the paper's three phases among 80 random rows, the last for ten draws from q(Z).
- `fast`: the fast schedule among the same rows under the same prior.
- `auto`: the fast schedule as it comes: candidates of its own, α from a tolerance.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.experiments.base import Experiment, Row, Scope
from winnowgp.experiments.sizes import (
    LEARNING_RATE,
    Level,
    SizeStudy,
    draw_levels,
    levels_of,
    size_claims,
    standardised,
)
from winnowgp.linalg import cholesky
from winnowgp.models import SparseGP

N, CANDIDATES, ALPHA, TOLERANCE, DRAWS, SEEDS = 500, 80, 0.05, 0.01, 10, 3

PROCESS = {"sigma": 0.1, "gamma": 1.0, "reach": 100.0, "clusters": 5}

"""Noise and lengthscale where they are not what varies, largest x, and number of clusters."""

RANGES = {"noise": (0.3, 1.0), "smoothness": (0.8, 2.5), "clustering": (0.03, 0.5)}

"""σ, γ and √β, each from least to most."""

SYMBOLS = {"noise": "σ", "smoothness": "γ", "clustering": "√β"}


def intensities(condition: str) -> list[float]:
    """Five values, log-spaced.

    >>> intensities("noise")
    [0.3, 0.4054, 0.5477, 0.7401, 1.0]
    """
    low, high = RANGES[condition]
    return [round(low * (high / low) ** (i / 4), 4) for i in range(5)]


def sampled(
    condition: str, intensity: float, *, rows: int, seed: int, process: Row = PROCESS
) -> Dataset:
    """Inputs, a function of unit variance and noisy targets, in their own units."""
    generator = torch.Generator().manual_seed(seed)
    if condition == "clustering":
        x = _clustered(intensity, rows, process, generator)
    else:
        x = process["reach"] * torch.rand(rows, generator=generator, dtype=torch.float64)
    sigma = intensity if condition == "noise" else process["sigma"]
    gamma = intensity if condition == "smoothness" else process["gamma"]
    Kff = torch.exp(-0.5 * ((x[:, None] - x) / gamma) ** 2)
    f = cholesky(Kff).L @ torch.randn(rows, generator=generator, dtype=torch.float64)
    y = f + sigma * torch.randn(rows, generator=generator, dtype=torch.float64)
    return Dataset.of(x[:, None], y)


def _clustered(
    root: float, rows: int, process: Row, generator: torch.Generator
) -> Float[Tensor, " N"]:
    """Equal normals of precision β with equidistant means, given √β."""
    means = torch.linspace(0, process["reach"], process["clusters"], dtype=torch.float64)
    which = torch.randint(process["clusters"], (rows,), generator=generator)
    return means[which] + torch.randn(rows, generator=generator, dtype=torch.float64) / root


def divergence(model: SparseGP, data: Dataset) -> float:
    """KL[q(f) ‖ p(f | y)] = log p(y) − L(Z) at the model's hyper-parameters, in nats; O(N³)."""
    return model.dense_bound(data)().item() - model.fixed_bound(data)


@final
class Synthetic(Experiment):
    """Divergence from the exact posterior against the number of points."""

    name = "synthetic"
    title = "figure 3: fewer points with more noise, smoothness or clustering; KL to the exact GP"

    def settings(self, scope: Scope, rows: Sequence[Row]) -> list[Row]:
        seeds = range(scope.seeds or (1 if scope.quick else SEEDS))
        steps = {"pre": 200, "process": 600, "post": 200}
        sizes, draws, levels = list(range(20, 81, 5)), DRAWS, range(5)
        if scope.quick:
            steps = {"pre": 100, "process": 100, "post": 40}
            sizes, draws, levels = [20, 50, 80], 3, range(0, 5, 2)
        chosen, adam = {"candidates": CANDIDATES, "alpha": ALPHA}, {"learning_rate": LEARNING_RATE}
        kinds: list[Row] = [
            {"kind": "fixed", "sizes": sizes, "updates": sum(steps.values()), **adam},
            {"kind": "paper", **chosen, "steps": steps, "draws": draws, **adam},
            {"kind": "fast", **chosen},
            {"kind": "auto", "tolerance": TOLERANCE},
        ]
        return [
            {**kind, "condition": condition, "intensity": intensities(condition)[i]}
            | {"N": N, "process": PROCESS, "seed": seed}
            for kind in kinds
            for seed in seeds
            for condition in RANGES
            for i in levels
        ]

    def measured(self, settings: Row, scope: Scope) -> Row:
        drawn = sampled(
            settings["condition"],
            settings["intensity"],
            rows=settings["N"],
            seed=settings["seed"],
            process=settings["process"],
        )
        data = standardised(drawn, scope.device)
        models, row = SizeStudy(data, settings["seed"]).run(settings)
        return {
            **row,
            "kl": [round(divergence(model, data), 3) for model in models],
            "elbo": [round(model.fixed_bound(data), 2) for model in models],
        }

    def draw(self, rows: Sequence[Row], path: Path) -> Path:
        return draw_levels(
            _levels(rows),
            path,
            column="kl",
            said="KL to the exact posterior (nats)",
            titles=lambda level: f"{level.group}, {SYMBOLS[level.group]} = {level.value:.3g}",
        )

    def claims(self, rows: Sequence[Row]) -> list[str]:
        return size_claims(
            _levels(rows),
            falling=lambda condition: f"fewer points with more {condition}",
            curves=(
                ("KL on or below that of as many fixed points", "kl", -1),
                ("ELBO on or above that of as many fixed points", "elbo", 1),
            ),
        )


def _levels(rows: Sequence[Row]) -> list[Level]:
    return levels_of(rows, group="condition", value="intensity")
