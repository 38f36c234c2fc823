"""Streams: `partial_fit` against other selectors, against one fit of all rows, and for long.

    python benchmarks/stream.py uci [--tables concrete] [--seeds 2 3 4] [--methods …]
    python benchmarks/stream.py iid | away | moons [--seeds 2 3 4]
    python benchmarks/stream.py long [--batches 10000] [--seconds 280]
    python benchmarks/stream.py --report

`uci` follows Pescador-Barrios et al. (2025): columns standardised over all rows, rows sorted by the
first column, 20 batches, the rows of each shuffled and split 80/20; the log density is that of the
test rows of all batches so far. All methods have an RBF kernel with one lengthscale per column.
`iid` and `away` are synthetic; in `away` the inputs move away and return. `long` saves the model
and goes on from it when it is called again. Results are in benchmarks/results/stream.
"""

import argparse
import json
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from numpy.typing import NDArray
from sklearn.datasets import make_moons

from measure import RESULTS, Row, mean, table
from stream_methods import ConditionalVariance, Oips, Selector, Vips
from winnowgp import SparseGPClassifier, SparseGPRegressor, load
from winnowgp.data import Dataset, load_table
from winnowgp.experiments.runs import Runs

BATCHES = 20
TABLES = ("concrete", "skillcraft", "kin8nm")
SELECTORS: dict[str, type[Selector]] = {
    "VIPS": Vips,
    "OIPS": Oips,
    "conditional variance": ConditionalVariance,
}
METHODS = ("partial_fit", *SELECTORS, "all rows")
FOLDER = RESULTS / "stream"

Array = NDArray[Any]
Parts = list[tuple[Array, Array, Array, Array]]


def parts_of(name: str, seed: int) -> Parts:
    """Return train and test rows of each batch."""
    data = load_table(name).dataset()
    X, y = data.X.numpy(), data.Y[:, 0].numpy()
    X, y = (X - X.mean(0)) / X.std(0), (y - y.mean()) / y.std()
    order = np.argsort(X[:, 0], kind="stable")
    rng, parts = np.random.default_rng(seed), []
    for rows in np.array_split(order, BATCHES):
        rows = rng.permutation(rows)
        train, test = rows[: int(0.8 * len(rows))], rows[int(0.8 * len(rows)) :]
        parts.append((X[train], y[train], X[test], y[test]))
    return parts


class Ours:
    """`SparseGPRegressor.partial_fit`."""

    def __init__(self, tolerance: float) -> None:
        self.model = SparseGPRegressor("rbf", tolerance=tolerance, random_state=0)

    def learn(self, X: Array, y: Array) -> None:
        self.model.partial_fit(X, y)

    @property
    def points(self) -> int:
        return self.model.n_inducing_

    def log_density(self, X: Array, y: Array) -> float:
        return float(self.model.log_density(X, y).mean())


class Other:
    """A selector of `stream_methods`."""

    def __init__(self, name: str, D: int) -> None:
        kernel = ScaleKernel(RBFKernel(ard_num_dims=D)).double()
        kernel.initialize(**{"base_kernel.lengthscale": D**0.5})
        self.selector = SELECTORS[name](kernel)

    def learn(self, X: Array, y: Array) -> None:
        self.selector.learn(Dataset.of(torch.tensor(X), torch.tensor(y)))

    @property
    def points(self) -> int:
        assert self.selector.posterior is not None
        return self.selector.posterior.M

    def log_density(self, X: Array, y: Array) -> float:
        assert self.selector.posterior is not None
        rows = torch.tensor(X), torch.tensor(y)[:, None]
        return self.selector.posterior.log_density(*rows).mean().item()


