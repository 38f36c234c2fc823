"""The rows of the source tests, and the files they are written to, some of them damaged."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import torch
from pyarrow import parquet

from winnowgp.data import Dataset

N, D, P = 103, 3, 2
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(N, D)), RNG.normal(size=(N, P))
WHOLE = Dataset.of(torch.tensor(X), torch.tensor(Y))


def row_groups(path: Path, sizes: list[int], X: Any = X, Y: Any = Y, **changes: Any) -> Path:
    """Write the rows to a Parquet file whose targets stand between the inputs."""
    columns = {"a": X[:, 0], "y": Y[:, 0], "b": X[:, 1], "word": ["w"] * len(X), "z": Y[:, 1]}
    return write_row_groups(path, {**columns, "c": X[:, 2], **changes}, sizes)


CHOICE: dict[str, Any] = {"inputs": ["a", "b", "c"], "targets": ["y", "z"]}


def folder_of_files(folder: Path) -> Path:
    path = folder / "table"
    (path / "later").mkdir(parents=True)
    row_groups(path / "0.parquet", [20, 1, 0, 13], X[:34], Y[:34])
    row_groups(path / "1.parquet", [0], X[:0], Y[:0])
    row_groups(path / "later" / "0.parquet", [N - 34], X[34:], Y[34:])
    (path / "_SUCCESS").write_text("")
    return path


def maps(folder: Path) -> tuple[Path, Path]:
    np.save(folder / "X.npy", X)
    np.save(folder / "Y.npy", Y)
    return folder / "X.npy", folder / "Y.npy"


def batches() -> Iterator[tuple[Any, Any]]:
    """Yield arrays and tensors; one batch is empty."""
    for start, stop in ((0, 40), (40, 41), (41, 41), (41, 90)):
        yield X[start:stop], Y[start:stop]
    yield torch.tensor(X[90:]), torch.tensor(Y[90:])


def write_row_groups(path: Path, columns: dict[str, Any], sizes: list[int]) -> Path:
    """Write the columns in row groups of these sizes."""
    whole = pyarrow.table(columns)
    with parquet.ParquetWriter(path, whole.schema) as writer:
        start = 0
        for size in sizes:
            writer.write_table(whole.slice(start, size))
            start += size
    return path


def spoil(path: Path, *, group: int, column: int) -> None:
    """Overwrite one column of one row group with invalid bytes."""
    chunk = parquet.ParquetFile(path).metadata.row_group(group).column(column)
    content = bytearray(path.read_bytes())
    size, start = chunk.total_compressed_size, chunk.dictionary_page_offset
    content[start : start + size] = b"\xff" * size
    path.write_bytes(bytes(content))
