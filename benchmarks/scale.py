"""Time and memory against rows, inducing points and processes.

    python benchmarks/scale.py [--what rows points ranks minibatches fits] [--rows 10000 ...] ...
    python benchmarks/scale.py --device cuda --what gpu arithmetic
    python benchmarks/scale.py --report

- rows: the bound and its gradient from a Parquet file of 1e3 to 1e7 rows, 128 inducing points, one
  thread, and a selection from the statistics.
- points: the same for 1e4 rows against the number of inducing points.
- columns: the same for 1e4 rows against the number of inputs.
- kernels: the same for 1e4 rows with other kernels, relative to RBF (1e5 rows on a GPU).
- ranks: the same in one and in two processes of one thread each, started by torchrun.
- minibatches: training steps of a deep GP and of a classifier in as many processes.
- fits: whole fits with selection from Parquet files, 256 candidates, two threads.
- gpu: a million rows and 1024 candidates in double and mixed precision, fits with three seeds, and
  the paper's protein data.
- arithmetic: the share of a device's float64 peak that the passes reach.

The data are synthetic: nine inputs, of which five determine the target. Each measurement has a
process of its own, whose peak memory is read from the operating system, also after the imports.
Processes share compiled bytecode, so that no module is compiled while time is measured. Results
are in benchmarks/results/scale; `--report` prints and draws from those files alone.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.means import ConstantMean

from measure import Row, Seconds, new_results, timed
from scale_problems import INPUTS, Tables, gp, in_memory, open_table
from winnowgp import DeepGPRegressor, SparseGPClassifier, SparseGPRegressor
from winnowgp.data import Dataset, Source, shard, standardise
from winnowgp.data.catalogue import load_table
from winnowgp.data.distributed import ProcessGroup
from winnowgp.errors import DataNotFoundError
from winnowgp.models import SparseGP
from winnowgp.selection import elimination_frontier
from winnowgp.training import FastSchedule, fit

ROWS = [1000, 10_000, 100_000, 1_000_000, 10_000_000]
POINTS = [32, 64, 128, 256, 512, 1024, 2048, 4096]
INPUT_COLUMNS = [2, 5, 10, 25, 50, 100]
KERNELS = ["rbf", "matern12", "matern32", "matern52", "rbf + linear", "rbf[:4] * matern32[4:]"]
BATCHES = [1024, 4096, 16_384]
REPEATS = 3
PRECISIONS = ("double", "mixed")


def peak_mib() -> float:
    """Return the peak memory of this process, as Linux reports it.

    Not `ru_maxrss`, which starts at the memory of the parent process.
    """
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text("utf-8"))
    assert match is not None
    return round(int(match.group(1)) / 1024, 1)


def gpu_mib() -> float:
    """Return the peak memory of tensors on the GPU."""
    return round(torch.cuda.max_memory_allocated() / 2**20, 1) if torch.cuda.is_available() else 0.0


def synchronised(work: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that also waits until the GPU has finished."""

    def run() -> Any:
        result = work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return result

    return run


def shortest(work: Callable[[], object], repeats: int) -> Seconds:
    """Return the shortest of several times, since other processes can only make them longer."""
    times = [timed(synchronised(work))[1] for _ in range(repeats)]
    return Seconds(min(t.wall for t in times), min(t.cpu for t in times))


def evaluation(
    *,
    rows: int,
    points: int,
    repeats: int,
    path: str | None = None,
    device: str = "cpu",
    precision: str = "double",
    inputs: int = INPUTS,
    kernel: str = "rbf",
) -> Row:
    """Time the bound and its gradient, the pass for the statistics, and a selection from them."""
    source = open_table(path, rows, device, inputs)
    together = ProcessGroup.initialise()
    if torch.distributed.is_torchelastic_launched():
        source = shard(source)
    model = gp(source, points, kernel=kernel, device=device, precision=precision)
    bound, values = model.chunked_bound(source), []

    def evaluate() -> None:
        model.zero_grad()
        value = bound()
        value.backward()
        values.append(value.item())

    processes = together.world_size
    row: Row = {"rows": rows, "points": points, "precision": precision, "ranks": processes}
    row |= {"inputs": source.D, "kernel": kernel}
    row |= {"source": "memory" if path is None else "parquet", "first_wall_s": first(evaluate)}
    row |= shortest(evaluate, repeats).row()
    row |= {"bound": values[-1], "peak_mib": peak_mib(), "gpu_mib": gpu_mib()}
    row |= shortest(lambda: model.moments(source), repeats).row("statistics_")
    statistics = model.subset_statistics(source)
    few = points <= 512
    row |= shortest(lambda: elimination_frontier(statistics), 5 if few else 1).row("selection_")
    mask = torch.arange(points, device=device) % 2 == 0
    row |= shortest(lambda: statistics.marginal_gains(mask), 20 if few else 2).row("flips_")
    return row


