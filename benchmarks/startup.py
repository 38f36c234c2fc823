"""Start-up: seconds of `import winnowgp`, `winnow --help`, `info` and `predict` of one row.

    python benchmarks/startup.py
    python benchmarks/startup.py --report

Each command runs in a new process; the shortest CPU and wall-clock time of several runs, on one
thread. Results are in benchmarks/results/startup.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from measure import new_results, read_results, table
from winnowgp import load, save
from winnowgp.data import Dataset, read_table
from winnowgp.models import SparseGP
from winnowgp.tabular import fit_table

POINTS, INPUTS, REPEATS = 400, 8, 3


def make_files(folder: Path) -> tuple[Path, Path, Path]:
    """Write a table model, a posterior with 400 points, and a table of one row."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(1000, INPUTS))
    y = np.sin(X[:, 0]) + 0.1 * rng.normal(size=len(X))
    names = [f"x{i}" for i in range(INPUTS)]
    rows = folder / "rows.csv"
    np.savetxt(
        rows, np.column_stack([X, y]), delimiter=",", header=",".join([*names, "y"]), comments=""
    )
    one = folder / "one.csv"
    np.savetxt(one, X[:1], delimiter=",", header=",".join(names), comments="")
    model = fit_table(read_table(rows), "y", kernel="rbf", max_points=32)
    table_model = model.save(folder / "table.winnow")
    estimator: Any = model.estimator
    data = Dataset.of(torch.from_numpy(X), torch.from_numpy(y))
    posterior = SparseGP(estimator.kernel_, data.X[:POINTS], noise=0.1).posterior(data)
    return table_model, save(posterior, folder / "posterior.winnow"), one


def run() -> None:
    """Measure all commands one after another, several times."""
    results = new_results("startup/startup")
    with tempfile.TemporaryDirectory() as name:
        model, posterior, one = make_files(Path(name))
        winnow = [sys.executable, "-m", "winnowgp"]
        commands = {
            "python": [sys.executable, "-c", "pass"],
            "import torch": [sys.executable, "-c", "import torch"],
            "import winnowgp": [sys.executable, "-c", "import winnowgp"],
            "from winnowgp import SparseGPRegressor": [
                sys.executable,
                "-c",
                "from winnowgp import SparseGPRegressor",
            ],
            "winnow --help": [*winnow, "--help"],
            "winnow info": [*winnow, "info", str(model)],
            "winnow predict, one row": [*winnow, "predict", str(model), str(one)],
        }
        times: dict[str, list[tuple[float, float]]] = {what: [] for what in commands}
        for _ in range(REPEATS):
            for what, command in commands.items():
                times[what].append(_seconds(command))
        for what, measured in times.items():
            cpu, wall = (min(column) for column in zip(*measured, strict=True))
            results.add({"what": what, "cpu_s": cpu, "wall_s": wall})
        loads = []
        for _ in range(REPEATS):
            starts = time.process_time(), time.perf_counter()
            load(posterior)
            loads.append((time.process_time() - starts[0], time.perf_counter() - starts[1]))
        cpu, wall = (min(column) for column in zip(*loads, strict=True))
        results.add({"what": f"load {POINTS} points, after imports", "cpu_s": cpu, "wall_s": wall})


def _seconds(command: list[str]) -> tuple[float, float]:
    """Return CPU and wall-clock seconds of a process."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - start
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def report() -> None:
    """Print CPU and wall-clock seconds, and CPU seconds above `import torch`."""
    rows = read_results("startup/*")
    torch_seconds = next(row["cpu_s"] for row in rows if row["what"] == "import torch")
    lines = [
        (r["what"], f"{r['cpu_s']:.2f}", f"{r['wall_s']:.2f}", f"{r['cpu_s'] - torch_seconds:+.2f}")
        for r in rows
    ]
    print(table(("what", "CPU s", "wall s", "CPU s over torch"), lines))


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--report", action="store_true", help="print results without measuring")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.report:
        run()
    report()


if __name__ == "__main__":
    main()
