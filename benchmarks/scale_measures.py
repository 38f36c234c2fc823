"""What is measured about scale, each in a process of its own."""

import re
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

from records import Row, Seconds, timed
from scale_rows import INPUTS, in_memory
from winnowgp import DeepGPRegressor, SparseGPClassifier, SparseGPRegressor
from winnowgp.data import Dataset, ParquetSource, Source, load_table, shard, standardise
from winnowgp.data.distributed import ProcessGroup
from winnowgp.models import SparseGP
from winnowgp.selection import elimination_frontier
from winnowgp.training import FastSchedule, fit

GPU = "cuda"


def peak_mib() -> float:
    """Most memory that this process has had, as Linux tells.

    Not `ru_maxrss`, which begins with what the process had that started this one.
    """
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text("utf-8"))
    assert found is not None
    return round(int(found.group(1)) / 1024, 1)


def gpu_mib() -> float:
    """Most memory of the GPU that tensors have had."""
    return round(torch.cuda.max_memory_allocated() / 2**20, 1) if torch.cuda.is_available() else 0.0


def waited(work: Callable[[], Any]) -> Callable[[], Any]:
    """The same, ended only when the GPU has ended too."""

    def worked() -> Any:
        result = work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return result

    return worked


def least(work: Callable[[], object], repeats: int) -> Seconds:
    """Of several runs: others may have used the machine during some of them."""
    taken = [timed(waited(work))[1] for _ in range(repeats)]
    return Seconds(min(t.wall for t in taken), min(t.cpu for t in taken))


def gp(source: Source, points: int, *, device: str = "cpu", precision: str = "double") -> SparseGP:
    """A model of the table, its candidates the first rows."""
    base = RBFKernel(ard_num_dims=INPUTS)
    base.lengthscale = torch.full((1, INPUTS), 2.0)
    Z = source.part(torch.arange(points)).X.to(device)
    return SparseGP(ScaleKernel(base), Z, mean=ConstantMean(), noise=0.2, precision=precision)


def rows_of(path: str | None, rows: int, device: str) -> Source:
    """From a Parquet file, or in memory where there is none."""
    if path is None:
        return in_memory(rows, torch.device(device))
    return ParquetSource(Path(path), targets=["y"])


def evaluation(
    *,
    rows: int,
    points: int,
    repeats: int,
    path: str | None = None,
    device: str = "cpu",
    precision: str = "double",
) -> Row:
    """The bound and its gradient; then the pass for the statistics, and a choice from them."""
    source = rows_of(path, rows, device)
    together = ProcessGroup.initialise()
    if torch.distributed.is_torchelastic_launched():
        source = shard(source)
    model = gp(source, points, device=device, precision=precision)
    bound, values = model.chunked_bound(source), []

    def evaluated() -> None:
        model.zero_grad()
        value = bound()
        value.backward()
        values.append(value.item())

    processes = together.world_size
    row: Row = {"rows": rows, "points": points, "precision": precision, "ranks": processes}
    row |= {"source": "memory" if path is None else "parquet", "first_wall_s": first(evaluated)}
    row |= least(evaluated, repeats).row()
    row |= {"bound": values[-1], "peak_mib": peak_mib(), "gpu_mib": gpu_mib()}
    row |= least(lambda: model.moments(source), repeats).row("statistics_")
    statistics = model.subset_statistics(source)
    row |= least(lambda: elimination_frontier(statistics), 5).row("selection_")
    mask = torch.arange(points, device=device) % 2 == 0
    row |= least(lambda: statistics.marginal_gains(mask), 20).row("flips_")
    return row


def first(work: Callable[[], object]) -> float:
    """Seconds of the first run, which also wakes up libraries and devices."""
    return round(timed(waited(work))[1].wall, 4)