def first(work: Callable[[], object]) -> float:
    """Return seconds of the first run, which also initialises libraries and devices."""
    return round(timed(synchronised(work))[1].wall, 4)


def arithmetic(*, rows: int, points: int, size: int, device: str) -> Row:
    """Measure the share of the device's float64 peak that the passes reach.

    The peak is that of a product of two large matrices in the same process. Counted are the useful
    multiplications and additions of N rows, K points and F = 2D + 1 features: for the statistics
    2NKF (exponents), NK² (a triangular solve) and NK² (half of a symmetric product); for the bound
    and its gradient these, and 2NK² (the cotangent of K_uf) and 2NKF (its pull-back). Exponentials,
    and products of panels above a diagonal, are not counted.
    """
    source = in_memory(rows, torch.device(device))
    rates = {}
    for dtype in (torch.float64, torch.float32):
        A = torch.randn(size, size, dtype=dtype, device=device)
        out = torch.empty_like(A)
        torch.mm(A, A, out=out)
        rates[dtype] = 2 * size**3 / shortest(lambda a=A, o=out: torch.mm(a, a, out=o), 5).wall
        del A, out
    peak = rates[torch.float64]
    row: Row = {"rows": rows, "points": points, "product": size}
    row |= {"peak_tflops": round(peak / 1e12, 3)}
    row |= {"single_tflops": round(rates[torch.float32] / 1e12, 3)}
    features = 2 * rows * points * (2 * INPUTS + 1)
    useful = {"statistics": features + 2 * rows * points**2}
    useful["gradient"] = 2 * features + 4 * rows * points**2
    for precision in ("double", "mixed"):
        model = gp(source, points, device=device, precision=precision)
        bound = model.chunked_bound(source)
        works: dict[str, Callable[[], object]] = {"gradient": lambda b=bound: b().backward()}
        if precision == "double":
            works["statistics"] = lambda m=model: m.moments(source)
        for name, work in works.items():
            work()
            wall = shortest(work, 3).wall
            row[f"{precision}_{name}_wall_s"] = round(wall, 4)
            row[f"{precision}_{name}_share"] = round(useful[name] / wall / peak, 3)
    return row


def whole_fit(
    *,
    rows: int,
    points: int,
    path: str | None = None,
    device: str = "cpu",
    precision: str = "double",
    seed: int = 0,
) -> Row:
    """Time a fit with selection; standardising and opening the rows are timed separately.

    Opening includes the start of a GPU and the transfer of the rows; files are written before. The
    report adds the time of standardising to that of the fit.
    """
    start = time.perf_counter()
    source = open_table(path, rows, device)
    opened = time.perf_counter()
    data = standardise(source)
    empty = torch.zeros(0, INPUTS, dtype=torch.float64, device=device)
    kernel = ScaleKernel(RBFKernel(ard_num_dims=INPUTS))
    model = SparseGP(kernel, empty, mean=ConstantMean(), noise=0.1, precision=precision)
    schedule = FastSchedule(n_candidates=points)
    generator = torch.Generator(device).manual_seed(seed)
    work = synchronised(lambda: fit(model, data, schedule=schedule, generator=generator))
    fitted, seconds = timed(work)
    return {
        "rows": rows,
        "points": points,
        "precision": precision,
        "seed": seed,
        "source": "memory" if path is None else "parquet",
        "made_s": round(opened - start, 2),
        "standardised_s": round(time.perf_counter() - opened - seconds.wall, 2),
        **seconds.row(),
        "kept": fitted.posterior.M,
        "bound": fitted.elbo,
        "own_bound": own_bound(fitted.model, data, precision),
        "double_bound": own_bound(fitted.model, data, "double"),
        "given_up": fitted.elbo_gap / rows,
        "peak_mib": peak_mib(),
        "gpu_mib": gpu_mib(),
    }


@torch.no_grad()
def own_bound(model: SparseGP, data: Source, precision: str) -> float:
    """Return the bound that is optimised in a precision, at the parameters of the model."""
    copy = deepcopy(model)
    copy.precision = precision
    return copy.chunked_bound(data)().item()