def stream_rows(method: str, parts: Parts, *, tolerance: float) -> Iterator[Row]:
    """Yield the results of a method after each batch; those of all rows at once at the end."""
    if method == "all rows":
        model = SparseGPRegressor("rbf", tolerance=tolerance, random_state=0)
        start = time.process_time()
        model.fit(np.vstack([p[0] for p in parts]), np.concatenate([p[1] for p in parts]))
        seconds = time.process_time() - start
        X, y = np.vstack([p[2] for p in parts]), np.concatenate([p[3] for p in parts])
        density = float(model.log_density(X, y).mean())
        yield {"batch": len(parts), "points": model.n_inducing_, "log_density": density} | {
            "cpu_s": round(seconds, 3)
        }
        return
    D = parts[0][0].shape[1]
    learner = Ours(tolerance) if method == "partial_fit" else Other(method, D)
    seconds = 0.0
    for number, (X, y, _, _) in enumerate(parts, 1):
        start = time.process_time()
        learner.learn(X, y)
        seconds += time.process_time() - start
        test = [np.concatenate([p[i] for p in parts[:number]]) for i in (2, 3)]
        first = learner.log_density(parts[0][2], parts[0][3])
        yield {
            "batch": number,
            "points": learner.points,
            "log_density": round(learner.log_density(*test), 5),
            "first_batch": round(first, 5),
            "cpu_s": round(seconds, 3),
        }


def synthetic(kind: str, seed: int) -> Parts:
    """Return batches of a function of one input, drawn i.i.d., or moving away and returning."""
    rng, parts = np.random.default_rng(seed), []
    count = 40
    for number in range(count):
        low, high = 0.0, 10.0
        if kind == "away":
            # From 0 to 16 and back.
            low = 16 * (1 - abs(2 * number / (count - 1) - 1))
            high = low + 4
        X = rng.uniform(low, high, (40, 1))
        y = np.sin(2 * X[:, 0]) * (1 + 0.3 * np.cos(0.7 * X[:, 0])) + 0.2 * rng.normal(size=40)
        parts.append((X[:32], y[:32], X[32:], y[32:]))
    return parts


def two_moons(seed: int, *, ordered: bool, tolerance: float) -> Row:
    """Return log densities of a classifier of two moons, as a stream and of all rows."""
    moons: Any = make_moons(1500, noise=0.25, random_state=seed)
    X, y = moons
    X, y, test = X[:1000], y[:1000], (X[1000:], y[1000:])
    order = np.argsort(X[:, 0]) if ordered else np.arange(1000)
    model = SparseGPClassifier("rbf", tolerance=tolerance, random_state=0)
    start = time.process_time()
    waiting: Array = order[:0]
    for rows in np.array_split(order, BATCHES):
        waiting = np.concatenate([waiting, rows])
        # The first batch needs both classes.
        if hasattr(model, "posterior_") or len(np.unique(y[waiting])) == 2:
            model.partial_fit(X[waiting], y[waiting])
            waiting = order[:0]
    seconds = time.process_time() - start
    whole = SparseGPClassifier("rbf", tolerance=tolerance, random_state=0).fit(X, y)
    return {
        "batches": model.n_batches_,
        "points": model.n_inducing_,
        "log_density": round(float(model.log_density(*test).mean()), 5),
        "cpu_s": round(seconds, 3),
        "all_points": whole.n_inducing_,
        "all_log_density": round(float(whole.log_density(*test).mean()), 5),
    }


