"""Several fidelities on the usual test functions: error and density at the highest fidelity.

    python benchmarks/fidelity.py --seeds 30 31 32 33 34 40 41 42 43 44 --jobs 2
    python benchmarks/fidelity.py --noise 0.2              # of all observations
    python benchmarks/fidelity.py --summary                # print the results as Markdown

Functions and numbers of rows of each fidelity as in Cutajar et al. (2019): Currin 12/5, Park 30/5,
Borehole 60/5, Branin 80/30/10, Hartmann-3 80/40/20. Inputs are Latin hypercubes, one for each
fidelity; observations have no noise; 1,000 test rows are of the highest fidelity. Each design is
fitted by

- linear: `MultiFidelityGPRegressor(relation="linear")`, the autoregressive model of Kennedy &
  O'Hagan,
- nonlinear: `MultiFidelityGPRegressor(relation="nonlinear")`, after Perdikaris et al. (2017),
- auto: `MultiFidelityGPRegressor()`, which fits both and keeps one by an information criterion,
- point: linear with `hyper="point"`, one set of hyper-parameters,
- single: `SparseGPRegressor()` on the rows of the highest fidelity,
- pooled: `SparseGPRegressor()` on all rows, the fidelity ignored.

The error is divided by the standard deviation of the test targets, and log densities are of targets
divided by it. With `--noise`, observations of every fidelity have Gaussian noise with this share of
the standard deviation of its function, and test targets have none. Settings were chosen on seeds 0
to 3 and 20 to 25, and after a look at 10 to 14; the criterion of "auto" after a look at 30 to 32.
"""

import warnings
from collections.abc import Callable
from math import sqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats.qmc import LatinHypercube

from measure import RESULTS, Row, grouped, markdown, mean, parser_of, run_missing, timed
from winnowgp import MultiFidelityGPRegressor, SparseGPRegressor
from winnowgp.experiments.runs import Runs

Values = NDArray[np.float64]

FILE = RESULTS / "fidelity" / "fits.jsonl"
METHODS = ("linear", "nonlinear", "auto", "point", "single", "pooled")


def currin(X: Values, level: int) -> Values:
    """Return the exponential function of Currin et al.; the lower fidelity averages four points."""
    if level == 1:
        x, y = X.T
        # At y = 0 the exponential is zero.
        factor = 1 - np.exp(-0.5 / np.maximum(y, 1e-12))
        top, bottom = [2300, 1900, 2092, 60], [100, 500, 4, 20]
        return factor * np.polyval(top, x) / np.polyval(bottom, x)
    moved = []
    for dx in (0.05, -0.05):
        moved.append(currin(np.column_stack([X[:, 0] + dx, X[:, 1] + 0.05]), 1))
        moved.append(currin(np.column_stack([X[:, 0] + dx, np.maximum(X[:, 1] - 0.05, 0)]), 1))
    return np.mean(moved, 0)


def park(X: Values, level: int) -> Values:
    """Return Park's first function of four inputs."""
    a, b, c, d = X.T
    a = np.maximum(a, 1e-8)
    high = a / 2 * (np.sqrt(1 + (b + c**2) * d / a**2) - 1) + (a + 3 * d) * np.exp(1 + np.sin(c))
    if level == 1:
        return high
    return (1 + np.sin(a) / 10) * high - 2 * a + b**2 + c**2 + 0.5


_BOREHOLE = np.array(
    [
        [0.05, 0.15],
        [100, 50_000],
        [63_070, 115_600],
        [990, 1110],
        [63.1, 116],
        [700, 820],
        [1120, 1680],
        [9855, 12_045],
    ]
)


def borehole(X: Values, level: int) -> Values:
    """Return the flow of water through a borehole, of eight inputs."""
    rw, r, Tu, Hu, Tl, Hl, L, Kw = (_BOREHOLE[:, 0] + X * np.ptp(_BOREHOLE, 1)).T
    first, second = (2 * np.pi, 1.0) if level == 1 else (5.0, 1.5)
    ratio = np.log(r / rw)
    return first * Tu * (Hu - Hl) / (ratio * (second + 2 * L * Tu / (ratio * rw**2 * Kw) + Tu / Tl))


def branin(X: Values, level: int) -> Values:
    """Return Branin's function with the lower fidelities of Perdikaris et al. (2017)."""
    x, y = -5 + 15 * X[:, 0], 15 * X[:, 1]
    if level == 2:
        curve = y - 5.1 * x**2 / (4 * np.pi**2) + 5 * x / np.pi - 6
        return curve**2 + 10 * (1 - 1 / (8 * np.pi)) * np.cos(x) + 10
    if level == 1:
        inner = branin(np.column_stack([(x - 2 + 5) / 15, (y - 2) / 15]), 2)
        return 10 * np.sqrt(np.abs(inner)) + 2 * (x - 0.5) - 3 * (3 * y - 1) - 1
    inner = branin(np.column_stack([(1.2 * (x + 2) + 5) / 15, 1.2 * (y + 2) / 15]), 1)
    return inner - 3 * y + 1


def hartmann(X: Values, level: int) -> Values:
    """Return Hartmann's function of three inputs, whose weights depend on the fidelity."""
    A = np.array([[3, 10, 30], [0.1, 10, 35], [3, 10, 30], [0.1, 10, 35]])
    P = np.array([[3689, 1170, 2673], [4699, 4387, 7470], [1091, 8732, 5547], [381, 5743, 8828]])
    weights = np.array([1.0, 1.2, 3.0, 3.2]) + (2 - level) * np.array([0.01, -0.01, -0.1, 0.1])
    squares = (A * (X[:, None] - 1e-4 * P) ** 2).sum(2)
    return np.exp(-squares) @ weights


