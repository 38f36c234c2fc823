"""Fits and loading with a busy process on each core, against a quiet machine.

    python benchmarks/busy.py                # two threads; stop other work first
    python benchmarks/busy.py --report

Each task runs in a process of its own on the first cores, without and with one busy loop pinned to
each of these, in turn and several times; medians are compared. Results are in
benchmarks/results/busy.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch

from measure import Row, grouped, new_results, read_results, table
from winnowgp import SparseGPRegressor, load, save
from winnowgp.data import Dataset
from winnowgp.models import SparseGP

TASKS = ("fit 64", "fit 128", "load 400", "factor 400")
LOOP = "while True: pass"


def task(name: str) -> Row:
    """Run a task and return its seconds."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(6000, 8, dtype=torch.float64, generator=generator)
    y = torch.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2]
    y = y + 0.2 * torch.randn(len(y), dtype=torch.float64, generator=generator)
    what, size = name.split()
    M = int(size)
    with tempfile.TemporaryDirectory() as folder:
        if what == "fit":
            model = SparseGPRegressor(kernel="rbf", max_points=M)

            def work() -> object:
                return model.fit(X.numpy(), y.numpy())
        else:
            kernel = SparseGPRegressor(kernel="rbf", max_points=4).fit(X[:99], y[:99]).kernel_
            sparse = SparseGP(kernel, X[:M], noise=0.1)
            path = save(sparse.posterior(Dataset.of(X, y)), Path(folder) / "posterior.winnow")

            def work() -> object:
                return load(path) if what == "load" else sparse.posterior(Dataset.of(X[:M], y[:M]))

        starts = time.perf_counter(), time.process_time()
        work()
        return {"wall_s": time.perf_counter() - starts[0], "cpu_s": time.process_time() - starts[1]}


@contextmanager
def neighbours(cores: list[int]) -> Iterator[None]:
    """Keep each core busy."""
    loops = []
    try:
        for core in cores:
            loops.append(subprocess.Popen([sys.executable, "-c", LOOP]))
            os.sched_setaffinity(loops[-1].pid, {core})
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run(threads: int, repeats: int) -> None:
    """Run all tasks, quiet and busy in turn."""
    results = new_results("busy/busy")
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.sched_setaffinity(0, cores)
    for name in TASKS:
        for busy in (False, True) * repeats:
            with neighbours(cores if busy else []):
                command = [sys.executable, __file__, "--task", name]
                environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
                output = subprocess.run(
                    command, env=environment, capture_output=True, text=True, check=True
                )
            results.add({"task": name, "busy": busy, "cores": threads, **json.loads(output.stdout)})


def report() -> None:
    """Print seconds and ratios."""
    groups = grouped(read_results("busy/*"), "task", "busy")
    lines = []
    for name in dict.fromkeys(task for task, _ in groups):
        seconds = [
            [median(row[key] for row in groups[name, busy]) for busy in (False, True)]
            for key in ("wall_s", "cpu_s")
        ]
        cells = [f"{value:.3f}" for pair in seconds for value in pair]
        lines.append([name, *cells, *(f"{busy / quiet:.2f}" for quiet, busy in seconds)])
    header = ("task", "wall s", "busy", "CPU s", "busy", "wall ratio", "CPU ratio")
    print(table(header, lines))


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=2, help="number of cores and of threads")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each task")
    parser.add_argument("--task", choices=TASKS, help=argparse.SUPPRESS)
    parser.add_argument("--report", action="store_true", help="print results without measuring")
    arguments = parser.parse_args()
    if arguments.task:
        print(json.dumps(task(arguments.task)))
        return
    if not arguments.report:
        run(arguments.threads, arguments.repeats)
    report()


if __name__ == "__main__":
    main()