def protein(*, device: str, rows: int) -> Row:
    """Time the default estimator on the paper's largest data set, twice in one process."""
    data = load_table("protein").dataset().part(slice(rows))
    X, y = data.X.numpy(), data.Y[:, 0].numpy()
    row: Row = {"rows": data.N, "points": 512}
    for name in ("first_", "second_"):
        work = synchronised(lambda: SparseGPRegressor(device=device, random_state=0).fit(X, y))
        fitted, seconds = timed(work)
        row |= seconds.row(name)
    row |= {"kept": fitted.n_inducing_, "bound": fitted.elbo_}
    return {**row, "peak_mib": peak_mib(), "gpu_mib": gpu_mib()}


def minibatches(*, rows: int, batch: int, steps: int) -> Row:
    """Time a step of the paper's schedule for a two-layer GP and for a classifier."""
    data, points = in_memory(rows, torch.device("cpu")), 100
    classes = Dataset.of(data.X, (data.Y > 0).double())
    options: dict[str, Any] = {"schedule": "paper", "alpha": 0.01, "batch_size": batch}
    options |= {"n_candidates": points, "random_state": 0}
    layers = DeepGPRegressor(hidden_mean="identity", epochs=(0, steps, 0, 0), **options)
    seconds = {
        "layers": step_s(layers, shard(data)),
        "classes": step_s(SparseGPClassifier(epochs=(steps, 0, 0), **options), shard(classes)),
    }
    processes = ProcessGroup.initialise().world_size
    row: Row = {"rows": rows, "points": points, "batch": batch, "ranks": processes}
    return {**row, **{f"{name}_wall_s": round(wall, 5) for name, wall in seconds.items()}}


def step_s(estimator: Any, rows: Source) -> float:
    """Return the median time of a step in the first phase of a fit."""
    ends: list[float] = []
    estimator.callbacks = lambda progress: ends.append(time.perf_counter())
    estimator.fit(rows)
    return median(late - early for early, late in pairwise(ends))


MEASUREMENTS: dict[str, Callable[..., Row]] = {
    "evaluation": evaluation,
    "arithmetic": arithmetic,
    "fit": whole_fit,
    "protein": protein,
    "minibatches": minibatches,
}


def measured(kind: str, *, threads: int = 1, processes: int | None = None, **settings: Any) -> Row:
    """Make a measurement in a new process, or in several that torchrun starts."""
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
    ]
    command = [sys.executable, *([] if processes is None else torchrun), __file__]
    done = subprocess.run(
        [*command, "--measure", json.dumps({"kind": kind, **settings})],
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"the measurement {kind} with {settings} failed")
    row = {"threads": threads, **json.loads(done.stdout.splitlines()[-1])}
    print({name: value for name, value in row.items() if name != "versions"}, flush=True)
    return row


def measure(task: Row) -> None:
    """Make a measurement in this process and print it."""
    import pyarrow.parquet as _  # noqa: F401  (its memory counts as memory of imports)

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    imported = peak_mib()
    try:
        row = MEASUREMENTS[task.pop("kind")](**task)
    except DataNotFoundError as error:
        row = {"skipped": str(error)}
    if ProcessGroup.initialise().is_first:
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        print(json.dumps({**row, "imports_mib": imported, "gpu": name}), flush=True)


def run_rows(tables: Tables, options: argparse.Namespace) -> None:
    """Measure against the number of rows."""
    results = new_results("scale/rows")
    for count in options.rows or ROWS:
        settings = {"rows": count, "points": 128, "repeats": options.repeats, "path": tables(count)}
        results.add(measured("evaluation", **settings))


def run_points(tables: Tables, options: argparse.Namespace) -> None:
    """Measure against the number of inducing points."""
    results = new_results("scale/points")
    count = max(options.rows or [10_000])
    for K in options.points or POINTS:
        settings = {"rows": count, "points": K, "repeats": options.repeats, "path": tables(count)}
        results.add(measured("evaluation", **settings))


def run_columns(_tables: Tables, options: argparse.Namespace) -> None:
    """Measure against the number of inputs."""
    results = new_results("scale/columns")
    count, K = max(options.rows or [10_000]), max(options.points or [128])
    for inputs in INPUT_COLUMNS:
        settings = {"rows": count, "points": K, "repeats": options.repeats, "inputs": inputs}
        results.add(measured("evaluation", **settings))


def run_kernels(_tables: Tables, options: argparse.Namespace) -> None:
    """Measure other kernels and RBF in turn, so that a busy machine affects both."""
    on_cpu = options.device == "cpu"
    results = new_results("scale/kernels" if on_cpu else "scale/kernels_gpu")
    count = max(options.rows or [10_000 if on_cpu else 100_000])
    K = max(options.points or [256 if on_cpu else 1024])
    settings = {"rows": count, "points": K, "device": options.device, "repeats": 3}
    for _ in range(options.repeats):
        for kernel in KERNELS:
            results.add(measured("evaluation", kernel=kernel, **settings))


