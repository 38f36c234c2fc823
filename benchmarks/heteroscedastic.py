"""Noise that depends on the inputs: test density, coverage by region, points of both processes.

    python benchmarks/heteroscedastic.py --seeds 3 4 5 --rows 500
    python benchmarks/heteroscedastic.py --summary            # print the results as Markdown

Each split is fitted with constant noise (`SparseGP`), with noise that depends on the inputs
(`HeteroscedasticGP`), and with half of the inducing points of its log noise, which backward
elimination removes from that fit at fixed hyper-parameters. All have RBF kernels and weak priors,
as `SparseGPRegressor(kernel="rbf")`. Settings were chosen on seeds 0 to 2.

Test rows are divided into a quiet and a noisy half: by the true noise of made data, by whether
noise was added to a row of kin8nm, and by the noise that the model predicts for other tables.
"""

import argparse
import warnings
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from numpy.typing import NDArray

from measure import RESULTS, Row, timed
from right_number_problems import Problem, split_table
from winnowgp import SparseGP
from winnowgp.data import Dataset
from winnowgp.experiments.runs import Runs
from winnowgp.models import HeteroscedasticGP, LogVarianceLikelihood, VariationalGP
from winnowgp.models.priors import add_weak_priors
from winnowgp.selection import elimination_frontier
from winnowgp.training import fit

Values = NDArray[np.float64]

FILE = RESULTS / "heteroscedastic" / "fits.jsonl"
TABLES = ("motorcycle", "concrete", "protein", "kin8nm")
MADE_ROWS = 200


