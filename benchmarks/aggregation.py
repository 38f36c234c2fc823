"""A fine function from coarse averages and few points: error, density and coverage.

    python benchmarks/aggregation.py --seeds 10 11 12 13 14
    python benchmarks/aggregation.py --summary                # print the results as Markdown

A function of one input on [0, 10] is drawn from an RBF process of lengthscale 0.4. Its averages
over 24 boxes of width 0.8, every 0.4 units, are observed with noise of standard deviation 0.02, and
its values at 8 points with noise of standard deviation 0.1. Test rows are 400 points, without
noise. Each draw is fitted by

- boxes: `MultiOutputGPRegressor(widths=...)`,
- centres: the same model with widths of zero: averages as values in the centres of the boxes.

The noise of both kinds of rows is known (`noise_variance`). Settings were chosen on seeds 0 to 2.
"""

import warnings
from math import sqrt

import numpy as np
import torch

from measure import RESULTS, Row, markdown, mean, parser_of, run_missing, timed
from winnowgp import MultiOutputGPRegressor
from winnowgp.experiments.runs import Runs

FILE = RESULTS / "aggregation" / "fits.jsonl"
METHODS = ("boxes", "centres")
WIDTH, LENGTHSCALE = 0.8, 0.4


def run(seed: int) -> Row:
    """Fit one draw by all methods."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rng = np.random.default_rng(seed)
    frequencies = rng.normal(size=500) / LENGTHSCALE
    phases, weights = rng.uniform(0, 2 * np.pi, 500), rng.normal(size=500) * sqrt(2 / 500)

    def function(x: np.ndarray) -> np.ndarray:
        return np.cos(np.outer(x, frequencies) + phases) @ weights

    def average(low: np.ndarray, high: np.ndarray) -> np.ndarray:
        sines = [np.sin(np.outer(x, frequencies) + phases) for x in (low, high)]
        return ((sines[1] - sines[0]) / frequencies) @ weights / (high - low)

    low = 0.4 * np.arange(24)
    points = rng.uniform(0, 10, size=8)
    averages = average(low, low + WIDTH) + 0.02 * rng.normal(size=24)
    values = function(points) + 0.1 * rng.normal(size=8)
    centres = np.column_stack([low + WIDTH / 2, np.full(24, WIDTH)])
    X = np.concatenate([centres, np.column_stack([points, np.zeros(8)])])
    y, noise = np.concatenate([averages, values]), np.repeat([0.02**2, 0.1**2], [24, 8])
    x = np.linspace(0.2, 9.8, 400)
    at, truth = np.column_stack([x, np.zeros(400)]), function(x)
    models: dict[str, Row] = {}
    for method, rows in (("boxes", X), ("centres", X * [1, 0])):
        model = MultiOutputGPRegressor(widths=[1], random_state=seed)
        _, seconds = timed(lambda model=model, rows=rows: model.fit(rows, y, noise_variance=noise))
        mean_, sd = model.predict(at, return_std=True, observed=False)
        z = (truth - mean_) / sd
        models[method] = {
            "points": model.n_inducing_,
            "rmse": float(np.sqrt(np.mean((mean_ - truth) ** 2))),
            "log_density": float(np.mean(-0.5 * z**2 - np.log(sd) - 0.5 * np.log(2 * np.pi))),
            "coverage_90": float(np.mean(np.abs(z) < 1.645)),
            **seconds.row(),
        }
    return {"seed": seed, "models": models}


def summary(rows: list[Row]) -> str:
    """Return means over seeds as a Markdown table."""
    lines = []
    for method in METHODS:
        fits = [row["models"][method] for row in rows]
        lines.append(
            [
                method,
                len(fits),
                f"{mean(sum(fit['points']) for fit in fits):.0f}",
                f"{mean(fit['rmse'] for fit in fits):.3f}",
                f"{mean(fit['log_density'] for fit in fits):.2f}",
                f"{mean(fit['coverage_90'] for fit in fits):.2f}",
            ]
        )
    header = ["model", ">seeds", ">points", ">RMSE", ">log density of the function"]
    return markdown([*header, ">90 % intervals hold"], lines)


def main() -> None:
    """Parse the command line; fit draws that have no rows yet, or print the summary."""
    arguments = parser_of(__doc__, seeds=[10, 11, 12, 13, 14]).parse_args()
    runs = Runs(FILE)
    if arguments.summary:
        print(summary(list(runs)))
        return
    cases = [(seed,) for seed in arguments.seeds]
    for row in run_missing(runs, run, cases, keys=("seed",), jobs=arguments.jobs):
        for method, model in row["models"].items():
            print(row["seed"], method, model["points"], f"{model['rmse']:.3f}")


if __name__ == "__main__":
    main()
