"""How often the alarms of `fit_table` sound where nothing is wrong, and where something is.

Well-specified tables are draws from a Gaussian process, with the kernel that is fitted, for
numbers, classes and counts; nothing should sound. Each of the other tables has one fault, which an
alarm should name.

    python benchmarks/alarms.py              # 40 well-specified draws, and 3 of each fault
    python benchmarks/alarms.py --draws 120 --faults 0 --tasks regression
    python benchmarks/alarms.py --draws 0 --faults 20 --only "varying noise" --name noise
    python benchmarks/alarms.py --residuals  # the test of noise alone: false alarms and power
    python benchmarks/alarms.py --summary    # the tables of benchmarks/results/alarms
"""

import argparse
import warnings
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from measure import Row, grouped, markdown, new_results, read_results, timed
from winnowgp import DataTable, fit_table
from winnowgp.errors import DependentResidualsWarning, FitWarning
from winnowgp.tabular.residuals import Column, residual_alarms

Values = NDArray[np.float64]
Table = tuple[dict[str, Any], dict[str, Any]]
"""Columns, and settings of the fit."""

TASKS = ("regression",) * 6 + ("classification",) * 2 + ("counts",) * 2
KERNELS = ("rbf", "matern52", "matern32")


def smooth(rng: np.random.Generator, X: Values, kernel: str) -> Values:
    """Return a draw from a Gaussian process, scaled to a variance of one over the rows.

    Lengthscales are 0.3 to 1.2 of the range of a column. Unscaled, some draws would hardly vary,
    and a constant would predict them as well.
    """
    scales = rng.uniform(0.3, 1.2, X.shape[1])
    d = np.sqrt(((X[:, None] - X) ** 2 / scales**2).sum(2))
    shapes = {
        "rbf": np.exp(-(d**2) / 2),
        "matern52": (1 + np.sqrt(5) * d + 5 * d**2 / 3) * np.exp(-np.sqrt(5) * d),
        "matern32": (1 + np.sqrt(3) * d) * np.exp(-np.sqrt(3) * d),
    }
    L = np.linalg.cholesky(shapes[kernel] + 1e-8 * np.eye(len(X)))
    f = L @ rng.normal(size=len(X))
    return (f - f.mean()) / f.std()


def well_specified(task: str, seed: int) -> Table:
    """Return a draw from the model that is fitted."""
    rng = np.random.default_rng([seed, 1])
    N, D = int(rng.integers(120, 400)), int(rng.integers(1, 4))
    kernel = KERNELS[seed % 3] if task == "regression" else "rbf"
    X = rng.uniform(0, 1, (N, D))
    f = smooth(rng, X, kernel)
    columns: dict[str, Any] = {f"x{i}": X[:, i] for i in range(D)}
    if seed % 3 == 0:
        days = np.array("2020-01-01", "datetime64[D]") + np.sort(rng.integers(0, 900, N))
        columns["day"] = [str(day) for day in days]
    if seed % 4 == 0:
        columns["town"] = rng.choice(["Oslo", "Rome", "Lima"], N)
    if task == "classification":
        columns["y"] = np.where(2 * f + rng.normal(size=N) > 0, "yes", "no")
    elif task == "counts":
        columns["y"] = rng.poisson(np.exp(1 + 0.7 * f))
    else:
        columns["y"] = f + rng.uniform(0.1, 1.0) * rng.normal(size=N)
    return columns, {"task": task, "kernel": kernel, "max_points": 60}


def _base(rng: np.random.Generator, N: int = 300) -> tuple[Values, Values, Values]:
    a, b = rng.uniform(0, 6, N), rng.uniform(0, 1, N)
    return a, b, np.sin(a) + b


def noise_only(rng: np.random.Generator) -> Table:
    """Return inputs that have nothing to do with the target."""
    return {"a": rng.normal(size=150), "y": rng.normal(size=150)}, {}


def outliers(rng: np.random.Generator) -> Table:
    """Return noise with Student's t distribution of two degrees of freedom."""
    a, b, f = _base(rng)
    return {"a": a, "b": b, "y": f + 0.2 * rng.standard_t(2, len(a))}, {"max_points": 30}


def multiplicative(rng: np.random.Generator) -> Table:
    """Return a positive target whose noise grows with its size."""
    a, b, f = _base(rng)
    return {"a": a, "b": b, "y": np.exp(f + 0.4 * rng.normal(size=len(a)))}, {"max_points": 30}


def leak(rng: np.random.Generator) -> Table:
    """Return a column that is the target in other units."""
    a, b, f = _base(rng)
    y = f + 0.3 * rng.normal(size=len(a))
    return {"a": a, "b": b, "cents": np.round(100 * y, 1), "y": y}, {"max_points": 30}


def daily(rng: np.random.Generator) -> Table:
    """Return an hourly series with a trend and a daily cycle, which few points cannot follow."""
    t = np.arange(24 * 21) / 24
    start = np.array("2024-03-01", "datetime64[h]")
    y = 0.1 * t + np.sin(2 * np.pi * t) + 0.3 * rng.normal(size=len(t))
    return {"time": [str(start + i) for i in range(len(t))], "y": y}, {"max_points": 8}


