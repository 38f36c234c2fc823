"""Work that several processes share, each in a process of its own; a script.

    python shared_work.py PIECE FOLDER COUNT ...

does a piece of work in COUNT processes at once, for each COUNT, and writes one JSON object: by the
count, what each process answered. Processes are forked from one that has imported everything.

    torchrun --nproc-per-node COUNT shared_work.py PIECE FOLDER

does it in those that torchrun started, and leaves the answer of each in the folder.
"""

import errno
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood, Likelihood
from gpytorch.means import ConstantMean

from winnowgp.data import (
    ArraySource,
    BatchSource,
    Dataset,
    ParquetSource,
    Ranks,
    SharedSource,
    Source,
    shared,
    standardised,
)
from winnowgp.errors import CheckpointWarning, InputError, WinnowError
from winnowgp.gradients import Relaxed
from winnowgp.models import DeepGP, DeepLayer, SparseGP, VariationalGP
from winnowgp.point_processes import SquaredCardinality
from winnowgp.training import (
    Checkpoint,
    DeepThreePhases,
    EndPhase,
    Fast,
    MaxPoints,
    OnProgress,
    Progress,
    ThreePhases,
    Tolerance,
    fit,
    fit_deep,
    opened,
    silent,
)
from winnowgp.training import checkpoint as checkpoint_module

N, D = 203, 2
ASKED = [0, 202, 7, 7, 101, 50, 151, 25]
"""Numbers of rows, of every process and in no order."""


