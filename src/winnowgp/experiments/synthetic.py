"""Figure 3 of the paper: fewer inducing points with more noise, smoothness or clustering.

The data are 500 values of a GP with an RBF kernel on [0, 100]. The noise, the lengthscale or the
clustering of the inputs increases. There are four kinds of runs:

- `fixed`: a fixed number of inducing points (20, 25, .., 80) and 1000 updates.
- `paper`: the paper's three phases with 80 random rows as candidates, the last phase for ten draws
  from q(Z).
- `fast`: the fast schedule with the same candidates and the same prior.
- `auto`: the fast schedule with its own candidates and a tolerance in place of the prior.

`RELEASED` has the settings of the scripts that the authors released, for runs of the kinds
`released` and `fixed`.
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
    levels_from_rows,
    size_claims,
    standardised,
)
from winnowgp.linalg import cholesky
from winnowgp.models import SparseGP

N, CANDIDATES, ALPHA, TOLERANCE, DRAWS, SEEDS = 500, 80, 0.05, 0.01, 10, 5

PROCESS = {"sigma": 0.1, "gamma": 1.0, "reach": 100.0, "clusters": 5}
"""Noise and lengthscale unless they vary, largest input, and number of clusters."""

RANGES = {"noise": (0.3, 1.0), "smoothness": (0.8, 2.5), "clustering": (0.03, 0.5)}
"""Smallest and largest σ, γ and √β."""

SYMBOLS = {"noise": "σ", "smoothness": "γ", "clustering": "√β"}

EVIDENCE_CLAIM = "beyond the paper: log p(y) of the model at least that of the same fixed size"
"""At the hyper-parameters of each model. A larger KL with a larger log p(y) means that the selected
model has better hyper-parameters, and not that its posterior is less accurate."""


RELEASED: Row = {
    "alpha": 0.1,
    "steps": {"pre": 300, "process": 500, "post": 200},
    "learning_rate": 0.02,
    "process_learning_rate": 0.3,
    "subsets": 16,
    # "Near 1" in the scripts.
    "start_inclusion": 0.99,
}
RELEASED_DATA: Row = {"N": 1000, "process": {**PROCESS, "sigma": 0.3}, "standardise": False}


def released_start(condition: str, intensity: float) -> Row:
    """Return where the released runs start: cluster centres, and the true lengthscale.

    >>> released_start("smoothness", 2.5)
    {'locations': 'kmeans', 'noise': 0.1, 'lengthscale': 2.5}
    """
    lengthscale = intensity if condition == "smoothness" else PROCESS["gamma"]
    return {"locations": "kmeans", "noise": 0.1, "lengthscale": lengthscale}


def intensities(condition: str) -> list[float]:
    """Return five log-spaced values.

    >>> intensities("noise")
    [0.3, 0.4054, 0.5477, 0.7401, 1.0]
    """
    low, high = RANGES[condition]
    return [round(low * (high / low) ** (i / 4), 4) for i in range(5)]


def sampled(
    condition: str, intensity: float, *, rows: int, seed: int, process: Row = PROCESS
) -> Dataset:
    """Return inputs and noisy values of a function of unit variance, not standardised."""
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
    """Return draws from equally weighted normals of precision β with equidistant means."""
    means = torch.linspace(0, process["reach"], process["clusters"], dtype=torch.float64)
    cluster = torch.randint(process["clusters"], (rows,), generator=generator)
    return means[cluster] + torch.randn(rows, generator=generator, dtype=torch.float64) / root


def divergence(model: SparseGP, data: Dataset) -> float:
    """Return KL[q(f) ‖ p(f | y)] = log p(y) − L(Z) in nats; the cost is O(N³).

    Both terms are taken at the hyper-parameters of the model.
    """
    return model.dense_bound(data)().item() - model.fixed_bound(data)


@final
class Synthetic(Experiment):
    """The KL divergence to the exact posterior against the number of inducing points."""

    name = "synthetic"
    title = (
        "figure 3: with more noise, smoothness or clustering fewer inducing points; "
        "KL to the exact GP"
    )
    has_released = True

    def settings(self, scope: Scope, rows: Sequence[Row]) -> list[Row]:
        seeds = range(scope.seeds or (1 if scope.quick else SEEDS))
        steps = {"pre": 200, "process": 600, "post": 200}
        sizes, draws, levels = list(range(20, 81, 5)), DRAWS, range(5)
        if scope.quick:
            steps = {"pre": 100, "process": 100, "post": 40}
            sizes, draws, levels = [20, 50, 80], 3, range(0, 5, 2)
        if scope.released:
            return [
                {**kind, "condition": condition, "intensity": intensities(condition)[i]}
                | {"start": released_start(condition, intensities(condition)[i]), "seed": seed}
                for seed in seeds
                for condition in RANGES
                for kind in _released_kinds(scope, sizes, draws)
                for i in levels
            ]
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

    def run(self, settings: Row, scope: Scope) -> Row:
        sample = sampled(
            settings["condition"],
            settings["intensity"],
            rows=settings["N"],
            seed=settings["seed"],
            process=settings["process"],
        )
        data, extra = standardised(sample, scope.device), {}
        if not settings.get("standardise", True):
            data = Dataset(sample.X.to(scope.device), sample.Y.to(scope.device))
            extra = {"target_variance": round(data.Y.var(correction=0).item(), 4)}
        study = SizeStudy(data, settings["seed"], settings.get("start", {}))
        models, row = study.run(settings)
        return {
            **row,
            **extra,
            "kl": [round(divergence(model, data), 3) for model in models],
            "elbo": [round(model.fixed_bound(data), 2) for model in models],
        }

    def draw(self, rows: Sequence[Row], path: Path) -> Path:
        return draw_levels(
            _levels(rows),
            path,
            column="kl",
            label="KL to the exact posterior (nats)",
            title=lambda level: f"{level.group}, {SYMBOLS[level.group]} = {level.value:.3g}",
        )

    def claims(self, rows: Sequence[Row]) -> list[str]:
        return size_claims(
            _levels([{**row, "evidence": _evidence(row)} for row in rows]),
            fewer=lambda condition: f"fewer inducing points with more {condition}",
            curves=(
                ("KL at most that of the same fixed size", "kl", -1),
                ("ELBO at least that of the same fixed size", "elbo", 1),
                (EVIDENCE_CLAIM, "evidence", 1),
            ),
        )


def _released_kinds(scope: Scope, sizes: list[int], draws: int) -> list[Row]:
    """Return the settings that distinguish the runs at one level."""
    chosen = {**RELEASED, "candidates": CANDIDATES, "draws": draws}
    updates, data = RELEASED["steps"]["pre"], RELEASED_DATA
    if scope.quick:
        chosen |= {"steps": {"pre": 60, "process": 30, "post": 20}, "subsets": 4}
        updates, data = 60, {**RELEASED_DATA, "N": 300}
    fixed = {"sizes": sizes, "updates": updates, "learning_rate": RELEASED["learning_rate"]}
    return [{"kind": "released", **chosen, **data}, {"kind": "fixed", **fixed, **data}]


def _evidence(row: Row) -> list[float]:
    """Return log p(y) = L(Z) + KL of each model of a run at its own hyper-parameters, in nats."""
    return [elbo + kl for elbo, kl in zip(row["elbo"], row["kl"], strict=True)]


def _levels(rows: Sequence[Row]) -> list[Level]:
    return levels_from_rows(rows, group="condition", value="intensity")