def drift(rng: np.random.Generator) -> Table:
    """Return rows in the order of time, with a trend and without a column of time."""
    a, b, f = _base(rng)
    y = f + 2 * np.linspace(0, 1, len(a)) + 0.2 * rng.normal(size=len(a))
    return {"a": a, "b": b, "y": y}, {"max_points": 30}


def varying_noise(rng: np.random.Generator) -> Table:
    """Return noise that is four times as large at one end of a column as at the other."""
    a, b, f = _base(rng)
    return {"a": a, "b": b, "y": f + 0.4 * 4 ** (b - 1) * rng.normal(size=len(a))}, {
        "max_points": 30
    }


FAULTS: dict[str, tuple[Callable[[np.random.Generator], Table], str]] = {
    "noise only": (noise_only, "NoInducingPointsWarning"),
    "outliers": (outliers, "HeavyTailsWarning"),
    "multiplicative noise": (multiplicative, "DependentResidualsWarning"),
    "leak": (leak, "LeakageWarning"),
    "daily cycle": (daily, "PeriodicResidualsWarning"),
    "drift": (drift, "DependentResidualsWarning"),
    "varying noise": (varying_noise, "DependentResidualsWarning"),
}


def run(name: str, table: Table, seed: int, *, expected: str | None) -> Row:
    """Return the alarms of one fit as a row."""
    columns, settings = table
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FitWarning)
        model, seconds = timed(lambda: fit_table(DataTable.of(columns), "y", seed=seed, **settings))
    return {
        "table": name,
        "seed": seed,
        "rows": model.summary["rows"],
        "expected": expected,
        "alarms": [alarm["warning"] for alarm in model.summary["alarms"]],
        **seconds.row(),
    }


def residual_rows(draws: int) -> list[Row]:
    """Return how often residuals whose spread depends on one of three columns sound an alarm.

    Their standard deviation grows by a factor from one end of the column to the other; a factor of
    one is a false alarm. The p-value of an alarm is at most 0.002.
    """
    rows = []
    for N, factor in product((40, 80, 200, 1000), (1.0, 2.0, 4.0, 10.0)):
        rng, sounded = np.random.default_rng([N, int(factor)]), 0
        for _ in range(draws):
            X = rng.uniform(0, 1, (N, 3))
            z = factor ** (X[:, 0] - 0.5) * rng.normal(size=N)
            columns = [Column(f"x{i}", "number", X[:, i]) for i in range(3)]
            sounded += any(
                isinstance(alarm, DependentResidualsWarning)
                for alarm in residual_alarms(
                    z,
                    columns,
                    predicted=rng.normal(size=N),
                    positive=False,
                    likelihood="gaussian",
                )
            )
        rows.append({"rows": N, "factor": factor, "draws": draws, "sounded": sounded})
    return rows


def residual_summary(rows: list[Row]) -> str:
    """Return the shares of residuals with an alarm as a Markdown table."""
    groups = grouped(rows, "rows")
    header = [
        ">held-out rows",
        *(f">{row['factor']:g} times" for row in next(iter(groups.values()))),
    ]
    shares = {
        key: [f"{row['sounded'] / row['draws']:.3f}" for row in own] for key, own in groups.items()
    }
    return markdown(header, [[*key, *values] for key, values in shares.items()])


def summary() -> None:
    """Print how many fits of each kind had an alarm, and which."""
    rows = read_results("alarms/*")
    for name in dict.fromkeys(row["table"] for row in rows):
        mine = [row for row in rows if row["table"] == name]
        expected = mine[0]["expected"]
        right = [row for row in mine if bool(row["alarms"]) if expected in (None, *row["alarms"])]
        kinds = Counter(alarm for row in mine for alarm in row["alarms"])
        wanted = "none" if expected is None else expected
        sounded = f"sounded in {len(right):3} of {len(mine):3}"
        print(f"{name:30} expected {wanted:26} {sounded} {dict(kinds)}")
    if residuals := read_results("alarms/residuals/*"):
        print(residual_summary(residuals))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=3, help="draws of each fault")
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--residuals", action="store_true", help="test residuals, and fit nothing")
    parser.add_argument("--name", default="alarms")
    parser.add_argument("--summary", action="store_true")
    options = parser.parse_args()
    if options.summary:
        summary()
        return
    if options.residuals:
        residuals = new_results("alarms/residuals/power")
        print(residual_summary([residuals.add(row) for row in residual_rows(500)]))
        return
    results = new_results(f"alarms/{options.name}")
    for seed in range(options.first_seed, options.first_seed + options.draws):
        task = options.tasks[seed % len(options.tasks)]
        row = run(f"well-specified {task}", well_specified(task, seed), seed, expected=None)
        results.add(row)
        print(row, flush=True)
    for name in options.only:
        fault, expected = FAULTS[name]
        for seed in range(options.faults):
            row = run(name, fault(np.random.default_rng([seed, 2])), seed, expected=expected)
            results.add(row)
            print(row, flush=True)
    summary()


if __name__ == "__main__":
    main()