def rows() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, targets and weights."""
    rng = np.random.default_rng(11)
    X = rng.uniform(0, 4, size=(N, D))
    y = np.sin(2 * X[:, 0]) + X[:, 1] + 0.2 * rng.normal(size=N)
    return X, y, rng.uniform(0.5, 2, size=N)


def dataset(*, weighted: bool = False) -> Dataset:
    X, y, weights = map(torch.tensor, rows())
    return Dataset.of(X, y, weights=weights if weighted else None)


def array() -> ArraySource:
    return ArraySource(*rows()[:2])


def batches() -> BatchSource:
    X, y, _ = rows()
    return BatchSource(lambda: ((X[i : i + 30], y[i : i + 30]) for i in range(0, N, 30)))


def parquet() -> ParquetSource:
    """Of row groups that end where no share does."""
    return ParquetSource("table.parquet", inputs=["a", "b"], targets="y")


def write_parquet() -> None:
    import pyarrow
    from pyarrow import parquet

    X, y, _ = rows()
    table = pyarrow.table({"a": X[:, 0], "b": X[:, 1], "y": y})
    parquet.write_table(table, "table.parquet", row_group_size=47)


def plain(tensor: torch.Tensor) -> list[Any]:
    return tensor.detach().tolist()


def model() -> SparseGP:
    kernel = ScaleKernel(RBFKernel(ard_num_dims=D))
    return SparseGP(kernel, torch.zeros(0, D).double(), mean=ConstantMean(), noise=0.1)


def fitted(
    source: Source,
    *,
    checkpoint: Checkpoint | None = None,
    on_progress: OnProgress = silent,
    **plan: Any,
) -> dict[str, Any]:
    """All that a fit finds."""
    found = fit(
        model(),
        source,
        schedule=Fast(**{"n_candidates": 20, "rounds": 1, **plan}),
        checkpoint=checkpoint,
        on_progress=on_progress,
    )
    X = standardised(dataset()).part(torch.arange(0, N, 10)).X
    predicted = found.posterior.predict(X)
    assert found.selection.frontier is not None
    return {
        "bound": found.bound,
        "upper bound": found.upper_bound,
        "given up": found.given_up,
        "noise": found.model.noise.item(),
        "points": plain(found.posterior.Z),
        "candidates": plain(found.candidates),
        "inclusion": plain(found.selection.inclusion),
        "frontier": plain(found.selection.frontier.bounds),
        "mean": plain(predicted.mean),
        "variance": plain(predicted.variance),
    }


def fits(ranks: Ranks) -> dict[str, Any]:
    """Of rows in memory that count differently, and of rows that are read."""
    few = Tolerance(0.1)
    return {
        "weights": fitted(standardised(shared(dataset(weighted=True))), goal=few),
        "array": fitted(standardised(shared(array())), goal=few),
    }


def more_fits(ranks: Ranks) -> dict[str, Any]:
    """Of other sources, and by other plans."""
    few = Tolerance(0.1)
    return {
        "dataset": fitted(standardised(shared(dataset())), goal=few, rounds=2),
        "parquet": fitted(standardised(shared(parquet())), goal=few, rounds=2),
        "own units": fitted(shared(array()), goal=few),
        "count of points": fitted(standardised(shared(array())), goal=MaxPoints(5), iterations=40),
        "tighter": fitted(standardised(shared(array())), goal=few, tighter=True),
    }


def curve(ranks: Ranks) -> SharedSource:
    """A fit of these takes little time."""
    X, y, _ = rows()
    return shared(ArraySource(X[:60, :1], y[:60] - X[:60, 1]))


class Stopped(Exception):
    """A fit that was stopped from outside."""


class Stops:
    """A watcher that stops the fit at its n-th step, and counts what it is told."""

    def __init__(self, at: int = -1, error: type[Exception] = Stopped) -> None:
        self.at, self.error, self.told = at, error, 0

    def __call__(self, progress: Progress) -> None:
        self.told += 1
        if self.told == self.at:
            raise self.error


def checkpoints(ranks: Ranks) -> dict[str, Any]:
    """Each process is given a folder of its own, to see who writes."""
    of, own = ranks.of, ranks.rank
    unbroken = fitted_curve(ranks)
    where = Checkpoint(f"{of}-kept-{own}", 0)
    with suppress(Stopped):
        fitted_curve(ranks, checkpoint=where, on_progress=Stops(8))
    goes_on = Stops()
    again = fitted_curve(ranks, checkpoint=where, on_progress=goes_on)
    ended = Stops()
    once_more = fitted_curve(ranks, checkpoint=where, on_progress=ended)
    journal = opened(Checkpoint(f"{of}-once-{own}"), "once", ranks=ranks)
    unkept = opened(None, "once", ranks=ranks)
    early = Stops(4, EndPhase) if ranks.first else Stops()
    return {
        "unbroken": unbroken,
        "again": again,
        "once more": once_more,
        "told": [goes_on.told, ended.told],
        "folder": os.path.isdir(where.folder),
        "once": [journal.once(lambda: own + 3), unkept.once(lambda: own + 4)],
        "early": [fitted_curve(ranks, on_progress=early), early.told],
        "full": full_disk(ranks),
        "damaged": damaged(ranks),
        "different": different(ranks),
        "shards": shards(ranks),
    }


def fitted_curve(ranks: Ranks, **words: Any) -> dict[str, Any]:
    found = fit(line(), curve(ranks), schedule=Fast(n_candidates=8, rounds=1), **words)
    return {"bound": found.bound, "points": plain(found.posterior.Z)}


def line(noise: float = 0.1) -> SparseGP:
    return SparseGP(ScaleKernel(RBFKernel()), torch.zeros(0, 1).double(), noise=noise)


def full_disk(ranks: Ranks) -> list[Any]:
    """From the third writing on."""
    real, seen = checkpoint_module.write_packed, [0]

    def write(*words: Any) -> Any:
        seen[0] += 1
        if seen[0] > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*words)

    checkpoint_module.write_packed = write  # type: ignore[assignment]
    where = Checkpoint(f"{ranks.of}-full-{ranks.rank}", 0)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = fitted_curve(ranks, checkpoint=where)
    finally:
        checkpoint_module.write_packed = real  # type: ignore[assignment]
    said = {str(each.message) for each in caught if each.category is CheckpointWarning}
    # What was written before is whole, and can be gone on from.
    return [found, sorted(said), fitted_curve(ranks, checkpoint=where)]


def damaged(ranks: Ranks) -> list[str]:
    """The file of the first process, and of no other."""
    where = Checkpoint(f"{ranks.of}-damaged-{ranks.rank}", 0)
    if ranks.first:
        where.path("fit").parent.mkdir()
        where.path("fit").write_bytes(b"nothing of ours")
    return said(lambda: fitted_curve(ranks, checkpoint=where))


def different(ranks: Ranks) -> list[str]:
    """A model of its own in each process."""
    return said(lambda: fit(line(0.1 + ranks.rank), curve(ranks), schedule=Fast(n_candidates=8)))


def shards(ranks: Ranks) -> list[str]:
    """Rows of its own in each process."""
    X, y, _ = rows()
    return said(lambda: shared(ArraySource(X[ranks.rank :], y[ranks.rank :])))


def said(work: Callable[[], Any]) -> list[str]:
    try:
        work()
    except WinnowError as error:
        return [type(error).__name__, str(error)]
    return []


def elastic(ranks: Ranks) -> dict[str, Any]:
    """Under torchrun: the second process is killed in the first try, the first in the second."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    steps = Stops()

    def watch(progress: Progress) -> None:
        steps(progress)
        if attempt < 2 and steps.told == 6 and ranks.rank == 1 - attempt:
            os.kill(os.getpid(), signal.SIGKILL)

    found = fitted_curve(ranks, checkpoint=Checkpoint("kept", 0), on_progress=watch)
    return {"attempt": attempt, "told": steps.told, "found": found}