PROBLEMS: dict[str, tuple[Callable[[Values, int], Values], int, tuple[int, ...]]] = {
    "currin": (currin, 2, (12, 5)),
    "park": (park, 4, (30, 5)),
    "borehole": (borehole, 8, (60, 5)),
    "branin": (branin, 2, (80, 30, 10)),
    "hartmann-3": (hartmann, 3, (80, 40, 20)),
}
"""Functions of inputs in the unit cube and of the fidelity; inputs; rows of each fidelity."""


def scores(model: Any, X: Values, y: Values) -> Row:
    """Return error, log density and coverage of 90 % intervals, of targets of unit variance."""
    scale = y.std()
    lower, upper = model.predict_interval(X, 0.9)
    return {
        "rmse": float(np.sqrt(np.mean((model.predict(X) - y) ** 2)) / scale),
        "log_density": float(model.log_density(X, y).mean() + np.log(scale)),
        "coverage_90": float(np.mean((lower <= y) & (upper >= y))),
    }


def run(name: str, seed: int, noise: float) -> Row:
    """Fit one design by all methods."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rng = np.random.default_rng(seed)
    function, D, counts = PROBLEMS[name]
    parts = [LatinHypercube(D, rng=rng).random(count) for count in counts]
    X = np.concatenate(parts)
    values = [function(part, level) for level, part in enumerate(parts)]
    levels = np.repeat(np.arange(len(counts)), counts)
    highest = len(counts) - 1
    X_test = rng.uniform(size=(1000, D))
    y_test = function(X_test, highest)
    spread = [function(X_test, level).std() for level in range(len(counts))]
    pairs = zip(values, spread, strict=True)
    y = np.concatenate([v + noise * sd * rng.normal(size=len(v)) for v, sd in pairs])
    top = levels == highest
    models: dict[str, Row] = {}
    at = np.column_stack([X_test, np.full(1000, highest)])
    several: dict[str, dict[str, Any]] = {
        "linear": {"relation": "linear"},
        "nonlinear": {"relation": "nonlinear"},
        "auto": {},
        "point": {"relation": "linear", "hyper": "point"},
    }
    for method, settings in several.items():
        fidelities = MultiFidelityGPRegressor(random_state=seed, **settings)
        _, seconds = timed(lambda m=fidelities: m.fit(np.column_stack([X, levels]), y))
        models[method] = {"points": fidelities.n_inducing_, "relation": fidelities.relation_}
        models[method] |= scores(fidelities, at, y_test)
        models[method] |= seconds.row()
    for method, rows in (("single", top), ("pooled", top | True)):
        model = SparseGPRegressor(kernel="rbf", random_state=seed)
        _, seconds = timed(lambda model=model, rows=rows: model.fit(X[rows], y[rows]))
        models[method] = {"points": [model.n_inducing_]} | scores(model, X_test, y_test)
        models[method] |= seconds.row()
    return {"name": name, "seed": seed, "noise": noise, "models": models}


def summary(rows: list[Row]) -> str:
    """Return means over seeds, with standard errors of densities, as a Markdown table."""
    lines = []
    rows = sorted(rows, key=lambda row: list(PROBLEMS).index(row["name"]))
    for (name, noise), own in grouped(rows, "name", "noise").items():
        for method in METHODS:
            fits = [row["models"][method] for row in own]
            nats = [fit["log_density"] for fit in fits]
            error = np.std(nats, ddof=1) / sqrt(len(nats)) if len(nats) > 1 else np.nan
            lines.append(
                [
                    f"{name} {'/'.join(map(str, PROBLEMS[name][2]))}",
                    f"{noise:g}",
                    method,
                    len(own),
                    " + ".join(f"{c:.0f}" for c in np.mean([fit["points"] for fit in fits], 0)),
                    f"{mean(fit['rmse'] for fit in fits):.3f}",
                    f"{mean(nats):.2f} ± {error:.2f}",
                    f"{mean(fit['coverage_90'] for fit in fits):.2f}",
                    f"{mean(fit['cpu_s'] for fit in fits):.0f}",
                    _nonlinear(fits) if method == "auto" else "",
                ]
            )
    header = [
        "function",
        ">noise",
        "model",
        ">seeds",
        "points per process",
        ">RMSE",
        ">test log density",
    ]
    return markdown([*header, ">90 % intervals hold", ">CPU s", "relation"], lines)


def _nonlinear(fits: list[Row]) -> str:
    count = sum(fit["relation"] == "nonlinear" for fit in fits)
    return f"{count} of {len(fits)} nonlinear"


def main() -> None:
    """Parse the command line; fit designs that have no rows yet, or print the summary."""
    parser = parser_of(__doc__, seeds=[30, 31, 32, 33, 34, 40, 41, 42, 43, 44])
    parser.add_argument("--only", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument("--noise", type=float, default=0.0)
    arguments = parser.parse_args()
    runs = Runs(FILE)
    if arguments.summary:
        print(summary(list(runs)))
        return
    cases = [(name, seed, arguments.noise) for seed in arguments.seeds for name in arguments.only]
    keys = ("name", "seed", "noise")
    for row in run_missing(runs, run, cases, keys=keys, jobs=arguments.jobs):
        for method, model in row["models"].items():
            print(row["name"], row["seed"], method, model["points"], f"{model['log_density']:.3f}")


if __name__ == "__main__":
    main()
