"""Default fits of small tables: are they better than a constant, and are their intervals right?

    python benchmarks/small_tables.py --seeds 12 13 --most 130 --jobs 2
    python benchmarks/small_tables.py --summary               # print the results as Markdown

Tables of 16 to 800 training rows: those that come with scikit-learn, parts of the tables in
$WINNOWGP_DATA, and made ones: pure noise, weak linear effects, functions almost without noise, and
skewed targets (the exponential of noise, and of an effect with noise). Unusual ones have more
columns than rows, correlated, duplicate and constant columns, codes of categories, heavy-tailed
inputs, repeated settings, counts, ratings, two values, many zeros, or a trend with outliers.
Each split is fitted by `SparseGPRegressor()`, by `SparseGPRegressor(hyper="point")`, also with
`priors=None`, and by the exact GP with an RBF kernel at the maximum of its evidence. The weak
priors, the Laplace approximation and the weight of a constant were set on seeds 0 to 3.
"""

import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from math import log, sqrt
from operator import itemgetter
from typing import Any

import numpy as np
import sklearn.datasets
import torch
from numpy.typing import NDArray
from scipy.stats import norm
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.model_selection import cross_val_predict

from calibration import LEVELS, calibration
from measure import RESULTS, Row, grouped, markdown, mean, parser_of, run_missing, timed
from right_number_dense import exact_gp
from right_number_problems import Problem, table_path
from winnowgp import SparseGPRegressor
from winnowgp.experiments.runs import Runs

Values = NDArray[np.float64]

FILE = RESULTS / "small_tables.jsonl"
METHODS = ("default", "hyper=point", "hyper=point, priors=None", "exact GP")
FRESH = 1000
"""Largest number of test rows."""
BELOW = -0.05
"""Gain over a constant below which a fit counts as worse than it."""
QUANTILES, DRAWS = 50, 4000
"""Quantiles of each test row, and draws of all test rows, if predictions are right."""
FEW_TEST_ROWS = 100
"""Test rows up to which chance may make right predictions worse than a constant."""
SIZES = {
    "concrete": (30, 60, 120, 300),
    "energy": (30, 60, 120),
    "skillcraft": (50, 100, 200, 400),
    "protein": (50, 100, 200, 400, 800),
    "kin8nm": (50, 100, 200),
    "kin40k": (50, 100, 200),
}


@dataclass(frozen=True, slots=True)
class Table:
    """A table, and the number of rows to train with."""

    X: Values
    y: Values
    train: int


def real_tables() -> dict[str, Table]:
    """Return the tables of scikit-learn, and parts of the tables in $WINNOWGP_DATA."""
    sets: Any = sklearn.datasets
    diabetes, linnerud = sets.load_diabetes(), sets.load_linnerud()
    iris, wine, cancer = (
        sets.load_iris().data,
        sets.load_wine().data,
        sets.load_breast_cancer().data,
    )
    rows = {
        "diabetes": (diabetes.data, diabetes.target),
        "linnerud": (linnerud.data, linnerud.target[:, 0]),
        "iris": (iris[:, :3], iris[:, 3]),
        "wine": (wine[:, 1:], wine[:, 0]),
        "cancer": (cancer[:, [0, *range(2, 10)]], cancer[:, 1]),
    }
    tables = {name: Table(X, y, int(0.8 * len(y))) for name, (X, y) in rows.items()}
    for name, sizes in SIZES.items():
        if path := table_path(name):
            values = np.loadtxt(path, delimiter=",", skiprows=1)
            for n in sizes:
                tables[f"{name}, {n}"] = Table(values[:, :-1], values[:, -1], n)
    return tables


