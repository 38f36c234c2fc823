"""GPflow's SGPR, fitted by L-BFGS for each number of inducing points: one JSON row per fit.

A zero-mean GP with an ARD squared-exponential kernel and Gaussian noise. Inputs and target are
standardised on the training rows; kernel variance, lengthscales and noise start at 1 (a noise of
0.1 or 0.01 ended no higher in a trial on concrete and energy). Hyper-parameters and inducing
locations move jointly until SciPy's L-BFGS-B stops by its default tolerances or at `--maxiter`.

    python gpflow_sgpr.py --data-dir DIR --dataset concrete --start kmeans --out results.jsonl
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Thread counts are read when the libraries load, so they have to be set before the imports.
for _variable in (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
):
    os.environ.setdefault(_variable, "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import gpflow
import numpy as np
import tensorflow as tf
from scipy.optimize import OptimizeResult
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


def test_scores(model: gpflow.models.SGPR, problem: Problem) -> dict[str, float]:
    """RMSE and mean log density of the test rows, in the target's own units."""
    mean, variance = (moment.numpy()[:, 0] for moment in model.predict_y(problem.X_test))
    mean = problem.y_mean + problem.y_scale * mean
    variance = problem.y_scale**2 * variance
    error = problem.y_test - mean
    log_density = -0.5 * (np.log(2.0 * np.pi * variance) + error**2 / variance)
    return {"rmse": float(np.sqrt(np.mean(error**2))), "log_density": float(log_density.mean())}


def fit(problem: Problem, *, M: int, start: str, seed: int, noise: float, maxiter: int) -> dict:
    """Fit one model and describe it; a failed factorisation gives a row with `error`.

    `seconds` covers the choice of the start, graph compilation and optimisation;
    `start_seconds` and `compile_seconds` are parts of it. `cpu_seconds` is the process's own
    time over the same span, which other load on the machine hardly changes. `curve` holds the CPU
    seconds and the bound after each iteration.
    """
    row: dict = {}
    wall, cpu = time.perf_counter(), time.process_time()
    Z = STARTS[start](problem.X, M, seed=seed)
    row["start_seconds"] = time.perf_counter() - wall
    model = gpflow.models.SGPR(
        data=(problem.X, problem.y[:, None]),
        kernel=gpflow.kernels.SquaredExponential(lengthscales=np.ones(problem.X.shape[1])),
        inducing_variable=Z,
        noise_variance=noise,
    )
    optimizer = gpflow.optimizers.Scipy()
    variables = model.trainable_variables
    try:
        # The optimiser caches the compiled graph, so `minimize` does not compile a second time.
        compiling = time.perf_counter()
        evaluate = optimizer.eval_func(model.training_loss, variables, tf_fun_args={})
        evaluate(optimizer.initial_parameters(variables).numpy())
        row["compile_seconds"] = time.perf_counter() - compiling
        curve = []

        def record(intermediate_result: OptimizeResult) -> None:
            curve.append((time.process_time() - cpu, -float(intermediate_result.fun)))

        result = optimizer.minimize(
            model.training_loss,
            variables,
            options={"maxiter": maxiter, "maxfun": 10 * maxiter},
            callback=record,
        )
        row |= {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        row |= {"elbo": float(model.elbo()), "curve": curve, **test_scores(model, problem)}
    except tf.errors.InvalidArgumentError as failure:
        row |= {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        return row | {"error": failure.message.splitlines()[0]}
    return row | {
        "n_iterations": int(result.nit),
        "n_evaluations": int(result.nfev),
        "converged": bool(result.success),
        "message": str(result.message),
        "noise": float(model.likelihood.variance.numpy()),
        "kernel_variance": float(model.kernel.variance.numpy()),
        "lengthscales": model.kernel.lengthscales.numpy().tolist(),
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True, help="folder of DATASET.csv.gz")
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--rows", type=int, help="use so many rows at most")
    parser.add_argument("--start", choices=sorted(STARTS), default="kmeans")
    parser.add_argument("--points", default=",".join(map(str, SWEEP)), help="comma-separated M")
    parser.add_argument("--seed", type=int, default=0, help="of the split and of the start")
    parser.add_argument("--noise", type=float, default=1.0, help="initial noise variance")
    parser.add_argument("--maxiter", type=int, default=2000)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, appended to")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    problem = load_problem(
        arguments.data_dir, arguments.dataset, seed=arguments.seed, rows=arguments.rows
    )
    for M in map(int, arguments.points.split(",")):
        row = {
            "dataset": arguments.dataset,
            "peer": "gpflow-sgpr",
            "version": gpflow.__version__,
            "start": arguments.start,
            "M": M,
            "seed": arguments.seed,
            "n_train": len(problem.y),
            "n_test": len(problem.y_test),
            "initial_noise": arguments.noise,
        } | fit(
            problem,
            M=M,
            start=arguments.start,
            seed=arguments.seed,
            noise=arguments.noise,
            maxiter=arguments.maxiter,
        )
        with arguments.out.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
