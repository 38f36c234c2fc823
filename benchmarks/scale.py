"""Seconds and memory against rows, points and processes.

    python benchmarks/scale.py [--what rows points ranks minibatches fits] [--rows 10000 ...] ...
    python benchmarks/scale.py --device cuda --what gpu
    python benchmarks/scale.py --report

rows: the bound and its gradient from a Parquet file of 1e4 to 1e7 rows, 128 points, one thread,
and a choice of points from the statistics. points: the same of 1e5 rows against the number of
points. ranks: the same in one and in two processes of one thread each, started by torchrun.
minibatches: steps of layers and of classes in as many processes. fits: whole fits with selection
from Parquet files, 256 candidates, two threads. gpu: a million rows and 1024 candidates, in double
and mixed precision in turn, fits from three seeds; the paper's protein table; and the share of the
device's float64 peak that the passes reach.

Each measurement is made in a process of its own, of which the kernel says how much memory it had
at most, and how much once everything was imported. Processes share compiled bytecode, as those of
an installation do: modules that are imported at first use are not compiled while a clock runs. Rows
go to benchmarks/results/scale; `--report` prints and draws from those files alone.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from records import Records, Row
from scale_measures import MEASURES, peak_mib
from scale_report import report
from scale_rows import written
from winnowgp.data.distributed import ProcessGroup
from winnowgp.errors import DataNotFoundError

ROWS = [10_000, 100_000, 1_000_000, 10_000_000]
POINTS = [32, 64, 128, 256, 512]
BATCHES = [1024, 4096, 16_384]
REPEATS = 3
PRECISIONS = ("double", "mixed")


class Tables:
    """Parquet files of so many rows, each made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, rows: int) -> str:
        path = self._folder / f"{rows}.parquet"
        return str(path if path.exists() else written(path, rows))


def measured(kind: str, *, threads: int = 1, process_group: int | None = None, **words: Any) -> Row:
    """What a new process, or several of them, found."""
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(process_group),
    ]
    command = [sys.executable, *([] if process_group is None else torchrun), __file__]
    done = subprocess.run(
        [*command, "--measure", json.dumps({"kind": kind, **words})],
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{kind} of {words} failed")
    row = {"threads": threads, **json.loads(done.stdout.splitlines()[-1])}
    print({name: value for name, value in row.items() if name != "versions"}, flush=True)
    return row


def measure(task: Row) -> None:
    """In the new process."""
    import pyarrow.parquet as _  # noqa: F401  (memory of imports is not that of the work)

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    imported = peak_mib()
    try:
        row = MEASURES[task.pop("kind")](**task)
    except DataNotFoundError as error:
        row = {"skipped": str(error)}
    if ProcessGroup.initialise().is_first:
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        print(json.dumps({**row, "imports_mib": imported, "gpu": name}), flush=True)


def rows(tables: Tables, said: argparse.Namespace) -> None:
    """Against N."""
    records = Records("scale/rows")
    for count in said.rows or ROWS:
        words = {"rows": count, "points": 128, "repeats": said.repeats, "path": tables(count)}
        records.add(**measured("evaluation", **words))


def points(tables: Tables, said: argparse.Namespace) -> None:
    """Against K."""
    records = Records("scale/points")
    count = max(said.rows or [100_000])
    for K in said.points or POINTS:
        words = {"rows": count, "points": K, "repeats": said.repeats, "path": tables(count)}
        records.add(**measured("evaluation", **words))


def process_group(tables: Tables, said: argparse.Namespace) -> None:
    """Against processes; one and two in turn, so that a busy machine is busy for both."""
    records = Records("scale/ranks")
    count = max(said.rows or [1_000_000])
    for _ in range(said.repeats):
        for of in (1, 2):
            words = {"rows": count, "points": 128, "repeats": 2, "path": tables(count)}
            records.add(**measured("evaluation", process_group=of, **words))


def minibatches(_tables: Tables, said: argparse.Namespace) -> None:
    """Steps of minibatches against processes, in turn too."""
    records = Records("scale/minibatches")
    count = max(said.rows or [20_000])
    for batch in BATCHES:
        for _ in range(said.repeats):
            for of in (1, 2):
                words = {"rows": count, "batch": batch, "steps": 30}
                records.add(**measured("minibatches", process_group=of, **words))


def fits(tables: Tables, said: argparse.Namespace) -> None:
    """Whole fits on two cores."""
    records = Records("scale/fits")
    K = max(said.points or [256])
    for count in said.rows or ROWS[:3]:
        words = {"rows": count, "points": K, "path": tables(count)}
        records.add(**measured("fit", threads=2, **words))


def gpu(tables: Tables, said: argparse.Namespace) -> None:
    """A million rows on one device."""
    records, threads = Records("scale/gpu"), os.cpu_count() or 1
    count, K = max(said.rows or [1_000_000]), max(said.points or [1024])

    def add(kind: str, **words: Any) -> None:
        found = measured(kind, threads=threads, device=said.device, **words)
        records.add(kind=kind, **found)

    size = {"rows": count, "points": K}
    add("arithmetic", **size, size=16_384 if said.device != "cpu" else 2048)
    for points in (K // 4, K // 2, K):
        for precision in PRECISIONS:
            words = {"rows": count, "points": points, "precision": precision}
            add("evaluation", **words, repeats=said.repeats)
    for seed in range(said.repeats):
        for precision in PRECISIONS:
            add("fit", **size, precision=precision, seed=seed)
    for fewer in (count // 10, count):
        words = {"rows": fewer, "points": K, "repeats": said.repeats, "path": tables(fewer)}
        add("evaluation", **words)
    add("protein", rows=45_730 if count >= 45_730 else count)


PARTS: dict[str, Callable[[Tables, argparse.Namespace], None]] = {
    "rows": rows,
    "points": points,
    "ranks": process_group,
    "minibatches": minibatches,
    "fits": fits,
    "gpu": gpu,
}


def main() -> None:
    """Words typed by a person to calls of the parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--what", nargs="+", choices=PARTS, default=["rows", "points", "ranks"])
    parser.add_argument("--rows", nargs="+", type=int, help="those of each part if not given")
    parser.add_argument("--points", nargs="+", type=int, help="those of each part if not given")
    parser.add_argument(
        "--repeats",
        type=int,
        default=REPEATS,
        help="of which the least counts; seeds of fits on a GPU",
    )
    parser.add_argument("--device", default="cpu", help="of the part gpu")
    parser.add_argument("--tables", type=Path, help="a folder that keeps the Parquet files")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--measure", type=json.loads, help=argparse.SUPPRESS)
    said = parser.parse_args()
    if said.measure is not None:
        return measure(said.measure)
    if not said.report:
        with tempfile.TemporaryDirectory() as name:
            os.environ |= {"PYTHONPYCACHEPREFIX": name, "PYTHONDONTWRITEBYTECODE": ""}
            # This one compiles what the others import.
            measured("evaluation", rows=1000, points=2, repeats=1)
            for part in said.what:
                PARTS[part](Tables(said.tables or Path(name)), said)
    report()
    if said.report:
        from scale_picture import draw  # matplotlib is not for processes that are measured

        draw()
    return None


if __name__ == "__main__":
    main()