def run_processes(tables: Tables, options: argparse.Namespace) -> None:
    """Measure against processes, one and two in turn, so that a busy machine affects both."""
    results = new_results("scale/ranks")
    count = max(options.rows or [1_000_000])
    for _ in range(options.repeats):
        for processes in (1, 2):
            settings = {"rows": count, "points": 128, "repeats": 2, "path": tables(count)}
            results.add(measured("evaluation", processes=processes, **settings))


def run_minibatches(_tables: Tables, options: argparse.Namespace) -> None:
    """Measure steps of minibatches against processes, one and two in turn."""
    results = new_results("scale/minibatches")
    count = max(options.rows or [20_000])
    for batch in BATCHES:
        for _ in range(options.repeats):
            for processes in (1, 2):
                settings = {"rows": count, "batch": batch, "steps": 30}
                results.add(measured("minibatches", processes=processes, **settings))


def run_fits(tables: Tables, options: argparse.Namespace) -> None:
    """Measure whole fits on two cores."""
    results = new_results("scale/fits")
    K = max(options.points or [256])
    for count in options.rows or ROWS[1:4]:
        settings = {"rows": count, "points": K, "path": tables(count)}
        results.add(measured("fit", threads=2, **settings))


def run_gpu(tables: Tables, options: argparse.Namespace) -> None:
    """Measure a million rows on one device."""
    results, threads = new_results("scale/gpu"), os.cpu_count() or 1
    count, K = max(options.rows or [1_000_000]), max(options.points or [1024])

    def add(kind: str, **settings: Any) -> None:
        row = measured(kind, threads=threads, device=options.device, **settings)
        results.add({"kind": kind, **row})

    size = {"rows": count, "points": K}
    for points in (K // 4, K // 2, K):
        for precision in PRECISIONS:
            settings = {"rows": count, "points": points, "precision": precision}
            add("evaluation", **settings, repeats=options.repeats)
    for seed in range(options.repeats):
        for precision in PRECISIONS:
            add("fit", **size, precision=precision, seed=seed)
    for fewer in (count // 10, count):
        settings = {"rows": fewer, "points": K, "repeats": options.repeats, "path": tables(fewer)}
        add("evaluation", **settings)
    add("protein", rows=45_730 if count >= 45_730 else count)


def run_arithmetic(_tables: Tables, options: argparse.Namespace) -> None:
    """Measure shares of the peak for as many rows as kin40k has, and for a million."""
    results, threads = new_results("scale/arithmetic"), os.cpu_count() or 1
    count, K = max(options.rows or [1_000_000]), max(options.points or [1024])
    settings = {"size": 2048 if options.device == "cpu" else 16_384, "device": options.device}
    for rows, points in ((36_000, 4 * K), (count, K)):
        task = {"rows": min(rows, count), "points": points, **settings}
        results.add(measured("arithmetic", threads=threads, **task))


PARTS: dict[str, Callable[[Tables, argparse.Namespace], None]] = {
    "rows": run_rows,
    "points": run_points,
    "columns": run_columns,
    "kernels": run_kernels,
    "ranks": run_processes,
    "minibatches": run_minibatches,
    "fits": run_fits,
    "gpu": run_gpu,
    "arithmetic": run_arithmetic,
}


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--what", nargs="+", choices=PARTS, default=["rows", "points", "ranks"])
    parser.add_argument("--rows", nargs="+", type=int, help="default: those of each part")
    parser.add_argument("--points", nargs="+", type=int, help="default: those of each part")
    parser.add_argument(
        "--repeats",
        type=int,
        default=REPEATS,
        help="timings, of which the shortest counts; seeds of fits on a GPU",
    )
    parser.add_argument("--device", default="cpu", help="device of gpu, kernels and arithmetic")
    parser.add_argument(
        "--tables", type=Path, help="folder for the Parquet files; default: temporary"
    )
    parser.add_argument("--report", action="store_true", help="print results without measuring")
    parser.add_argument("--measure", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        measure(options.measure)
        return
    if not options.report:
        with tempfile.TemporaryDirectory() as name:
            os.environ |= {"PYTHONPYCACHEPREFIX": name, "PYTHONDONTWRITEBYTECODE": ""}
            # The first process compiles the modules that the others import.
            measured("evaluation", rows=1000, points=2, repeats=1)
            for part in options.what:
                PARTS[part](Tables(options.tables or Path(name)), options)
    # Imported here: matplotlib must not count as memory of the processes that are measured.
    from scale_report import draw, report

    report()
    if options.report:
        draw()


if __name__ == "__main__":
    main()
