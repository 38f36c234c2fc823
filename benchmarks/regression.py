"""Regression: the default schedule against GPflow's SGPR and GPyTorch's SVGP at several M.

    python benchmarks/regression.py                  # concrete, energy, kin8nm
    python benchmarks/regression.py --data energy --points 16 64 default
    make peers                                       # run GPflow and GPyTorch in their environments
    python benchmarks/regression.py --report         # print the results

All methods have the same split (90 % of the rows of a seeded permutation), standardise by the
training rows, and use one thread. Compare CPU seconds: wall-clock time depends on the load of the
machine. Results are in benchmarks/results/regression.
"""

import argparse
import math
from dataclasses import dataclass

import numpy as np
import torch

from measure import Row, new_results, read_results, table, timed
from winnowgp import fit
from winnowgp.data import Dataset, Standardiser, load_table
from winnowgp.estimators import kernel_from
from winnowgp.models import SparseGP
from winnowgp.training import FastSchedule, FitResult, MaxPoints, Tolerance

DATA = ("concrete", "energy", "kin8nm")
POINTS = ("default", "16", "32", "64", "128", "256")


@dataclass(frozen=True, slots=True)
class Split:
    """Standardised training and test rows, and the standard deviation of the targets."""

    train: Dataset
    test: Dataset
    scale: float


def split(name: str, *, seed: int, rows: int | None = None) -> Split:
    """Return the split that all methods use, of all rows or of some."""
    raw = load_table(name).dataset()
    order = torch.from_numpy(np.random.default_rng(seed).permutation(raw.N))[:rows]
    cut = int(0.9 * len(order))
    train, test = order[:cut], order[cut:]
    x, y = Standardiser.of(raw.X[train]), Standardiser.of(raw.Y[train])
    datasets = [Dataset(x.forward(raw.X[rows]), y.forward(raw.Y[rows])) for rows in (train, test)]
    return Split(datasets[0], datasets[1], y.scale.item())


def run(names: list[str], points: list[str], *, seed: int) -> None:
    """Fit winnowgp and write one row per fit."""
    for name in names:
        problem = split(name, seed=seed)
        results = new_results(f"regression/winnowgp-{name}-{seed}")
        for wanted in points:
            goal = Tolerance() if wanted == "default" else MaxPoints(int(wanted))

            def work(problem: Split = problem, goal: Tolerance | MaxPoints = goal) -> FitResult:
                model = SparseGP(kernel_from("rbf", problem.train.D), problem.train.X[:0])
                generator = torch.Generator().manual_seed(seed)
                return fit(model, problem.train, schedule=FastSchedule(goal), generator=generator)

            fitted, seconds = timed(work)
            row = results.add(
                {
                    "peer": "winnowgp",
                    "dataset": name,
                    "asked": wanted,
                    "M": fitted.posterior.M,
                    "seed": seed,
                    "n_train": problem.train.N,
                    "elbo": fitted.elbo,
                    "evidence": None if fitted.evidence is None else fitted.evidence.upper,
                    "given_up": fitted.elbo_gap / problem.train.N,
                    "alpha": fitted.selection.alpha,
                    **_test_scores(fitted, problem),
                    **seconds.row(),
                }
            )
            print(f"{name} {wanted}: M={row['M']} elbo={row['elbo']:.2f} cpu={row['cpu_s']:.1f} s")


def _test_scores(fitted: FitResult, problem: Split) -> Row:
    """Return test scores in the original unit of the targets."""
    mean = fitted.posterior.predict_mean(problem.test.X)
    density = fitted.posterior.log_density(problem.test.X, problem.test.Y)
    return {
        "rmse": problem.scale * (mean - problem.test.Y).square().mean().sqrt().item(),
        "log_density": density.mean().item() - math.log(problem.scale),
    }


def report(seed: int) -> None:
    """Compare winnowgp with the best and the fastest of GPflow's fits at each M."""
    ours = [r for r in read_results("regression/winnowgp-*") if r["seed"] == seed]
    peers = [
        r
        for r in read_results("regression/gpflow-*")
        if r["seed"] == seed and r.get("elbo") is not None and r["initial_noise"] == 1.0
    ]
    _report_sizes([r for r in ours if r["asked"] != "default"], peers)
    _report_default([r for r in ours if r["asked"] == "default"], peers)


def _report_sizes(ours: list[Row], peers: list[Row]) -> None:
    header = (
        "data",
        "M",
        "ours",
        "GPflow best",
        "starts",
        "gap/obs",
        "our cpu s",
        "fastest cpu s",
    )
    lines = []
    for row in ours:
        same = [p for p in peers if (p["dataset"], p["M"]) == (row["dataset"], int(row["asked"]))]
        best = max((p["elbo"] for p in same), default=math.nan)
        lines.append(
            (
                row["dataset"],
                row["asked"],
                f"{row['elbo']:.2f}",
                f"{best:.2f}",
                len({p["start"] for p in same}),
                f"{(row['elbo'] - best) / row['n_train']:+.4f}",
                f"{row['cpu_s']:.1f}",
                f"{min((p['cpu_seconds'] for p in same), default=math.nan):.1f}",
            )
        )
    print("\nWith max_points set; the goal is a gap above -0.003 nats per observation.")
    print(table(header, lines))


def _report_default(ours: list[Row], peers: list[Row]) -> None:
    header = (
        "data",
        "our M",
        "elbo gap/obs",
        "log density gap",
        "our cpu s",
        "GPflow best M",
        "sweep cpu s",
        "sweep up to M",
    )
    lines = []
    for row in ours:
        sweep = [p for p in peers if (p["dataset"], p["start"]) == (row["dataset"], "kmeans")]
        if not sweep:
            continue
        best = max(sweep, key=lambda p: p["elbo"])
        lines.append(
            (
                row["dataset"],
                row["M"],
                f"{(row['elbo'] - best['elbo']) / row['n_train']:+.4f}",
                f"{row['log_density'] - best['log_density']:+.4f}",
                f"{row['cpu_s']:.1f}",
                best["M"],
                f"{sum(p['cpu_seconds'] for p in sweep):.0f}",
                max(p["M"] for p in sweep),
            )
        )
    print("\nWith defaults, against the highest bound of GPflow's fits with k-means start.")
    print(table(header, lines))


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", nargs="+", choices=[*DATA, "protein"], default=list(DATA))
    parser.add_argument("--points", nargs="+", default=list(POINTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", action="store_true", help="print results without measuring")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.report:
        run(arguments.data, arguments.points, seed=arguments.seed)
    report(arguments.seed)


if __name__ == "__main__":
    main()
