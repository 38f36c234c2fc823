"""Data sets by name: the paper's tables, and a small one that is part of the package."""

import csv
import gzip
import hashlib
import os
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.data.dataset import Dataset
from winnowgp.errors import DataNotFoundError, InputError

ORIGINS = {
    "concrete": "UCI 165, Concrete Compressive Strength: 1,030 rows, target strength",
    "energy": "UCI 242, Energy Efficiency: 768 rows, target heating_load",
    "kin8nm": "OpenML 189, DELVE's kin8nm: 8,192 rows, target y",
    "protein": "UCI 265, Protein Tertiary Structure: 45,730 rows, target rmsd",
    "qpcr": "Guo et al. 2010 as guo_qpcr.csv of sods/ods: 437 rows of 48 genes, no target",
}
"""Names that `load_table` accepts, and where each data set comes from."""

# First 16 hexadecimal digits of each file's SHA-256.
_DIGESTS = {
    "concrete": "8aefa5765492c083",
    "energy": "83793b1f3770ebe1",
    "kin8nm": "14df437b2268bfea",
    "protein": "bfc8fc0c8014f140",
    "qpcr": "fef0bed824f8636f",
}

# Tables whose first column is a label of the row.
_LABELLED = ("qpcr",)


@dataclass(frozen=True, slots=True)
class NamedTable:
    """A numeric table with named columns, in float64."""

    columns: tuple[str, ...]
    values: Float[Tensor, "N C"]
    labels: tuple[str, ...]
    """Labels of the rows, one per row; empty if the table has none."""

    def dataset(self) -> Dataset:
        """Return the last column as target and the others as inputs."""
        return Dataset.of(self.values[:, :-1], self.values[:, -1])


def load_table(name: str) -> NamedTable:
    """Read a data set of the paper from `$WINNOWGP_DATA` or the user's cache.

    Args:
        name: "concrete", "energy", "kin8nm", "protein" or "qpcr".

    Raises:
        DataNotFoundError: the file is in neither folder.
        InputError: the name is unknown, or the file is not the published one.
    """
    if name not in _DIGESTS:
        raise InputError(f"`name` must be one of {', '.join(_DIGESTS)}; got {name!r}.")
    path = find_table(name)
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest()[:16] != _DIGESTS[name]:
        raise InputError(
            f"{path} is not the published data set: its checksum differs. Replace the file; it "
            f"comes from {ORIGINS[name]}."
        )
    header, *rows = csv.reader(gzip.decompress(content).decode("utf-8").splitlines())
    first = 1 if name in _LABELLED else 0
    values = torch.from_numpy(np.array([row[first:] for row in rows], dtype=np.float64))
    return NamedTable(tuple(header[first:]), values, tuple(row[0] for row in rows) if first else ())


def table_folders() -> list[Path]:
    """Return the folders that are searched for data sets, in order."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "winnowgp"
    return [Path(p) for p in [os.environ.get("WINNOWGP_DATA"), str(cache)] if p]


def find_table(name: str) -> Path:
    """Return the path of the file of a data set."""
    file_name, folders = f"{name}.csv.gz", table_folders()
    for folder in folders:
        if (folder / file_name).is_file():
            return folder / file_name
    raise DataNotFoundError(
        f"{file_name} is in none of {', '.join(map(str, folders))}; "
        "copy it there, or set WINNOWGP_DATA to the folder that holds it. "
        f"It comes from {ORIGINS[name]}."
    )


def hills() -> Dataset:
    """Return 180 noisy heights along a path that is flat at first, then ever steeper.

    Generated as y = sin(x²/4)·x/6 + 0.1·ε at x ~ U[0, 8]; see `hills.csv`. The smooth part needs
    few inducing points and the rough part many.

    >>> hills().N
    180
    """
    text = files("winnowgp.data").joinpath("hills.csv").read_text(encoding="utf-8")
    table = torch.from_numpy(np.loadtxt(text.splitlines(), delimiter=",", skiprows=1))
    return Dataset.of(table[:, :1], table[:, 1])