def made_tables() -> dict[str, Table]:
    """Return pure noise, weak linear effects, and functions of two columns without much noise."""
    rng, tables = np.random.default_rng(5), {}
    for n in (20, 50, 100, 200, 500):
        for D in (1, 5, 10):
            X = rng.normal(size=(n + FRESH, D))
            tables[f"noise, {n} × {D}"] = Table(X, rng.normal(size=len(X)), n)
    for n in (30, 60, 120, 300):
        for D in (3, 8):
            X = rng.normal(size=(n + FRESH, D))
            weak = 0.4 * X @ rng.normal(size=D) / sqrt(D) + rng.normal(size=len(X))
            clean = np.sin(2 * X[:, 0]) + X[:, 1] ** 2 / 2 + 0.01 * rng.normal(size=len(X))
            tables[f"weak, {n} × {D}"] = Table(X, weak, n)
            tables[f"clean, {n} × {D}"] = Table(X, clean, n)
    for n in (40, 80, 160, 400):
        for width in (0.7, 1.5):
            X = rng.normal(size=(n + FRESH, 5))
            noise, effect = rng.normal(size=len(X)), 1.5 * np.sin(1.5 * X[:, 0])
            tables[f"skewed noise, {n}, {width}"] = Table(X, np.exp(width * noise), n)
            skewed = np.exp(width / 2 * (effect + noise))
            tables[f"skewed, {n}, {width}"] = Table(X, skewed, n)
    return tables


def unusual_tables() -> dict[str, Table]:
    """Return made tables of kinds that small public tables often are."""
    tables = {}
    for n in (30, 90, 270):
        rng = np.random.default_rng(n)
        rows = n + FRESH
        Z, noise = rng.normal(size=(rows, 8)), rng.normal(size=rows)
        effect = np.sin(2 * Z[:, 0]) + 0.5 * Z[:, 1]
        codes = rng.integers(0, 6, size=(rows, 3))
        levels = rng.normal(size=(3, 6))
        additive = sum(levels[column, codes[:, column]] for column in range(3))
        settings = rng.normal(size=(n // 3, 4))[rng.integers(0, n // 3, size=rows)]
        tables |= {
            f"many columns, {n}": (rng.normal(size=(rows, 60)) + Z[:, :1], effect + 0.3 * noise),
            f"correlated columns, {n}": (
                Z[:, :1] + 0.05 * rng.normal(size=(rows, 8)),
                effect + 0.3 * noise,
            ),
            f"duplicate columns, {n}": (
                np.hstack([Z[:, :2], Z[:, :2], np.ones((rows, 1)), Z[:, 2:]]),
                effect + 0.3 * noise,
            ),
            f"codes, {n}": (codes.astype(float), additive + 0.5 * noise),
            f"heavy-tailed inputs, {n}": (np.exp(1.5 * Z), effect + 0.3 * noise),
            f"repeated settings, {n}": (settings, np.sin(2 * settings[:, 0]) + 0.5 * noise),
            f"counts, {n}": (Z[:, :4], rng.poisson(np.exp(0.5 + 0.6 * effect)).astype(float)),
            f"ratings, {n}": (Z, np.clip(np.round(3 + effect + noise), 1, 5)),
            f"two values, {n}": (Z, (effect + noise > 0.5).astype(float)),
            f"many zeros, {n}": (Z[:, :5], np.maximum(effect + 0.5 * noise, 0.3) - 0.3),
            f"trend with outliers, {n}": (
                np.sort(rng.uniform(0, 1, size=(rows, 1)), 0),
                np.arange(rows) / rows + 0.05 * rng.standard_t(2, size=rows),
            ),
            f"few of many columns, {n}": (
                np.hstack([Z[:, :2], rng.normal(size=(rows, 38))]),
                effect + 0.1 * noise,
            ),
        }
    return {name: Table(X, y, int(name.split(", ")[1])) for name, (X, y) in tables.items()}


def all_tables() -> dict[str, Table]:
    """Return all tables."""
    return {**real_tables(), **made_tables(), **unusual_tables()}


def run_fit(name: str, seed: int, method: str) -> Row:
    """Return the test scores of one fit of a table by its name."""
    return scored(all_tables()[name], name, seed, method)


def run_tables(
    runs: Runs,
    tables: Mapping[str, Table],
    *,
    seeds: Sequence[int],
    methods: Sequence[str],
    jobs: int,
) -> None:
    """Fit all tables by all methods, but for fits that have a row in the result file."""
    done = set(grouped(runs, "name", "seed", "method"))
    fits = [
        (tables[name], name, seed, method)
        for seed in seeds
        for name in tables
        for method in methods
        if (name, seed, method) not in done
    ]
    with ProcessPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(scored, *fit) for fit in fits]):
            row = runs.add(future.result())
            print(f"{row['name']} {row['seed']} {row['method']}: {row['log_density']:.3f}")