def long_stream(batches: int, seconds: float, path: Path, runs: Runs) -> None:
    """Learn small batches with repeated inputs and changing noise, for some seconds."""
    start = time.process_time()
    model = load(path) if path.exists() else SparseGPRegressor("rbf", random_state=0)
    done = model.n_batches_ if path.exists() else 0
    test_rng = np.random.default_rng(10**6)
    X_test = test_rng.uniform(0, 10, (500, 1))
    clean = np.sin(2 * X_test[:, 0])
    while done < batches and time.process_time() - start < seconds:
        before = time.process_time()
        for number in range(done, min(done + 100, batches)):
            rng = np.random.default_rng(number)
            # Of 1,000 different inputs, so that most repeat; the noise changes with the batch.
            X = rng.integers(0, 1000, (40 if number == 0 else 5, 1)) / 100
            noise = (0.05, 0.2, 0.5)[number % 3]
            model.partial_fit(X, np.sin(2 * X[:, 0]) + noise * rng.normal(size=len(X)))
        block = min(100, batches - done)
        done += block
        runs.add(
            {
                "part": "long",
                "batch": done,
                "points": model.n_inducing_,
                "rmse": round(float(np.sqrt(np.mean((model.predict(X_test) - clean) ** 2))), 5),
                "noise_sd": round(float(model.noise_[0] ** 0.5), 5),
                "elbo_gap": round(model.elbo_gap_, 6),
                "cpu_s_per_batch": round((time.process_time() - before) / block, 5),
                "peak_MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            }
        )
        model.save(path)


def report() -> None:
    """Print the tables of all results."""
    rows = [json.loads(line) for p in sorted(FOLDER.glob("*.jsonl")) for line in p.open()]
    tables = [r for r in rows if r.get("part") in ("uci", "iid", "away")]
    lines = []
    for key in sorted({(r["part"], r.get("table", ""), r["tolerance"]) for r in tables}):
        own = [r for r in tables if (r["part"], r.get("table", ""), r["tolerance"]) == key]
        for method in METHODS:
            last: dict[int, Row] = {}
            first: dict[int, list[Row]] = {}
            for r in (r for r in own if r["method"] == method):
                last[r["seed"]] = r
                first.setdefault(r["seed"], []).append(r)
            if last:
                change = [
                    h[-1].get("first_batch", 0) - h[0].get("first_batch", 0) for h in first.values()
                ]
                peak = [max(r["points"] for r in h) for h in first.values()]
                lines.append(
                    [
                        *key,
                        method,
                        len(last),
                        round(mean(r["points"] for r in last.values())),
                        round(mean(peak)),
                        f"{-mean(r['log_density'] for r in last.values()):.3f}",
                        f"{mean(change):+.3f}",
                        f"{mean(r['cpu_s'] for r in last.values()):.1f}",
                    ]
                )
    header = ("part", "table", "tolerance", "method", "seeds", "points", "most", "nlpd")
    print(table([*header, "first_batch", "cpu_s"], lines))
    for r in rows:
        if r.get("part") == "moons":
            print({k: v for k, v in r.items() if k != "part"})
    for r in [r for r in rows if r.get("part") == "long"]:
        if r["batch"] % 1000 == 0 or r["batch"] == 100:
            print({k: v for k, v in r.items() if k != "part"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", choices=["uci", "iid", "away", "moons", "long"])
    parser.add_argument("--tables", nargs="+", default=TABLES)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--tolerance", type=float, default=0.01)
    parser.add_argument("--batches", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=280)
    parser.add_argument("--model", type=Path, default=FOLDER / "long.winnow")
    parser.add_argument("--report", action="store_true")
    given = parser.parse_args()
    if given.report or given.part is None:
        report()
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    if given.part == "long":
        runs = Runs(FOLDER / "long.jsonl", replace=not given.model.exists())
        long_stream(given.batches, given.seconds, given.model, runs)
        return
    for seed in given.seeds:
        if given.part == "moons":
            runs = Runs(FOLDER / f"moons-{seed}.jsonl", replace=True)
            for ordered in (True, False):
                row = two_moons(seed, ordered=ordered, tolerance=given.tolerance)
                runs.add({"part": "moons", "seed": seed, "sorted": ordered, **row})
            continue
        for name in given.tables if given.part == "uci" else ("",):
            parts = parts_of(name, seed) if name else synthetic(given.part, seed)
            for method in given.methods:
                file = "-".join(filter(None, (given.part, name, method.replace(" ", "_"))))
                runs = Runs(FOLDER / f"{file}-{given.tolerance:g}-{seed}.jsonl", replace=True)
                for row in stream_rows(method, parts, tolerance=given.tolerance):
                    key = {"part": given.part, "table": name, "method": method, "seed": seed}
                    runs.add({**key, "tolerance": given.tolerance, **row})


if __name__ == "__main__":
    main()
