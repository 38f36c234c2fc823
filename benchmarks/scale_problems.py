"""The synthetic table of benchmarks/scale.py, in memory and in files, and models of it."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from gpytorch.kernels import MaternKernel, RBFKernel
from gpytorch.means import ConstantMean
from numpy.typing import NDArray

from winnowgp.data import Dataset, ParquetSource, Source
from winnowgp.estimators.kernels import kernel_from
from winnowgp.models import SparseGP

INPUTS = 9
BLOCK, NOISE = 65_536, 0.3


def blocks(
    rows: int, inputs: int = INPUTS
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Yield blocks of inputs and targets; a shorter table is the beginning of a longer one."""
    rng = np.random.default_rng(0)
    for start in range(0, rows, BLOCK):
        X, noise = rng.normal(size=(BLOCK, inputs)), rng.normal(size=BLOCK)
        a, b, c, d, e = (X[:, i % inputs] for i in range(5))
        f = np.sin(2 * a) + np.cos(b + c) + 0.5 * np.tanh(d * e)
        count = min(BLOCK, rows - start)
        yield X[:count], (f + NOISE * noise)[:count]


def write_parquet(path: Path, rows: int) -> Path:
    """Write the table as Parquet, one row group per block."""
    import pyarrow
    from pyarrow import parquet

    names = [*(f"x{i}" for i in range(INPUTS)), "y"]
    schema = pyarrow.schema([(name, pyarrow.float64()) for name in names])
    with parquet.ParquetWriter(path, schema) as file:
        for X, y in blocks(rows):
            file.write_table(pyarrow.table([*X.T, y], schema=schema))
    return path


def in_memory(rows: int, device: torch.device, inputs: int = INPUTS) -> Dataset:
    """Return the table as tensors."""
    arrays = list(blocks(rows, inputs))
    X, y = (torch.from_numpy(np.concatenate([block[i] for block in arrays])) for i in range(2))
    return Dataset.of(X, y).to(device)


def gp(
    source: Source,
    points: int,
    *,
    kernel: str = "rbf",
    device: str = "cpu",
    precision: str = "double",
) -> SparseGP:
    """Return a model of the table whose candidates are the first rows."""
    prior = kernel_from(kernel, source.D)
    for part in prior.modules():
        if isinstance(part, RBFKernel | MaternKernel):
            part.lengthscale = torch.full_like(part.lengthscale, 2.0)
    Z = source.part(torch.arange(points)).X.to(device)
    return SparseGP(prior, Z, mean=ConstantMean(), noise=0.2, precision=precision)


def open_table(path: str | None, rows: int, device: str, inputs: int = INPUTS) -> Source:
    """Return the rows of a Parquet file, or rows in memory if there is no file."""
    if path is None:
        return in_memory(rows, torch.device(device), inputs)
    return ParquetSource(Path(path), targets=["y"])


class Tables:
    """Parquet files of the table by number of rows, each written once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, rows: int) -> str:
        path = self._folder / f"{rows}.parquet"
        return str(path if path.exists() else write_parquet(path, rows))
