"""What sweeps over numbers of inducing points share: problems, starts, options, rows of fits.

Inputs and target are standardised on the training rows. It is imported before the libraries of the
peers, which read the number of threads when they load.
"""

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

for _variable in (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
):
    os.environ.setdefault(_variable, "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
from sklearn.cluster import KMeans

SWEEP = (16, 32, 64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class Problem:
    """A split data set: standardised inputs and training target, test target in its own units."""

    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray
    y_mean: float
    y_scale: float

    def scores(self, mean: np.ndarray, variance: np.ndarray) -> dict[str, float]:
        """RMSE and mean log density of the test rows, in the target's own units.

        Args:
            mean: predictive means of the standardised target.
            variance: their predictive variances, noise included.
        """
        mean, variance = self.y_mean + self.y_scale * mean, self.y_scale**2 * variance
        error = self.y_test - mean
        log_density = -0.5 * (np.log(2.0 * np.pi * variance) + error**2 / variance)
        return {"rmse": float(np.sqrt(np.mean(error**2))), "log_density": float(log_density.mean())}


def load_problem(data_dir: Path, dataset: str, *, seed: int, rows: int | None) -> Problem:
    """Shuffle all rows, use the first `rows`, 90 % of them for training; standardise by these."""
    table = np.loadtxt(data_dir / f"{dataset}.csv.gz", delimiter=",", skiprows=1)
    table = table[np.random.default_rng(seed).permutation(len(table))][:rows]
    n_train = int(0.9 * len(table))
    train, test = table[:n_train], table[n_train:]
    mean, scale = train.mean(axis=0), train.std(axis=0)
    scale = np.where(scale > 0.0, scale, 1.0)
    return Problem(
        X=(train[:, :-1] - mean[:-1]) / scale[:-1],
        y=(train[:, -1] - mean[-1]) / scale[-1],
        X_test=(test[:, :-1] - mean[:-1]) / scale[:-1],
        y_test=test[:, -1],
        y_mean=float(mean[-1]),
        y_scale=float(scale[-1]),
    )


def kmeans_centres(X: np.ndarray, M: int, *, seed: int) -> np.ndarray:
    """Centres of one k-means run from a k-means++ start."""
    return KMeans(n_clusters=M, n_init=1, random_state=seed).fit(X).cluster_centers_


def random_rows(X: np.ndarray, M: int, *, seed: int) -> np.ndarray:
    """M distinct training rows, uniformly."""
    return X[np.random.default_rng(seed).choice(len(X), size=M, replace=False)]


def greedy_variance_rows(X: np.ndarray, M: int, *, seed: int) -> np.ndarray:
    """The rows of largest conditional prior variance, one after the other (Burt et al. 2020).

    A pivoted Cholesky factorisation at unit variance and unit lengthscales, O(N M²). The prior
    variance is constant, so the first row is a free choice and `seed` makes it.
    """
    factor = np.zeros((M, len(X)))
    residual = np.ones(len(X))
    chosen = [int(np.random.default_rng(seed).integers(len(X)))]
    for m in range(M):
        pivot = chosen[m]
        k = np.exp(-0.5 * ((X - X[pivot]) ** 2).sum(axis=1))
        # l_m = (k - Σ_{j<m} l_j l_j[pivot]) / √residual[pivot]
        factor[m] = (k - factor[:m, pivot] @ factor[:m]) / np.sqrt(max(residual[pivot], 1e-12))
        residual = np.maximum(residual - factor[m] ** 2, 0.0)
        residual[chosen] = -1.0
        chosen.append(int(residual.argmax()))
    return X[chosen[:M]]


STARTS: dict[str, Callable[..., np.ndarray]] = {
    "kmeans": kmeans_centres,
    "random": random_rows,
    "greedy": greedy_variance_rows,
}


def parser_of(documentation: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that all sweeps have."""
    parser = argparse.ArgumentParser(description=(documentation or "").split("\n")[0])
    parser.add_argument("--data-dir", type=Path, required=True, help="folder of DATASET.csv.gz")
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--rows", type=int, help="use so many rows at most")
    parser.add_argument("--start", choices=sorted(STARTS), default="kmeans")
    parser.add_argument("--points", default=",".join(map(str, SWEEP)), help="comma-separated M")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the start and batches")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, appended to")
    return parser


def sweep(
    arguments: argparse.Namespace, peer: str, version: str, fit: Callable[..., dict], **options: Any
) -> None:
    """Fit each number of inducing points, and append a row of each fit.

    Args:
        fit: called with the problem, `M`, `start`, `seed` and the options.
        options: what this peer has beside them, such as a number of steps.
    """
    problem = load_problem(
        arguments.data_dir, arguments.dataset, seed=arguments.seed, rows=arguments.rows
    )
    for M in map(int, arguments.points.split(",")):
        case = {"M": M, "start": arguments.start, "seed": arguments.seed}
        row = {
            "dataset": arguments.dataset,
            "peer": peer,
            "version": version,
            **case,
            "n_train": len(problem.y),
            "n_test": len(problem.y_test),
        } | fit(problem, **case, **options)
        with arguments.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
