"""Exchanges between processes, and sources that are divided among them."""

from collections.abc import Callable
from typing import Any

import numpy as np

# Imported before processes are forked, rather than in each of them.
import pyarrow.dataset
import pyarrow.parquet
import torch
import torch.distributed as dist

from winnowgp.data import (
    ArraySource,
    BatchSource,
    Dataset,
    ParquetSource,
    Source,
    shard,
    standardise,
)
from winnowgp.data.distributed import ProcessGroup
from winnowgp.errors import WinnowError

N, D = 203, 2
ASKED = [0, 202, 7, 7, 101, 50, 151, 25]
"""Row indices of all processes, in no order."""


def rows() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return inputs, targets and weights."""
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
    """Return a file, written by rank 0, whose row groups end within shards."""
    if dist.get_rank() == 0:
        _write_parquet()
    dist.barrier()
    return ParquetSource("table.parquet", inputs=["a", "b"], targets="y")


def _write_parquet() -> None:
    X, y, _ = rows()
    table = pyarrow.table({"a": X[:, 0], "b": X[:, 1], "y": y})
    pyarrow.parquet.write_table(table, "table.parquet", row_group_size=47)


def plain(tensor: torch.Tensor) -> list[Any]:
    return tensor.detach().tolist()


def error_of(work: Callable[[], Any]) -> list[str]:
    """Return the type and message of the library's error, or nothing."""
    try:
        work()
    except WinnowError as error:
        return [type(error).__name__, str(error)]
    return []


def sums(process_group: ProcessGroup) -> dict[str, Any]:
    own = torch.full((2, 3), 10.0**process_group.rank, dtype=torch.float64)
    total, single = process_group.all_reduce(
        own, torch.tensor(0.1 * (process_group.rank + 1), dtype=torch.float64)
    )
    (float32,) = process_group.all_reduce(torch.tensor([1.0 + process_group.rank]))
    return {
        "rank": process_group.rank,
        "of": process_group.world_size,
        "first": process_group.is_first,
        "own": plain(own),
        "total": plain(total),
        "single": single.item(),
        "float32": [str(float32.dtype), *plain(float32)],
        "agreed": process_group.broadcast_object({"seed": 5 + process_group.rank, "text": "ü"}),
        "gathered": process_group.all_gather((process_group.rank, "x" * process_group.rank)),
    }


def of_dataset(process_group: ProcessGroup) -> dict[str, Any]:
    return _of_source(dataset())


def of_weights(process_group: ProcessGroup) -> dict[str, Any]:
    return _of_source(dataset(weighted=True))


def of_array(process_group: ProcessGroup) -> dict[str, Any]:
    return _of_source(array())


def of_parquet(process_group: ProcessGroup) -> dict[str, Any]:
    return _of_source(parquet())


def of_batches(process_group: ProcessGroup) -> dict[str, Any]:
    return _of_source(batches())


def _of_source(whole: Source) -> dict[str, Any]:
    """Return what this process reads of a sharded source, and what all processes receive."""
    source = shard(whole)
    scaled = standardise(source)
    read = list(source.chunks(20))
    part = source.part(torch.tensor(ASKED))
    missing = (
        [] if source.as_dataset() is not None else error_of(lambda: source.part(torch.tensor([N])))
    )
    (total,) = source.process_group.all_reduce(torch.cat([chunk.X for chunk in read]).sum(0))
    return {
        "shape": [source.N, source.D, source.P, str(source.dtype), source.observations],
        "sizes": [len(chunk.X) for chunk in read],
        "shards": [shard.N for shard in source.shards()],
        "read": [plain(torch.cat([chunk.X, chunk.Y], 1)) for chunk in read],
        "weights": [None if chunk.weights is None else plain(chunk.weights) for chunk in read],
        "part": plain(torch.cat([part.X, part.Y], 1)),
        "part weights": None if part.weights is None else plain(part.weights),
        "total": plain(total),
        "gathered": source.process_group.all_gather(len(read)),
        "scalers": [
            *(plain(u) for u in (scaled.x_scaler.shift, scaled.x_scaler.scale)),
            *(plain(u) for u in (scaled.y_scaler.shift, scaled.y_scaler.scale)),
        ],
        "standard part": plain(scaled.part(torch.tensor(ASKED)).X),
        "standard shards": [plain(next(shard.chunks(N)).X) for shard in scaled.shards()],
        "refused": error_of(lambda: source.shard(0, 2)),
        "missing": missing,
    }
