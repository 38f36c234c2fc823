"""Data sets by name: the paper's tables and one embedded curve."""

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

# The paper's data sets by name, read from `$WINNOWGP_DATA` or the user's cache.


# First 16 hexadecimal digits of each file's SHA-256.
_DIGESTS = {
    "concrete": "8aefa5765492c083",
    "energy": "83793b1f3770ebe1",
    "kin8nm": "14df437b2268bfea",
    "protein": "bfc8fc0c8014f140",
    "qpcr": "fef0bed824f8636f",
}


ORIGINS = {
    "concrete": "UCI 165, Concrete Compressive Strength: 1,030 rows, target strength",
    "energy": "UCI 242, Energy Efficiency: 768 rows, target heating_load",
    "kin8nm": "OpenML 189, DELVE's kin8nm: 8,192 rows, target y",
    "protein": "UCI 265, Protein Tertiary Structure: 45,730 rows, target rmsd",
    "qpcr": "Guo et al. 2010 as guo_qpcr.csv of sods/ods: 437 rows of 48 genes, no target",
}

# Their first column is a word.
_LABELLED = ("qpcr",)


@dataclass(frozen=True, slots=True)
class NamedTable:
    """A numeric table with named columns, in float64."""

    columns: tuple[str, ...]
    values: Float[Tensor, "N C"]
    labels: tuple[str, ...]
    """A leading column of words, one a row, that is not among `columns`; empty if there is none."""

    def dataset(self) -> Dataset:
        """The last column as target, the others as inputs."""
        return Dataset.of(self.values[:, :-1], self.values[:, -1])


def table_names() -> tuple[str, ...]:
    """Names that `load_table` knows."""
    return tuple(_DIGESTS)


def load_table(name: str) -> NamedTable:
    """A data set of the paper, its file checked against the known digest."""
    if name not in _DIGESTS:
        raise InputError(f"`name` must be one of {', '.join(_DIGESTS)}; got {name!r}.")
    content = find_table(name).read_bytes()
    if hashlib.sha256(content).hexdigest()[:16] != _DIGESTS[name]:
        raise InputError(f"{name}.csv.gz is not the file it should be; fetch it again.")
    header, *rows = csv.reader(gzip.decompress(content).decode("utf-8").splitlines())
    first = 1 if name in _LABELLED else 0
    values = torch.from_numpy(np.array([row[first:] for row in rows], dtype=np.float64))
    return NamedTable(tuple(header[first:]), values, tuple(row[0] for row in rows) if first else ())


def table_folders() -> list[Path]:
    """Where data sets are looked for, in this order."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "winnowgp"
    return [Path(p) for p in [os.environ.get("WINNOWGP_DATA"), str(cache)] if p]


def find_table(name: str) -> Path:
    """Where the file of a data set is on this machine."""
    file_name, folders = f"{name}.csv.gz", table_folders()
    for folder in folders:
        if (folder / file_name).is_file():
            return folder / file_name
    raise DataNotFoundError(
        f"{file_name} is in none of {', '.join(map(str, folders))}; "
        "put it there, or point WINNOWGP_DATA at the folder that holds it. "
        f"It comes from {ORIGINS[name]}."
    )


# The small data set that travels with the package.


def hills() -> Dataset:
    """One hundred and eighty noisy heights along a path: flat at first, then ever steeper hills.

    Generated for this package as y = sin(x²/4)·x/6 + 0.1·ε at x ~ U[0, 8]; see `hills.csv`. A
    smooth stretch needs few inducing points and a rough one many, which makes it a good picture.

    >>> hills().N
    180
    """
    text = files("winnowgp.data").joinpath("hills.csv").read_text(encoding="utf-8")
    table = torch.from_numpy(np.loadtxt(text.splitlines(), delimiter=",", skiprows=1))
    return Dataset.of(table[:, :1], table[:, 1])
