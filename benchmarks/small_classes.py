"""Classifiers of small tables: do weak priors keep them from being worse than a constant?

    python benchmarks/small_classes.py --seeds 0 1 2 --most 100
    python benchmarks/small_classes.py --summary              # print the results as Markdown

Tables of 20 to 400 training rows: parts of those that come with scikit-learn, a part of them with
some labels drawn again, and labels that have nothing to do with the inputs. Each split is fitted by
`SparseGPClassifier("rbf")`, and by the same with the weak priors of `SparseGPRegressor` on its
kernel. The constant gives each class its frequency among the training rows, with one row of each
class added.
"""

import warnings
from typing import Any

import numpy as np
import sklearn.datasets
import torch
from numpy.typing import NDArray

from measure import RESULTS, Row, grouped, markdown, mean, parser_of, run_missing, timed
from winnowgp import SparseGPClassifier
from winnowgp.estimators.kernels import kernel_from
from winnowgp.experiments.runs import Runs
from winnowgp.models.priors import add_weak_priors

Values = NDArray[np.float64]

FILE = RESULTS / "small_classes.jsonl"
METHODS = ("no priors", "weak priors")
FRESH = 1000
"""Largest number of test rows."""
SIZES = (20, 50, 100, 200, 400)
COLUMNS = (1, 5, 10)
RATE = 0.25
"""Share of labels that are drawn again."""


def names_of(sizes: list[int]) -> list[str]:
    """Return the names of all tables of these sizes."""
    most = {"iris": 100, "wine": 100, "cancer": 400}
    real = [
        f"{kind}{name}, {n}"
        for n in sizes
        for name in most
        for kind in ("", "noisy ")
        if n <= most[name]
    ]
    return real + [f"pure noise, {n}, {D}" for n in sizes for D in COLUMNS]


def table_of(name: str, seed: int) -> tuple[Values, NDArray[np.intp], int]:
    """Return inputs and labels in random order, and the number of training rows."""
    rng = np.random.default_rng([seed, 11])
    kind, size, *columns = name.split(", ")
    if kind == "pure noise":
        D, n = int(columns[0]), int(size)
        return rng.normal(size=(n + FRESH, D)), (rng.random(n + FRESH) < 0.4).astype(int), n
    sets: Any = sklearn.datasets
    load = {"iris": sets.load_iris, "wine": sets.load_wine, "cancer": sets.load_breast_cancer}
    X, y = load[kind.removeprefix("noisy ")](return_X_y=True)
    if kind.startswith("noisy"):
        y = np.where(rng.random(len(y)) < RATE, rng.permutation(y), y)
    order = rng.permutation(len(y))
    return X[order], y[order], int(size)


def run_fit(name: str, seed: int, method: str) -> Row:
    """Return the test scores of one fit beside those of a constant."""
    torch.set_num_threads(1)
    X, y, n = table_of(name, seed)
    # Classes that the training rows lack cannot be scored.
    test = np.arange(n, min(len(y), n + FRESH))
    test = test[np.isin(y[test], y[:n])]
    kernel = kernel_from("rbf", X.shape[1])
    if method == "weak priors":
        add_weak_priors(kernel)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, seconds = timed(
            lambda: SparseGPClassifier(kernel, random_state=seed).fit(X[:n], y[:n])
        )
    counts = 1 + np.array([(y[:n] == label).sum() for label in model.classes_])
    column = np.searchsorted(model.classes_, y[test])
    return {
        "name": name,
        "seed": seed,
        "method": method,
        "N": n,
        "test": len(test),
        "points": model.n_inducing_,
        "log_probability": float(model.log_density(X[test], y[test]).mean()),
        "accuracy": float((model.predict(X[test]) == y[test]).mean()),
        "constant": float(np.log(counts / counts.sum())[column].mean()),
        **seconds.row(),
    }


def summary(rows: list[Row]) -> str:
    """Return a Markdown table: gains over the constant in log probability, by group of tables."""
    kinds = ("pure noise", "noisy", "real tables", "all")
    named = []
    for row in rows:
        kind = next((k for k in kinds[:2] if row["name"].startswith(k)), "real tables")
        named += [row | {"kind": kind}, row | {"kind": "all"}]
    named.sort(key=lambda r: (kinds.index(r["kind"]), METHODS.index(r["method"])))
    lines = []
    for (kind, method), own in grouped(named, "kind", "method").items():
        gain = np.array([row["log_probability"] - row["constant"] for row in own])
        lines.append(
            [
                kind,
                method,
                len(own),
                f"{gain.mean():.3f}",
                f"{gain.min():.3f}",
                int((gain < -0.05).sum()),
                f"{mean(row['accuracy'] for row in own):.3f}",
                f"{mean(row['points'] for row in own):.1f}",
                f"{mean(row['cpu_s'] for row in own):.1f}",
            ]
        )
    header = ["tables", "kernel", ">fits", ">gain over a constant, mean", ">worst", ">below −0.05"]
    return markdown([*header, ">accuracy", ">points", ">CPU s"], lines)


def main() -> None:
    """Parse the command line; run fits that have no row yet, or print the summary."""
    parser = parser_of(__doc__, seeds=[0, 1, 2], methods=METHODS, most=400)
    parser.add_argument("--only", nargs="+", default=None, help="names of tables")
    arguments = parser.parse_args()
    runs = Runs(FILE)
    if arguments.summary:
        print(summary(list(runs)))
        return
    names = arguments.only or names_of([size for size in SIZES if size <= arguments.most])
    fits = [(name, s, m) for name in names for s in arguments.seeds for m in arguments.methods]
    keys = ("name", "seed", "method")
    for row in run_missing(runs, run_fit, fits, keys=keys, jobs=arguments.jobs):
        gain = row["log_probability"] - row["constant"]
        print(
            f"{row['name']} {row['seed']} {row['method']}: {gain:.3f} {row['cpu_s']:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
