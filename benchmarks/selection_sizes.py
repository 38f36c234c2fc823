"""Number of inducing points that a tolerance selects in the paper's synthetic settings.

The data are N = 500 values of a GP with an RBF kernel on [0, 100]; candidates are K = 80 random
rows, or the schedule's own. The noise, the lengthscale or the clustering of the inputs increases.
A part of benchmarks/selection.py; results are in benchmarks/results/synthetic.
"""

from collections.abc import Iterable
from itertools import pairwise

import torch

from measure import Row, Runs, mean, new_results, read_results, table, timed
from winnowgp.data import Dataset
from winnowgp.estimators.kernels import kernel_from
from winnowgp.experiments import synthetic
from winnowgp.models import SparseGP
from winnowgp.training import FastSchedule, Tolerance, fit
from winnowgp.training.initialization import trainable_lengthscales

N, K, TOLERANCE = 500, 80, 0.01
RANGES = {"noise": (0.3, 1.0), "lengthscale": (0.8, 2.5), "clustering": (0.03, 0.5)}
"""Smallest and largest σ, γ and √β."""
CANDIDATES = ("random", "default")
"""K random rows, as in the paper, or the schedule's own candidates."""


def intensities(condition: str) -> list[float]:
    """Return five log-spaced values."""
    low, high = RANGES[condition]
    return [low * (high / low) ** (i / 4) for i in range(5)]


def sampled(condition: str, intensity: float, *, seed: int) -> Dataset:
    """Return the data of figure 3, which calls a longer lengthscale smoothness."""
    name = {"lengthscale": "smoothness"}.get(condition, condition)
    return synthetic.sampled(name, intensity, rows=N, seed=seed)


def lengthscale(model: SparseGP) -> float:
    """Return the lengthscale of the kernel."""
    (kernel,) = trainable_lengthscales(model.kernel)
    return kernel.lengthscale.item()


def run(*, seeds: int, conditions: Iterable[str] = tuple(RANGES)) -> None:
    """Fit each setting with each seed; all hyper-parameters start at 1."""
    for condition in conditions:
        for candidates in CANDIDATES:
            results = new_results(f"synthetic/{condition}-{candidates}")
            for index, intensity in enumerate(intensities(condition)):
                for seed in range(seeds):
                    data = sampled(condition, intensity, seed=seed)
                    row = {"condition": condition, "index": index, "intensity": intensity}
                    _measure(results, data, {**row, "candidates": candidates, "seed": seed})
            print(f"{results.path.stem}: {len(list(results))} rows", flush=True)


def _measure(results: Runs, data: Dataset, row: Row) -> None:
    """Fit one data set; its rows are independent draws, so the first K are random rows."""
    initial = data.X[:K] if row["candidates"] == "random" else data.X[:0]
    model = SparseGP(kernel_from("rbf", 1), initial)
    schedule = FastSchedule(Tolerance(TOLERANCE), n_candidates=512)
    generator = torch.Generator().manual_seed(row["seed"])
    fitted, seconds = timed(lambda: fit(model, data, schedule=schedule, generator=generator))
    assert fitted.evidence is not None
    results.add(
        {
            **row,
            "N": data.N,
            "K": K if len(initial) else schedule.n_candidates,
            "tolerance": TOLERANCE,
            "points": fitted.model.K,
            "bound": round(fitted.elbo, 3),
            "evidence": round(fitted.evidence.upper, 3),
            "noise": fitted.model.noise.item(),
            "lengthscale": lengthscale(fitted.model),
            **seconds.row(),
        }
    )


def report() -> None:
    """Print the mean number of inducing points by intensity, and whether it falls throughout."""
    rows = read_results("synthetic/*")
    print(f"\nMean number of inducing points at a tolerance of {TOLERANCE} nats per observation.\n")
    lines = []
    for candidates in CANDIDATES:
        for condition in RANGES:
            runs = [r for r in rows if (r["condition"], r["candidates"]) == (condition, candidates)]
            means = [mean(r["points"] for r in runs if r["index"] == index) for index in range(5)]
            falls = all(b < a for a, b in pairwise(means))
            values = ", ".join(f"{value:.2f}" for value in intensities(condition))
            cells = [f"{m:.1f}" for m in means]
            lines.append([candidates, f"{condition} ({values})", *cells, falls])
    print(table(["candidates", "condition", "1", "2", "3", "4", "5", "falls"], lines))