def motorcycle(seed: int) -> tuple[Problem, Values]:
    """Return a function of one input whose noise is large in the middle, as in the crash data."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(0, 1, MADE_ROWS + 1000)
    sd = 0.03 + 0.5 * np.exp(-0.5 * ((x - 0.6) / 0.15) ** 2)
    y = np.sin(8 * x) * np.exp(-(((x - 0.5) / 0.3) ** 2)) + sd * rng.normal(size=len(x))
    n = MADE_ROWS
    return Problem(x[:n, None], y[:n], x[n:, None], y[n:]), sd[n:]


def noisy_kin8nm(seed: int, train: int) -> tuple[Problem, Values]:
    """Return kin8nm with noise of the standard deviation of y where the first angle is positive."""
    problem = split_table("kin8nm", seed=seed, train=train)
    rng = np.random.default_rng(seed)
    sd = [np.where(X[:, 0] > 0, problem.scale, 0.0) for X in (problem.X, problem.X_test)]
    y, y_test = (
        y + s * rng.normal(size=len(y))
        for y, s in zip((problem.y, problem.y_test), sd, strict=True)
    )
    return replace(problem, y=y, y_test=y_test), sd[1]


def problem_of(name: str, seed: int, train: int) -> tuple[Problem, Values | None]:
    """Return a split in standardised units, and the noise of its test rows if it is known."""
    if name == "motorcycle":
        problem, sd = motorcycle(seed)
    elif name == "kin8nm":
        problem, sd = noisy_kin8nm(seed, train)
    else:
        problem, sd = split_table(name, seed=seed, train=train), None
    return problem.standardised(), sd


def kernel(D: int) -> ScaleKernel:
    """Return an RBF kernel with weak priors."""
    result = ScaleKernel(RBFKernel(ard_num_dims=D))
    add_weak_priors(result)
    return result


def run(name: str, seed: int, train: int) -> list[Row]:
    """Return the rows of all methods on one split."""
    problem, sd = problem_of(name, seed, train)
    data = Dataset.of(torch.from_numpy(problem.X), torch.from_numpy(problem.y)).merged()
    plain = SparseGP(kernel(data.D), data.X[:0], noise=1.0)
    add_weak_priors(plain.likelihood)
    noise = VariationalGP(kernel(data.D), data.X[:0], likelihood=LogVarianceLikelihood())
    both = HeteroscedasticGP(plain, noise)
    generators = [torch.Generator().manual_seed(seed) for _ in range(2)]
    constant, seconds = timed(lambda: fit(plain, data, generator=generators[0]))
    varying, longer = timed(lambda: fit(both, data, generator=generators[1]))
    X = torch.from_numpy(problem.X_test)
    predicted = varying.posterior.predict_noise(X).mean.sqrt()[:, 0].numpy()
    noisy = predicted > np.median(predicted) if sd is None else sd > np.median(sd)
    if sd is not None and len(np.unique(sd)) == 2:
        noisy = sd > 0
    half = halved(varying.model, data)
    methods = {
        "constant": (constant.posterior, (constant.model.K, 0), seconds.row()),
        "heteroscedastic": (varying.posterior, sizes(varying.model), longer.row()),
        "half of the noise points": (half.posterior(data), sizes(half), {}),
    }
    elbos = {"constant": constant.elbo, "heteroscedastic": varying.elbo}
    elbos["half of the noise points"] = half.fixed_bound(data)
    return [
        {
            "name": name,
            "seed": seed,
            "rows": problem.N,
            "method": method,
            "points": points[0],
            "noise_points": points[1],
            "elbo": elbos[method] / data.observations,
            **quality(posterior, X, torch.from_numpy(problem.y_test)[:, None], noisy),
            **time,
        }
        for method, (posterior, points, time) in methods.items()
    ]


def sizes(model: HeteroscedasticGP) -> tuple[int, int]:
    """Return the numbers of inducing points of function and log noise."""
    function, log_noise = model.candidate_sets
    return len(function), len(log_noise)


def halved(model: HeteroscedasticGP, data: Dataset) -> HeteroscedasticGP:
    """Return the model with half of the inducing points of its log noise, by elimination."""
    function, log_noise = model.candidate_sets
    frontier = elimination_frontier(model.subset_statistics(data)[1])
    whole = torch.ones(len(function), dtype=torch.bool)
    pruned = model.prune((whole, frontier.masks[(len(log_noise) + 1) // 2]))
    return pruned.with_best_q(data, gain=1e-6)


def quality(posterior: Any, X: torch.Tensor, Y: torch.Tensor, noisy: NDArray[np.bool_]) -> Row:
    """Return the log density and the coverage of 90 % intervals, of all rows and by region."""
    nats = posterior.log_density(X, Y)[:, 0].numpy()
    ends = posterior.quantiles(X, torch.tensor([0.05, 0.95], dtype=X.dtype))
    inside = ((ends[0] <= Y) & (ends[1] >= Y))[:, 0].numpy()
    regions = {"": np.ones_like(noisy), "_quiet": ~noisy, "_noisy": noisy}
    return {
        f"{measure}{region}": float(values[rows].mean())
        for region, rows in regions.items()
        if rows.any()  # Constant noise has one region.
        for measure, values in (("log_density", nats), ("coverage_90", inside))
    }


def summary(rows: list[Row]) -> str:
    """Return the means over seeds as a Markdown table."""
    groups: dict[tuple[str, int, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["name"], row["rows"], row["method"]].append(row)
    lines = [
        "| table (rows) | noise | points | of the noise | ELBO | test log density "
        "| 90 % intervals hold | in the quiet half | in the noisy half | CPU s |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for (name, count, method), own in groups.items():

        def mean(key: str, own: list[Row] = own) -> float:
            return float(np.mean([row.get(key, np.nan) for row in own]))

        cpu = f"{mean('cpu_s'):.0f}" if "cpu_s" in own[0] else ""
        shares = [f"{mean(f'coverage_90{r}'):.3f}" for r in ("", "_quiet", "_noisy")]
        lines.append(
            f"| {name} ({count}) | {method} | {mean('points'):.0f} "
            f"| {mean('noise_points'):.0f} | {mean('elbo'):.3f} | {mean('log_density'):.3f} "
            f"| {' | '.join(shares)} | {cpu} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Parse the command line; fit splits that have no rows yet, or print the summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--names", nargs="+", default=TABLES, choices=TABLES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 4, 5])
    parser.add_argument("--rows", type=int, default=500, help="training rows of real tables")
    parser.add_argument("--summary", action="store_true", help="print the results and run nothing")
    arguments = parser.parse_args()
    runs = Runs(FILE)
    if arguments.summary:
        print(summary(list(runs)))
        return
    done = {(row["name"], row["seed"], row["rows"]) for row in runs}
    for name in arguments.names:
        for seed in arguments.seeds:
            train = MADE_ROWS if name == "motorcycle" else arguments.rows
            if (name, seed, train) in done:
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                rows = run(name, seed, train)
            for row in rows:
                runs.add(row)
                density = f"{row['log_density']:.3f}"
                print(name, seed, row["method"], row["noise_points"], density, flush=True)


if __name__ == "__main__":
    main()
