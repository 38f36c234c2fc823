"""The paper's synthetic settings with the number of points left to a tolerance.

N = 500 values of a process with an RBF kernel on [0, 100], once with K = 80 random rows as
candidates and once with the schedule's own. One of three things grows: the noise, the lengthscale,
or how tightly the inputs cluster.
"""

from collections.abc import Iterable
from itertools import pairwise

import torch

from records import Records, Row, mean, recorded, table, timed
from winnowgp.data import Dataset
from winnowgp.estimators import kernel_from
from winnowgp.experiments import synthetic
from winnowgp.models import SparseGP
from winnowgp.training import FastSchedule, Tolerance, fit
from winnowgp.training.initialization import trainable_lengthscales

N, K, TOLERANCE = 500, 80, 0.01
RANGES = {"noise": (0.3, 1.0), "lengthscale": (0.8, 2.5), "clustering": (0.03, 0.5)}
"""σ, γ and β^½, each from least to most."""
CANDIDATES = ("random", "default")
"""K random rows, as in the paper, or those that the schedule picks itself."""


def intensities(condition: str) -> list[float]:
    """Five values, log-spaced."""
    low, high = RANGES[condition]
    return [low * (high / low) ** (i / 4) for i in range(5)]


def sampled(condition: str, intensity: float, *, seed: int) -> Dataset:
    """The data of figure 3, which calls a longer lengthscale smoothness."""
    name = {"lengthscale": "smoothness"}.get(condition, condition)
    return synthetic.sampled(name, intensity, rows=N, seed=seed)


def lengthscale(model: SparseGP) -> float:
    """The only one the kernel has."""
    (kernel,) = trainable_lengthscales(model.kernel)
    return kernel.lengthscale.item()


def run(*, seeds: int, conditions: Iterable[str] = tuple(RANGES)) -> None:
    """Fit each setting with each seed; all hyper-parameters learnt, starting at 1."""
    for condition in conditions:
        for candidates in CANDIDATES:
            records = Records(f"synthetic/{condition}-{candidates}")
            for index, intensity in enumerate(intensities(condition)):
                for seed in range(seeds):
                    data = sampled(condition, intensity, seed=seed)
                    row = {"condition": condition, "index": index, "intensity": intensity}
                    _measure(records, data, {**row, "candidates": candidates, "seed": seed})
            print(f"{records.path.stem}: {len(records.rows)} rows", flush=True)


def _measure(records: Records, data: Dataset, row: Row) -> None:
    """One fit; rows are drawn independently, so the first K are as random as any."""
    given = data.X[:K] if row["candidates"] == "random" else data.X[:0]
    model = SparseGP(kernel_from("rbf", 1), given)
    plan = FastSchedule(goal=Tolerance(TOLERANCE), n_candidates=512)
    generator = torch.Generator().manual_seed(row["seed"])
    fitted, seconds = timed(lambda: fit(model, data, schedule=plan, generator=generator))
    assert fitted.upper_bound is not None
    records.add(
        **row,
        N=data.N,
        K=K if len(given) else plan.n_candidates,
        tolerance=TOLERANCE,
        points=fitted.model.K,
        bound=round(fitted.elbo, 3),
        upper_bound=round(fitted.upper_bound, 3),
        noise=fitted.model.noise.item(),
        lengthscale=lengthscale(fitted.model),
        **seconds.row(),
    )


def report() -> None:
    """Mean number of points by intensity, and whether it falls throughout."""
    rows = recorded("synthetic/*")
    print(f"\nMean points kept with a tolerance of {TOLERANCE} nats an observation.\n")
    lines = []
    for candidates in CANDIDATES:
        for condition in RANGES:
            mine = [r for r in rows if (r["condition"], r["candidates"]) == (condition, candidates)]
            means = [mean(r["points"] for r in mine if r["index"] == index) for index in range(5)]
            falls = all(b < a for a, b in pairwise(means))
            values = ", ".join(f"{value:.2f}" for value in intensities(condition))
            cells = [f"{m:.1f}" for m in means]
            lines.append([candidates, f"{condition} ({values})", *cells, falls])
    print(table(["candidates", "condition", "1", "2", "3", "4", "5", "falls"], lines))
