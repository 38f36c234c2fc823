"""A synthetic table of any length: nine inputs, a target that five of them decide."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from winnowgp.data import Dataset

INPUTS = 9
NAMES = [f"x{i}" for i in range(INPUTS)]
PART = 65_536
NOISE = 0.3


def parts(rows: int) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Inputs and targets, some rows at a time; the first rows of a longer table are the same."""
    rng = np.random.default_rng(0)
    for start in range(0, rows, PART):
        X, noise = rng.normal(size=(PART, INPUTS)), rng.normal(size=PART)
        f = np.sin(2 * X[:, 0]) + np.cos(X[:, 1] + X[:, 2]) + 0.5 * np.tanh(X[:, 3] * X[:, 4])
        count = min(PART, rows - start)
        yield X[:count], (f + NOISE * noise)[:count]


def written(path: Path, rows: int) -> Path:
    """The table as Parquet, a part to a row group."""
    import pyarrow
    from pyarrow import parquet

    schema = pyarrow.schema([(name, pyarrow.float64()) for name in [*NAMES, "y"]])
    with parquet.ParquetWriter(path, schema) as file:
        for X, y in parts(rows):
            file.write_table(pyarrow.table([*X.T, y], schema=schema))
    return path


def in_memory(rows: int, device: torch.device) -> Dataset:
    """The table as tensors."""
    made = list(parts(rows))
    X, y = (torch.from_numpy(np.concatenate([part[i] for part in made])) for i in range(2))
    return Dataset.of(X, y).to(device)