def scored(table: Table, name: str, seed: int, method: str) -> Row:
    """Return the test scores of one fit, in standardised units, beside those of a constant."""
    torch.set_num_threads(1)
    order = np.random.default_rng([seed, 7]).permutation(len(table.y))
    train, test = order[: table.train], order[table.train : table.train + FRESH]
    problem = Problem(table.X[train], table.y[train], table.X[test], table.y[test])
    constant = norm.logpdf(problem.y_test, problem.y.mean(), _deviation(problem)).mean()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        predicted, seconds = timed(lambda: _predicted(problem, method, seed))
    density, quantiles, points, limit, further = predicted
    return {
        "name": name,
        "seed": seed,
        "method": method,
        "N": problem.N,
        "test": len(test),
        "points": points,
        "log_density": density,
        "constant": constant + log(problem.scale),
        **calibration(quantiles, problem.y_test),
        "limit": limit,
        **further,
        **seconds.row(),
    }


def below_if_right(gains: Values, *, seed: int) -> float:
    """Return the probability of a mean gain of the test rows below −0.05 if predictions are right.

    Test rows are few, so that even the density they are drawn from may predict them worse than a
    constant does.

    >>> round(below_if_right(np.array([[-0.6], [0.4], [0.4], [0.4], [0.4]]), seed=0), 1)
    0.2

    Args:
        gains: gains over the constant at quantiles of equal probability, `[Q N]`.
        seed: of the draws, one quantile for each row.
    """
    Q, N = gains.shape
    drawn = np.random.default_rng(seed).integers(0, Q, size=(DRAWS, N))
    return float((gains[drawn, np.arange(N)].mean(1) < BELOW).mean())


def _gains(model: SparseGPRegressor, problem: Problem) -> Values:
    """Return gains over the constant at quantiles of equal probability, `[Q N]`."""
    levels = (np.arange(QUANTILES) + 0.5) / QUANTILES
    drawn = model.predict_quantiles(problem.X_test, levels)
    density = np.stack([model.log_density(problem.X_test, y) for y in drawn])
    return density - norm.logpdf(drawn, problem.y.mean(), _deviation(problem))


def _deviation(problem: Problem) -> float:
    """Return the standard deviation of an observation that the constant model predicts."""
    return float(problem.y.std(ddof=1) * sqrt(1 + 1 / problem.N))


def _predicted(
    problem: Problem, method: str, seed: int
) -> tuple[float, Values, int, str | None, Row]:
    """Return the standardised test log density, quantiles of test rows in their own unit, the
    number of points, the limit that ended growth, and further columns: the evidence of an exact
    GP, or what chance does to few test rows."""
    if method == "boosting":
        return _boosted(problem, seed)
    if method.startswith("exact GP"):
        standardised = problem.standardised()
        kernel = "matern32" if method.endswith("matern32") else "rbf"
        exact = exact_gp(standardised, kernels=(kernel,), device="cpu", seed=seed)
        density = exact.log_density(standardised.X_test, standardised.y_test).mean()
        posterior = exact.model.with_candidates(exact.data.X).posterior(exact.data)
        latent = posterior.predict(torch.from_numpy(standardised.X_test), observed=True)
        mean, deviation = latent.mean[:, 0].numpy(), latent.variance[:, 0].sqrt().numpy()
        quantiles = mean + norm.ppf(LEVELS)[:, None] * deviation
        quantiles = problem.y.mean() + problem.scale * quantiles
        further: Row = {"evidence": exact.evidence / problem.N}
        further["rmse"] = float(np.sqrt(np.mean((mean - standardised.y_test) ** 2)))
        return float(density), quantiles, problem.N, None, further
    priors = None if "priors=None" in method else "weak"
    hyper = "point" if "hyper=point" in method else "auto"
    model = SparseGPRegressor(random_state=seed, priors=priors, hyper=hyper)
    model.fit(problem.X, problem.y)
    density = model.log_density(problem.X_test, problem.y_test).mean() + log(problem.scale)
    quantiles = model.predict_quantiles(problem.X_test, LEVELS)
    further = _reported(model, problem)
    if len(problem.y_test) <= FEW_TEST_ROWS:
        further["below_if_right"] = below_if_right(_gains(model, problem), seed=seed)
    return float(density), quantiles, model.n_inducing_, model.growth_limit_, further


