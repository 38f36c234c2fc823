"""Streams: `partial_fit` against other selectors, against one fit of all rows, and for long.

    python benchmarks/stream.py [--only uci moons …] [--seeds 2 3 4] [--jobs 8]
    python benchmarks/stream.py --only uci --tolerance 0.05 --tables concrete --methods partial_fit
    python benchmarks/stream.py --only magnetometer --device cuda --methods partial_fit VIPS
    python benchmarks/stream.py --report

`uci` follows Pescador-Barrios et al. (2025): columns standardised over all rows, rows sorted by the
first column, 20 batches, the rows of each shuffled and split 80/20; the log density is that of the
test rows of all batches so far. `magnetometer` has path 3 in order of time, predicted on the other
paths; then all paths one after another. `iid` and `away` are synthetic; in `away` the inputs move
away and return. `moons` are two classes, sorted and shuffled. `long` has 10,000 small batches; it
saves the model and goes on from it when it is called again. All methods have an RBF kernel with one
lengthscale per column; `all rows` is one fit with the default tolerance. Rows are written to
benchmarks/results/stream after each batch. `--device cuda` computes updates on a GPU; seconds are
then those of the clock.
"""

import argparse
import json
import multiprocessing
import resource
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch
from gpytorch.kernels import Kernel, RBFKernel, ScaleKernel

from measure import RESULTS, Row, mean, table
from stream_methods import ConditionalVariance, Oips, Selector, Vips
from stream_problems import TABLES, Array, problem
from winnowgp import SparseGPClassifier, SparseGPRegressor, load
from winnowgp.data import Dataset
from winnowgp.errors import FitWarning
from winnowgp.experiments.runs import Runs

SELECTORS: dict[str, Callable[[Kernel], Selector]] = {
    "VIPS": Vips,
    "VIPS, early stopping": lambda kernel: Vips(kernel, converge=False),
    "OIPS": Oips,
    "conditional variance": ConditionalVariance,
}
OURS, BATCH_FIT = "partial_fit", "all rows"
METHODS = (OURS, *SELECTORS, BATCH_FIT)
PARTS = {
    "uci": TABLES,
    "magnetometer": ("path 3", "all paths"),
    "iid": ("",),
    "away": ("",),
    "moons": ("sorted", "shuffled"),
    "long": ("",),
}
FOLDER = RESULTS / "stream"


@dataclass(frozen=True, slots=True)
class Task:
    """One method on one stream."""

    part: str
    table: str
    method: str
    seed: int
    tolerance: float
    device: str = "cpu"

    @property
    def path(self) -> Path:
        """File of the results."""
        names = filter(None, (self.part, self.table, self.method))
        name = "-".join(names).replace(",", "").replace(" ", "_")
        return FOLDER / f"{name}-{self.tolerance:g}-{self.seed}.jsonl"

    @property
    def key(self) -> Row:
        """Columns that say which task a row is of."""
        return {
            "part": self.part,
            "table": self.table,
            "method": self.method,
            "seed": self.seed,
            "tolerance": self.tolerance,
            "device": self.device,
        }


class Ours:
    """`partial_fit` of the regressor, or of the classifier for two moons."""

    def __init__(self, task: Task) -> None:
        kind = SparseGPClassifier if task.part == "moons" else SparseGPRegressor
        self.model = kind("rbf", random_state=0, device=task.device)
        if task.method == OURS:
            self.model.set_params(tolerance=task.tolerance)

    def learn(self, X: Array, y: Array) -> None:
        self.model.partial_fit(X, y)

    @property
    def points(self) -> int:
        return self.model.n_inducing_

    def log_density(self, X: Array, y: Array) -> float:
        return float(self.model.log_density(X, y).mean())


class Whole(Ours):
    """One fit of all rows, with the default tolerance."""

    def learn(self, X: Array, y: Array) -> None:
        self.model.fit(X, y)


class Other:
    """A selector of `stream_methods`."""

    def __init__(self, name: str, D: int, device: str) -> None:
        kernel = ScaleKernel(RBFKernel(ard_num_dims=D)).double()
        kernel.initialize(**{"base_kernel.lengthscale": D**0.5})
        self.device = torch.device(device)
        self.selector = SELECTORS[name](kernel.to(self.device))

    def learn(self, X: Array, y: Array) -> None:
        rows = Dataset.of(torch.tensor(X), torch.tensor(y))
        self.selector.learn(rows.to(self.device))

    @property
    def points(self) -> int:
        assert self.selector.posterior is not None
        return self.selector.posterior.M

    def log_density(self, X: Array, y: Array) -> float:
        assert self.selector.posterior is not None
        rows = torch.tensor(X).to(self.device), torch.tensor(y)[:, None].to(self.device)
        return self.selector.posterior.log_density(*rows).mean().item()


def stream_rows(task: Task) -> Iterator[Row]:
    """Yield the results of a method after each batch; those of all rows at once at the end."""
    stream = problem(task.part, task.table, task.seed)
    batches, tests = stream.batches, stream.tests
    if task.method == BATCH_FIT:
        learner, batches, tests = Whole(task), [stream.all], tests[-1:]
    elif task.method == OURS:
        learner = Ours(task)
    else:
        learner = Other(task.method, batches[0][0].shape[1], task.device)
    clock = time.process_time if task.device == "cpu" else time.perf_counter
    seconds = 0.0
    for number, (batch, test) in enumerate(zip(batches, tests, strict=True), 1):
        start = clock()
        learner.learn(*batch)
        seconds += clock() - start
        yield {
            "batch": number if len(batches) > 1 else len(stream.batches),
            "points": learner.points,
            "log_density": round(learner.log_density(*test), 5),
            "first_batch": round(learner.log_density(*stream.first), 5),
            "cpu_s": round(seconds, 3),
        }