def minibatches(ranks: Ranks) -> dict[str, Any]:
    """By the paper's schedule; each process looks at a part of every minibatch."""
    X, y, _ = rows()
    inputs = torch.tensor(X[:60])
    targets = {"gaussian": torch.tensor(y[:60]), "classes": torch.tensor(y[:60] > 2).double()}
    data = {name: Dataset.of(inputs, each) for name, each in targets.items()}
    words = {"process": 12, "post": 6, "pre": 8, "learning_rate": 0.05}
    plan = ThreePhases(SquaredCardinality(12, 0.1), batch_size=20, **words)
    relaxed = ThreePhases(
        SquaredCardinality(12, 0.1), batch_size=20, gradient=Relaxed(samples=2), **words
    )
    whole = ThreePhases(SquaredCardinality(12, 0.1), **words)
    odd = ThreePhases(SquaredCardinality(12, 0.1), batch_size=21, **words)
    gaussian, classes = GaussianLikelihood(), BernoulliLikelihood()
    kept = Checkpoint(f"{ranks.of}-minibatches-{ranks.rank}", 0)
    with suppress(Stopped):
        by_steps(gaussian, data["gaussian"], plan, checkpoint=kept, on_progress=Stops(13))
    return {
        "gaussian": by_steps(gaussian, data["gaussian"], plan),
        "again": by_steps(gaussian, data["gaussian"], plan, checkpoint=kept),
        "classes": by_steps(classes, data["classes"], plan),
        "relaxed": by_steps(gaussian, data["gaussian"], relaxed),
        "whole": by_steps(gaussian, data["gaussian"], whole),
        "odd": said(lambda: by_steps(gaussian, data["gaussian"], odd)),
    }


def deep(ranks: Ranks) -> dict[str, Any]:
    """The paper's schedule for two layers."""
    X, y, _ = rows()
    data = shared(Dataset.of(torch.tensor(X[:40]), torch.tensor(y[:40])))
    layers = [DeepLayer(ScaleKernel(RBFKernel()), torch.tensor(X[:8]), outputs=P) for P in (2, 1)]
    model = DeepGP(layers, likelihood=GaussianLikelihood())
    plan = DeepThreePhases(0.1, layerwise=2, pre=6, process=6, post=6, batch_size=20)
    values: list[float] = []
    found = fit_deep(
        model, data, schedule=plan, on_progress=lambda step: values.append(step.objective)
    )
    state = {name: plain(value) for name, value in sorted(found.model.state_dict().items())}
    return {"values": values, "bound": found.bound, "state": repr(state)}


def by_steps(
    likelihood: Likelihood, data: Dataset, plan: ThreePhases, **words: Any
) -> dict[str, Any]:
    kernel = ScaleKernel(RBFKernel(ard_num_dims=D))
    start = VariationalGP(kernel, data.X[:12], likelihood=likelihood)
    values: list[float] = []
    watcher = words.pop("on_progress", lambda progress: values.append(progress.objective))
    found = fit(start, shared(data), schedule=plan, on_progress=watcher, **words)
    return {
        "values": values,
        "bound": found.bound,
        "inclusion": plain(found.selection.inclusion),
        "points": plain(found.posterior.Z),
        "mean": plain(found.posterior.predict_mean(data.X[:9])),
    }