def arithmetic(*, rows: int, points: int, size: int, device: str) -> Row:
    """The share of the machine's float64 peak that the passes reach.

    The peak is that of a product of two large matrices, in the same process. Counted are the useful
    multiplications and additions of N rows, K points and F = 2D + 1 features: for the statistics
    2NKF (exponents), NK² (a triangular solve) and NK² (half of a symmetric product); for the bound
    and its gradient these, and 2NK² (the cotangent of K_uf) and 2NKF (its pull-back). Exponentials,
    and what products of panels compute above a diagonal, are not counted.
    """
    source = in_memory(rows, torch.device(device))
    found = {}
    for dtype in (torch.float64, torch.float32):
        A = torch.randn(size, size, dtype=dtype, device=device)
        out = torch.empty_like(A)
        torch.mm(A, A, out=out)
        found[dtype] = 2 * size**3 / least(lambda a=A, o=out: torch.mm(a, a, out=o), 5).wall
        del A, out
    peak = found[torch.float64]
    row: Row = {"rows": rows, "points": points, "product": size}
    row |= {"peak_tflops": round(peak / 1e12, 3)}
    row |= {"single_tflops": round(found[torch.float32] / 1e12, 3)}
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
            wall = least(work, 3).wall
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
    """A fit with selection; beside it, seconds of finding the units and of making the rows.

    Making includes what a GPU takes to start, and the way of the rows to it; files are written
    before. The report adds the units to the fit.
    """
    start = time.perf_counter()
    source = rows_of(path, rows, device)
    made = time.perf_counter()
    data = standardise(source)
    empty = torch.zeros(0, INPUTS, dtype=torch.float64, device=device)
    kernel = ScaleKernel(RBFKernel(ard_num_dims=INPUTS))
    model = SparseGP(kernel, empty, mean=ConstantMean(), noise=0.1, precision=precision)
    schedule, generator = (
        FastSchedule(n_candidates=points),
        torch.Generator(device).manual_seed(seed),
    )
    work = waited(lambda: fit(model, data, schedule=schedule, generator=generator))
    fitted, seconds = timed(work)
    return {
        "rows": rows,
        "points": points,
        "precision": precision,
        "seed": seed,
        "source": "memory" if path is None else "parquet",
        "made_s": round(made - start, 2),
        "standardised_s": round(time.perf_counter() - made - seconds.wall, 2),
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
    """The bound that climbs see, at the model's parameters."""
    seen = deepcopy(model)
    seen.precision = precision
    return seen.chunked_bound(data)().item()


def protein(*, device: str, rows: int) -> Row:
    """The estimator with its defaults, on the paper's largest table, twice in one process."""
    data = load_table("protein").dataset().part(slice(rows))
    X, y = data.X.numpy(), data.Y[:, 0].numpy()
    row: Row = {"rows": data.N, "points": 512}
    for name in ("first_", "second_"):
        work = waited(lambda: SparseGPRegressor(device=device, random_state=0).fit(X, y))
        fitted, seconds = timed(work)
        row |= seconds.row(name)
    row |= {"kept": fitted.n_inducing_, "bound": fitted.elbo_}
    return {**row, "peak_mib": peak_mib(), "gpu_mib": gpu_mib()}


def minibatches(*, rows: int, batch: int, steps: int) -> Row:
    """Seconds of a step of the paper's schedule, for two layers and for classes."""
    data, points = in_memory(rows, torch.device("cpu")), 100
    classes = Dataset.of(data.X, (data.Y > 0).double())
    asked: dict[str, Any] = {"schedule": "paper", "alpha": 0.01, "batch_size": batch}
    asked |= {"n_candidates": points, "random_state": 0}
    layers = DeepGPRegressor(hidden_mean="identity", epochs=(0, steps, 0, 0), **asked)
    found = {
        "layers": step_s(layers, shard(data)),
        "classes": step_s(SparseGPClassifier(epochs=(steps, 0, 0), **asked), shard(classes)),
    }
    processes = ProcessGroup.initialise().world_size
    row: Row = {"rows": rows, "points": points, "batch": batch, "ranks": processes}
    return {**row, **{f"{name}_wall_s": round(wall, 5) for name, wall in found.items()}}


def step_s(estimator: Any, rows: Source) -> float:
    """The median step of a fit's first phase."""
    ends: list[float] = []
    estimator.callbacks = lambda progress: ends.append(time.perf_counter())
    estimator.fit(rows)
    return median(late - early for early, late in pairwise(ends))


MEASURES: dict[str, Callable[..., Row]] = {
    "evaluation": evaluation,
    "arithmetic": arithmetic,
    "fit": whole_fit,
    "protein": protein,
    "minibatches": minibatches,
}