def long_stream(batches: int, seconds: float, path: Path) -> None:
    """Learn small batches with repeated inputs and changing noise, for some seconds."""
    runs = Runs(FOLDER / "long.jsonl", replace=not path.exists())
    start = time.process_time()
    model = load(path) if path.exists() else SparseGPRegressor("rbf", random_state=0)
    done = model.n_batches_ if path.exists() else 0
    test_rng = np.random.default_rng(10**6)
    X_test = test_rng.uniform(0, 10, (500, 1))
    clean = np.sin(2 * X_test[:, 0])
    while done < batches and time.process_time() - start < seconds:
        before = time.process_time()
        block = min(100, batches - done)
        for number in range(done, done + block):
            rng = np.random.default_rng(number)
            # Of 1,000 different inputs, so that most repeat; the noise changes with the batch.
            X = rng.integers(0, 1000, (40 if number == 0 else 5, 1)) / 100
            noise = (0.05, 0.2, 0.5)[number % 3]
            model.partial_fit(X, np.sin(2 * X[:, 0]) + noise * rng.normal(size=len(X)))
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


def run(task: Task) -> str:
    """Run a task in one thread and write its results; return its name."""
    torch.set_num_threads(1)
    ScaleKernel(RBFKernel())  # PyTorch imports seconds of modules with the first kernel
    runs = Runs(task.path, replace=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FitWarning)
        for row in stream_rows(task):
            runs.add({**task.key, **row})
    return task.path.stem


def tasks_of(given: argparse.Namespace) -> list[Task]:
    """Return the tasks of the command line, those that take longest first."""
    tasks = []
    for part in given.only:
        shown = {"uci": given.tables, "magnetometer": given.magnetometer}.get(part, PARTS[part])
        names = [name for name in PARTS[part] if name in shown]
        # The magnetometer has no seeds, and the other methods no classes.
        seeds = given.seeds[:1] if part == "magnetometer" else given.seeds
        methods = (OURS, BATCH_FIT) if part == "moons" else METHODS
        methods = [method for method in methods if method in given.methods]
        if part != "long":
            tasks += [
                Task(part, name, method, seed, given.tolerance, given.device)
                for name, seed, method in product(names, seeds, methods)
            ]
    slow = ("kin8nm", "path 3", "all paths", "skillcraft")
    return sorted(tasks, key=lambda task: slow.index(task.table) if task.table in slow else 9)


def report() -> None:
    """Print the tables of all results."""
    rows = [json.loads(line) for p in sorted(FOLDER.glob("*.jsonl")) for line in p.open()]
    runs: dict[tuple[str, ...], dict[int, list[Row]]] = {}
    for r in (r for r in rows if "method" in r):
        key = (r["part"], r["table"], f"{r['tolerance']:g}", r["method"])
        runs.setdefault(key, {}).setdefault(r["seed"], []).append(r)
    order = {name: number for number, name in enumerate((*PARTS, *METHODS))}
    lines = []
    for key in sorted(runs, key=lambda k: (order[k[0]], k[1], k[2], order[k[3]])):
        own = list(runs[key].values())
        change = [h[-1]["first_batch"] - h[0]["first_batch"] for h in own]
        lines.append(
            [
                *key,
                len(own),
                min(h[-1]["batch"] for h in own),
                round(mean(h[-1]["points"] for h in own)),
                round(mean(max(r["points"] for r in h) for h in own)),
                f"{-mean(h[-1]['log_density'] for h in own):.3f}",
                f"{mean(change):+.3f}",
                f"{min(change):+.3f}",
                f"{mean(h[-1]['cpu_s'] for h in own):.1f}",
            ]
        )
    header = ("part", "table", "tolerance", "method", "seeds", "batches", "points", "most")
    print(table([*header, "nlpd", "first_batch", "worst", "cpu_s"], lines))
    for path in sorted(FOLDER.glob("long*.jsonl")):
        print(path.name)
        for r in map(json.loads, path.open()):
            if r["batch"] % 1000 == 0 or r["batch"] == 100:
                print({k: v for k, v in r.items() if k not in ("part", "versions")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES)
    paths = PARTS["magnetometer"]
    parser.add_argument("--magnetometer", nargs="+", choices=paths, default=paths)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--tolerance", type=float, default=0.01)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--batches", type=int, default=10_000, help="batches of `long`")
    parser.add_argument("--seconds", type=float, default=280, help="CPU time of `long`")
    parser.add_argument("--model", type=Path, default=FOLDER / "long.winnow")
    parser.add_argument("--report", action="store_true", help="only print the results")
    given = parser.parse_args()
    if not given.report:
        FOLDER.mkdir(parents=True, exist_ok=True)
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(given.jobs, mp_context=spawn) as pool:
            jobs = []
            if "long" in given.only:
                torch.set_num_threads(1)
                jobs.append(pool.submit(long_stream, given.batches, given.seconds, given.model))
            jobs += [pool.submit(run, task) for task in tasks_of(given)]
            for job in as_completed(jobs):
                print("done:", job.result() or "long", flush=True)
    report()


if __name__ == "__main__":
    main()
