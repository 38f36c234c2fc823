"""The number of inducing points when the hyper-parameters come from a part of the rows.

A function on the unit square is the sum of a smooth and of a finely varying one. The exact evidence
of some of the rows determines kernel and noise; the inducing points are then selected among
candidates at these hyper-parameters, with all rows and a tolerance of 0.01 nats per observation.

    python benchmarks/few_rows.py           # half a minute; writes docs/results/few-rows.{json,png}
    python benchmarks/few_rows.py --draw    # the figure only, from the json file
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from matplotlib.figure import Figure

from winnowgp.data import Dataset
from winnowgp.models import SparseGP, greedy_variance
from winnowgp.plots.style import COLOURS, save_figure, styled
from winnowgp.selection import elimination_frontier
from winnowgp.training import Tolerance
from winnowgp.training.budget import Budget
from winnowgp.training.hyperparameters import maximise_evidence
from winnowgp.training.initialization import trainable_lengthscales

N, TEST, CANDIDATES = 2000, 1000, 1500
ROWS = (62, 125, 250, 500, 1000, 2000)
SMOOTH, FINE = (0.6, 1.0), (0.035, 0.15)
"""Lengthscale and variance of the two functions."""
NOISE = 0.02
RESULTS = Path(__file__).parents[1] / "docs" / "results" / "few-rows.json"


def sampled(seed: int = 0) -> tuple[Dataset, Dataset]:
    """Return rows to fit and rows to test, of one draw from the sum of two GPs."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.rand(N + TEST, 2, generator=generator, dtype=torch.float64)
    square = torch.cdist(X, X).square()
    K = sum(v * torch.exp(-0.5 * square / length**2) for length, v in (SMOOTH, FINE))
    L = torch.linalg.cholesky(K + NOISE * torch.eye(len(X), dtype=X.dtype))
    y = L @ torch.randn(len(X), 1, generator=generator, dtype=torch.float64)
    return Dataset.of(X[:N], y[:N]), Dataset.of(X[N:], y[N:])


def measured(data: Dataset, test: Dataset, rows: int) -> dict[str, Any]:
    """Return what a selection at the hyper-parameters of the first `rows` rows ends with."""
    initial = SparseGP(ScaleKernel(RBFKernel(ard_num_dims=2)), data.X[:0], noise=0.1)
    budget = Budget(data.X.device)
    optimum = maximise_evidence(
        [initial], data, order=torch.arange(data.N), rows=rows, budget=budget
    ).best
    lengthscales = torch.cat([k.lengthscale for k in trainable_lengthscales(optimum.kernel)])
    Z = data.X[greedy_variance(optimum.kernel, data.X, CANDIDATES, given=data.X[:0])]
    pool = optimum.with_candidates(Z)
    frontier = elimination_frontier(pool.subset_statistics(data))
    largest = frontier.bounds.max().item()
    M = Tolerance(0.01).size(frontier, reference=largest)
    kept = pool.prune(frontier.masks[M])
    density = kept.posterior(data).log_density(test.X, test.Y).mean().item()
    return {
        "rows": rows,
        "inducing_points": M,
        "elbo": kept.fixed_bound(data) / data.N,
        "elbo_gap_to_pool": (largest - kept.fixed_bound(data)) / data.N,
        "evidence": pool.evidence(data).upper / data.N,
        "test_log_density": density,
        "noise": optimum.noise.item(),
        "shortest_lengthscale": lengthscales.min().item(),
    }


def draw(results: list[dict[str, Any]]) -> Figure:
    """Draw points, bound and test log density against the rows used for hyper-parameters."""
    rows = [result["rows"] for result in results]
    with styled():
        figure = Figure(figsize=(10, 3))
        points, bound, density = figure.subplots(1, 3)
        line: dict[str, Any] = {"color": COLOURS["posterior"], "marker": "o", "markersize": 4}
        points.plot(rows, [result["inducing_points"] for result in results], **line)
        points.set_title("Inducing points kept")
        pool = [result["elbo"] + result["elbo_gap_to_pool"] for result in results]
        bound.plot(rows, pool, color=COLOURS["inclusion"], linestyle="--", label="all candidates")
        bound.plot(rows, [result["elbo"] for result in results], label="points kept", **line)
        bound.set_title("ELBO of all rows (nats per observation)")
        bound.legend(loc="upper left")
        density.plot(rows, [result["test_log_density"] for result in results], **line)
        density.set_title("Log density of new rows (nats)")
        for ax in (points, bound, density):
            ax.set_xscale("log")
            ax.set_xticks(rows, [str(count) for count in rows])
            ax.minorticks_off()
            ax.set_xlabel("rows used for hyper-parameters")
    return figure


def main() -> None:
    """Measure and draw, or only draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--draw", action="store_true", help="draw the results of the last run")
    if not parser.parse_args().draw:
        torch.set_num_threads(1)
        data, test = sampled()
        results = []
        for rows in ROWS:
            results.append(measured(data, test, rows))
            print(results[-1], flush=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    save_figure(draw(results), RESULTS.with_suffix(".png"))


if __name__ == "__main__":
    main()