def sums(ranks: Ranks) -> dict[str, Any]:
    """What processes tell each other."""
    own = torch.full((2, 3), 10.0**ranks.rank, dtype=torch.float64)
    total, single = ranks.total(own, torch.tensor(0.1 * (ranks.rank + 1), dtype=torch.float64))
    (float32,) = ranks.total(torch.tensor([1.0 + ranks.rank]))
    return {
        "rank": ranks.rank,
        "of": ranks.of,
        "first": ranks.first,
        "own": plain(own),
        "total": plain(total),
        "single": single.item(),
        "float32": [str(float32.dtype), *plain(float32)],
        "agreed": ranks.agreed({"seed": 5 + ranks.rank, "text": "ü"}),
        "gathered": ranks.gathered((ranks.rank, "x" * ranks.rank)),
    }


def sources(ranks: Ranks) -> dict[str, Any]:
    """What each process reads, and what all of them know."""
    makers: dict[str, Callable[[], Source]] = {
        "dataset": dataset,
        "weights": lambda: dataset(weighted=True),
        "array": array,
        "parquet": parquet,
        "batches": batches,
    }
    return {name: _of_source(make()) for name, make in makers.items()}


def _of_source(whole: Source) -> dict[str, Any]:
    source = shared(whole)
    units = standardised(source)
    read = list(source.chunks(20))
    part = source.part(torch.tensor(ASKED))
    try:
        source.share(0, 2)
        refused = ""
    except InputError as error:
        refused = str(error)
    missing = ""
    if source.held() is None:
        try:
            source.part(torch.tensor([N]))
        except InputError as error:
            missing = str(error)
    return {
        "shape": [source.N, source.D, source.P, str(source.dtype), source.observations],
        "sizes": [len(chunk.X) for chunk in read],
        "lanes": [lane.N for lane in source.lanes()],
        "read": [plain(torch.cat([chunk.X, chunk.Y], 1)) for chunk in read],
        "weights": [None if chunk.weights is None else plain(chunk.weights) for chunk in read],
        "part": plain(torch.cat([part.X, part.Y], 1)),
        "part weights": None if part.weights is None else plain(part.weights),
        "total": plain(source.total(torch.cat([chunk.X for chunk in read]).sum(0))[0]),
        "gathered": source.gathered(len(read)),
        "units": [
            *(plain(u) for u in (units.x_units.shift, units.x_units.scale)),
            *(plain(u) for u in (units.y_units.shift, units.y_units.scale)),
        ],
        "standard part": plain(units.part(torch.tensor(ASKED)).X),
        "standard lanes": [plain(next(lane.chunks(N)).X) for lane in units.lanes()],
        "refused": refused,
        "missing": missing,
    }


PIECES: dict[str, Callable[[Ranks], Any]] = {
    "fits": fits,
    "more fits": more_fits,
    "sums": sums,
    "sources": sources,
    "checkpoints": checkpoints,
    "elastic": elastic,
    "minibatches": minibatches,
    "deep": deep,
}


def pieces(names: str, ranks: Ranks) -> dict[str, Any]:
    return {name: PIECES[name](ranks) for name in names.split(",")}


def forked(names: str, of: int) -> list[Any]:
    """What each of so many processes answered, introduced to each other by a file."""
    children = []
    for rank in range(of):
        child = os.fork()
        if child:
            children.append(child)
            continue
        try:
            met = Path(f"met-{of}").absolute()
            dist.init_process_group("gloo", init_method=f"file://{met}", rank=rank, world_size=of)
            answer(names, of)
            os._exit(0)
        except BaseException as error:
            sys.stderr.write(f"process {rank} of {of}: {type(error).__name__}: {error}\n")
            os._exit(1)
    ended = [os.waitpid(child, 0)[1] for child in children]
    assert not any(ended), ended
    return [json.loads(Path(f"{of}-{rank}.json").read_text()) for rank in range(of)]


def answer(names: str, of: int) -> None:
    ranks = Ranks.started()
    assert ranks.of == of
    Path(f"{of}-{ranks.rank}.json").write_text(json.dumps(pieces(names, ranks)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    asked, folder, *counts = sys.argv[1:]
    os.chdir(folder)
    if counts:
        write_parquet()
        found = {count: forked(asked, int(count)) for count in counts}
        sys.stdout.write(json.dumps(found))
    else:
        answer(asked, int(os.environ["WORLD_SIZE"]))