def _reported(model: SparseGPRegressor, problem: Problem) -> Row:
    """Return what a fit reports, per observation, and its root-mean-square error."""
    error = (model.predict(problem.X_test) - problem.y_test) / problem.scale
    upper = model.evidence_ and model.kl_bounds_[1] / problem.N
    return {
        "rmse": float(np.sqrt(np.mean(error**2))),
        "kernel": model.kernel_name_,
        "elbo": model.elbo_ / problem.N,
        "elbo_gap": model.elbo_gap_,
        "kl": upper,
        "predictive_gap": model.predictive_gap_,
        "doubling": model.last_doubling_gain_,
    }


def _boosted(problem: Problem, seed: int) -> tuple[float, Values, int, str | None, Row]:
    """Return the scores of boosted trees, with Gaussian noise of the cross-validated variance."""
    trees = HistGradientBoostingRegressor(random_state=seed)
    left_out = cross_val_predict(trees, problem.X, problem.y, cv=5)
    deviation = np.sqrt(np.mean((left_out - problem.y) ** 2))
    mean = trees.fit(problem.X, problem.y).predict(problem.X_test)
    density = norm.logpdf(problem.y_test, mean, deviation).mean() + log(problem.scale)
    rmse = float(np.sqrt(np.mean((mean - problem.y_test) ** 2))) / problem.scale
    return density, mean + norm.ppf(LEVELS)[:, None] * deviation, 0, None, {"rmse": rmse}


def summary(rows: list[Row]) -> str:
    """Return a Markdown table: gains over the constant, and coverage, by group of tables."""
    made = ("noise", "weak", "clean", "skewed noise", "skewed")
    unusual = unusual_tables()

    def kind_of(name: str) -> str:
        kind = "unusual" if name in unusual else name.split(",")[0]
        return kind if kind in (*made, "unusual") else "real tables"

    own = [row | {"kind": kind_of(row["name"])} for row in rows]
    groups = grouped(sorted(own, key=itemgetter("kind", "method")), "kind", "method")
    groups |= grouped(
        sorted([r | {"kind": "all"} for r in own], key=itemgetter("method")), "kind", "method"
    )
    lines = []
    for (kind, method), fits in groups.items():
        gain = np.array([row["log_density"] - row["constant"] for row in fits])
        lines.append(
            [
                kind,
                method,
                len(fits),
                f"{gain.mean():.3f}",
                f"{np.median(gain):.3f}",
                f"{gain.min():.3f}",
                int((gain < BELOW).sum()),
                f"{mean(row['coverage_90'] for row in fits):.3f}",
                f"{mean(row['cpu_s'] for row in fits):.1f}",
            ]
        )
    header = ["tables", "method", ">fits", ">gain over a constant, mean", ">median", ">worst"]
    return markdown([*header, ">below −0.05", ">coverage of 90 %", ">CPU s"], lines)


def main() -> None:
    """Parse the command line; run fits that have no row yet, or print the summary."""
    parser = parser_of(__doc__, seeds=[5], file=FILE, methods=METHODS, most=1000)
    parser.add_argument("--only", nargs="+", default=None, help="names of tables")
    parser.add_argument("--unusual", action="store_true", help="unusual tables only")
    arguments = parser.parse_args()
    runs = Runs(arguments.file)
    if arguments.summary:
        print(summary(list(runs)))
        return
    tables = all_tables()
    chosen = arguments.only or list(unusual_tables() if arguments.unusual else tables)
    names = [name for name in chosen if tables[name].train <= arguments.most]
    names.sort(key=lambda name: tables[name].train)
    fits = [(name, s, m) for s in arguments.seeds for name in names for m in arguments.methods]
    keys = ("name", "seed", "method")
    for row in run_missing(runs, run_fit, fits, keys=keys, jobs=arguments.jobs):
        print(f"{row['name']} {row['seed']} {row['method']}: {row['log_density']:.3f}", flush=True)


if __name__ == "__main__":
    main()
