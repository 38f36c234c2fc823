"""Six tables, and what their owner could use: density, calibration, CPU seconds, memory.

    make peers                            # install the peers, run what has no row, write the pages
    python benchmarks/libraries.py --tables concrete --methods winnowgp catboost
    python benchmarks/libraries.py --methods winnowgp --again    # ours, of another source
    python benchmarks/libraries.py --tables protein --methods winnowgp-gpu
    python benchmarks/libraries.py --page     # write tables and pictures, run nothing

Every method has the same splits, 90 % of the rows of a seeded permutation, standardised by the
training rows, and one thread; `peers/worker.py` has its settings and runs in a virtual environment
of its own. A fit that passes `--limit` CPU seconds is ended, and its row says so; one that is
expected to take longer, by fits of the same method to other tables, is not started, and one of more
than five minutes is fitted to one split (`libraries_plan.planned_splits`). Rows that exist are not
made again, unless they failed with a lower limit. A later row of the same fit replaces an earlier
one. Seconds of different machines are not comparable: each row names its processor, and the page
marks those of another processor than most rows have.
"""

import argparse
import json
import os
import platform
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from calibration import LEVELS, calibration
from libraries_page import write_pages
from libraries_plan import (
    ENVIRONMENTS,
    FILE,
    GPU,
    LIMIT,
    UNITS,
    Case,
    cases,
    is_final,
    is_planned,
    read_rows,
)
from measure import Row, grouped
from right_number_problems import TABLES, split_table
from winnowgp.experiments.runs import Runs

PEERS = Path(__file__).parent / "peers"


def run(name: str, seed: int, method: str, limit: int, python: str | None) -> Row | None:
    """Return the row of one fit; None if the method is not installed.

    Args:
        limit: CPU seconds after which the fit is ended; of no effect on a GPU.
        python: interpreter of all methods; None for their own environments.
    """
    device = "cuda" if method.endswith(GPU) else "cpu"
    environment = ENVIRONMENTS[method]
    if python is None:
        own = PEERS / f".venv-{environment}" / "bin" / "python"
        python = sys.executable if environment is None else str(own)
        if not Path(python).exists():
            print(f"{method}: {own} does not exist; `make peers` installs it.", file=sys.stderr)
            return None
    problem = split_table(name, seed=seed).standardised()
    case: Row = {"table": name, "seed": seed, "method": method, "N": problem.N}
    case |= {"test": len(problem.y_test), "limit": limit, "processor": processor()}
    base, _, size = method.rpartition("-")
    options = ["--size", size] if size.isdigit() else []
    worked = base if options or device == "cuda" else method
    with TemporaryDirectory() as folder:
        split, predictions = Path(folder) / "split.npz", Path(folder) / "predictions.npz"
        np.savez(
            split,
            X=problem.X,
            y=problem.y,
            X_test=problem.X_test,
            y_test=problem.y_test,
            levels=np.array(LEVELS),
        )
        worker = [python, PEERS / "worker.py", worked, split, predictions]
        done = subprocess.run(
            [*map(str, worker), "--seed", str(seed), "--device", device, *options],
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=None if device == "cuda" else lambda: _limit_cpu(limit),
            env={**os.environ, "PYTHONWARNINGS": "ignore"}
            | ({"CUDA_VISIBLE_DEVICES": "0"} if device == "cuda" else {}),
        )
        if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            return case | {"error": f"more than {limit} CPU s, or killed"}
        if done.returncode < 0:
            print(f"{method} on {name}: ended by signal {-done.returncode}", file=sys.stderr)
            return None
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            if "No module named" in last:
                print(f"{method}: {last}", file=sys.stderr)
                return None
            return case | {"error": last[:200]}
        found = dict(np.load(predictions))
    return case | json.loads(str(found.pop("row"))) | scores(found, problem.y_test)


def run_planned(
    work: Callable[..., Row | None],
    missing: Sequence[Case],
    rows: Sequence[Row],
    *,
    planned: Callable[[Case, Sequence[Row]], bool],
    jobs: int,
) -> Iterator[Row]:
    """Make fits in so many processes, and yield rows as the fits end.

    Whether a fit is planned is decided when it would start, by the rows that exist by then: what
    fits of a method cost is not known on a fresh machine.

    Args:
        work: returns the row of a case, or None.
        missing: cases that may be made, in their order.
        rows: rows that exist.
        planned: whether a case is made, given the rows.
        jobs: number of processes.
    """
    rows, waiting = list(rows), list(missing)
    running: set[Future[Row | None]] = set()
    with ProcessPoolExecutor(jobs) as pool:
        while waiting or running:
            while waiting and len(running) < jobs:
                case = waiting.pop(0)
                if planned(case, rows):
                    running.add(pool.submit(work, *case))
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                if (row := future.result()) is not None:
                    rows.append(row)
                    yield row


def runnable(methods: Sequence[str]) -> list[str]:
    """Return the methods that can run here: those on a GPU are left out where there is none."""
    if torch.cuda.is_available():
        return list(methods)
    for method in methods:
        if method.endswith(GPU):
            print(f"{method}: there is no GPU.", file=sys.stderr)
    return [method for method in methods if not method.endswith(GPU)]


def _limit_cpu(seconds: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))


def scores(predictions: dict[str, np.ndarray], y: np.ndarray) -> Row:
    """Return log density, RMSE and calibration, in standard deviations of the training targets."""
    row: Row = {"rmse": float(np.sqrt(np.mean((predictions["mean"] - y) ** 2)))}
    if "log_density" in predictions:
        row["log_density"] = float(predictions["log_density"].mean())
    return row | calibration(predictions["quantiles"], y)


def processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), "")


def main() -> None:
    """Parse the command line; run fits that have no row yet, or write the pages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tables", nargs="+", default=list(TABLES), choices=list(TABLES))
    parser.add_argument(
        "--methods", nargs="+", default=list(ENVIRONMENTS), choices=list(ENVIRONMENTS)
    )
    parser.add_argument("--seeds", type=int, nargs="+", help="of the splits; all by default")
    parser.add_argument("--limit", type=int, default=LIMIT, help="CPU seconds of a fit at most")
    parser.add_argument("--jobs", type=int, default=1, help="fits that run at the same time")
    parser.add_argument("--python", help="interpreter that has all methods")
    parser.add_argument("--again", action="store_true", help="repeat ours of another source")
    parser.add_argument("--page", action="store_true", help="write the pages, run nothing")
    arguments = parser.parse_args()
    rows = read_rows()
    if arguments.page:
        write_pages(rows)
        return
    options = {"limit": arguments.limit, "again": arguments.again}
    done = set(grouped((row for row in rows if is_final(row, **options)), *UNITS))
    methods = runnable(arguments.methods)
    missing = [case for case in cases(arguments.tables, methods) if case not in done]
    work = partial(run, limit=arguments.limit, python=arguments.python)
    runs = Runs(FILE)
    planned = partial(is_planned, seeds=arguments.seeds, limit=arguments.limit)
    for row in run_planned(work, missing, rows, planned=planned, jobs=arguments.jobs):
        runs.add(row)
        shown = (row.get(name) for name in ("log_density", "cpu_s", "error"))
        print(*(row[unit] for unit in UNITS), *shown, flush=True)


if __name__ == "__main__":
    main()
