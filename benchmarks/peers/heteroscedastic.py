"""Noise that depends on the inputs, by GPBoost or CatBoost: predictions for one split.

    python heteroscedastic.py gpboost problem.npz predictions.npz --seed 3

`benchmarks/heteroscedastic.py` writes the problem (standardised `X`, `y` and `X_test`) and reads
the mean and the variance of each test row, and the CPU seconds of the fit. One thread.

- gpboost: a Gaussian process for the mean and one for the log variance, each with a Matérn-3/2
  kernel and one range per column, in the Vecchia approximation, which is the only one it has.
- catboost: boosted trees for mean and log variance (`RMSEWithUncertainty`). The number of trees is
  the best one on a fifth of the rows; a second fit to all rows has as many.
"""

import argparse
import os
import time
from pathlib import Path

# Thread counts are read when the libraries load, so they have to be set before the imports.
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np

Predictions = tuple[np.ndarray, np.ndarray]


def gpboost(X: np.ndarray, y: np.ndarray, X_test: np.ndarray, *, seed: int) -> Predictions:
    import gpboost

    model = gpboost.GPModel(
        likelihood="gaussian_heteroscedastic_fixed_and_random",
        gp_coords=X,
        cov_function="matern_ard",
        cov_fct_shape=1.5,
        gp_approx="vecchia",
        num_parallel_threads=1,
        seed=seed,
    )
    model.fit(y=y)
    predicted = model.predict(gp_coords_pred=X_test, predict_var=True, predict_response=True)
    return predicted["mu"], predicted["var"]


def catboost(X: np.ndarray, y: np.ndarray, X_test: np.ndarray, *, seed: int) -> Predictions:
    from catboost import CatBoostRegressor

    settings = {
        "loss_function": "RMSEWithUncertainty",
        "random_seed": seed,
        "thread_count": 1,
        "verbose": False,
        "allow_writing_files": False,
    }
    order = np.random.default_rng(seed).permutation(len(y))
    train, held = order[len(y) // 5 :], order[: len(y) // 5]
    trial = CatBoostRegressor(iterations=5000, early_stopping_rounds=100, **settings)
    trial.fit(X[train], y[train], eval_set=(X[held], y[held]))
    model = CatBoostRegressor(
        iterations=trial.get_best_iteration() + 1,
        learning_rate=trial.get_all_params()["learning_rate"],
        **settings,
    )
    mean, variance = model.fit(X, y).predict(X_test).T
    return mean, variance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peer", choices=["gpboost", "catboost"])
    parser.add_argument("problem", type=Path)
    parser.add_argument("predictions", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    problem = np.load(arguments.problem)
    predict = {"gpboost": gpboost, "catboost": catboost}[arguments.peer]
    wall, cpu = time.perf_counter(), time.process_time()
    mean, variance = predict(problem["X"], problem["y"], problem["X_test"], seed=arguments.seed)
    seconds = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    np.savez(arguments.predictions, mean=mean, variance=variance, **seconds)


if __name__ == "__main__":
    main()
