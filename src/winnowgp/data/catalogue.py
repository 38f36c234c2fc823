"""Data sets by name: the paper's tables, a small one, and synthetic tables for a first try.

Each synthetic table has a difficulty that real tables of its kind have. The functions that made
them are known, so that a fit can be judged. `winnow data NAME` writes one as a CSV file, and the
gallery of the documentation fits them all.
"""

import csv
import gzip
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.data.dataset import Dataset
from winnowgp.data.tables import DataTable
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


EXAMPLES = {
    "houses": "synthetic: 500 houses, target price; its noise is proportional to the price",
    "churn": "synthetic: 1,200 customers of whom 4 % leave, target churned; one column knows it",
    "sensor": "synthetic: hourly temperatures of 28 days with gaps, target temperature",
    "sales": "synthetic: three years of days with trend, year and week, target sales",
    "cities": "synthetic: 300 cities of six regions, target rain",
    "visits": "synthetic: 300 counts of visitors with crowded days, target visitors",
}
"""Names that `example_table` accepts, and what each table contains."""

_Columns = dict[str, np.ndarray | list[str]]


def example_table(name: str) -> DataTable:
    """Return a synthetic table that is part of the package, always with the same rows.

    Args:
        name: "houses", "churn", "sensor", "sales", "cities" or "visits".

    >>> example_table("sales").names
    ('date', 'sales')
    """
    if name not in EXAMPLES:
        raise InputError(f"`name` must be one of {', '.join(EXAMPLES)}; got {name!r}.")
    return DataTable.of(_MAKERS[name](np.random.default_rng(list(EXAMPLES).index(name))))


def _houses(rng: np.random.Generator) -> _Columns:
    """log price is a smooth function of area, year and district, with noise of 18 %."""
    N = 500
    area = np.round(rng.gamma(6, 18, N) + 30)
    built = rng.integers(1900, 2021, N)
    district = rng.integers(0, 4, N)
    age = (built - 1965) / 30
    level = np.array([0.0, 0.25, -0.3, 0.6])[district]
    log_price = 7.6 + 0.9 * np.log(area) + 0.12 * age**2 + level + 0.18 * rng.normal(size=N)
    names = np.array(["north", "river", "station", "old town"])
    return {
        "house": [f"H{i:03d}" for i in range(N)],
        "area": area.astype(int),
        "built": built,
        "district": names[district],
        "price": np.round(np.exp(log_price), -2).astype(int),
    }


def _churn(rng: np.random.Generator) -> _Columns:
    """The log odds fall with tenure and rise with calls; a closing fee is paid by leavers only."""
    N = 1200
    tenure = np.round(rng.exponential(24, N) + 1)
    calls = rng.poisson(1.2, N)
    plan = rng.integers(0, 3, N)
    spend = np.round(np.array([15.0, 30.0, 55.0])[plan] + rng.normal(0, 4, N), 2)
    log_odds = -2.6 + 0.8 * calls - 0.12 * tenure + np.array([0.6, 0.0, -0.6])[plan]
    left = rng.random(N) < 1 / (1 + np.exp(-log_odds))
    fee = np.where(left, np.round(rng.uniform(20, 40, N), 2), 0.0)
    return {
        "customer": [f"C{i:04d}" for i in range(N)],
        "tenure": tenure.astype(int),
        "calls": calls,
        "plan": np.array(["basic", "family", "business"])[plan],
        "spend": spend,
        "closing_fee": fee,
        "churned": np.where(left, "yes", "no"),
    }


def _sensor(rng: np.random.Generator) -> _Columns:
    """A daily cycle and slow weather; two gaps without rows, and cells that are empty."""
    hours = np.arange(28 * 24)
    days = hours / 24
    weather = np.cumsum(rng.normal(0, 0.9, 29))
    weather = np.interp(days, np.arange(29), weather - weather.mean())
    cycle = 4 * np.sin(2 * np.pi * (days - 0.35)) + 1.2 * np.sin(4 * np.pi * days)
    temperature = 15 + weather + cycle + 0.5 * rng.normal(size=len(hours))
    present = (rng.random(len(hours)) < 0.9) & ~((days > 9) & (days < 11)) & ~(abs(days - 20) < 0.7)
    empty = rng.random(len(hours)) < 0.03
    start = np.datetime64("2025-03-03T00:00")
    return {
        "time": [str(start + np.timedelta64(int(h), "h")) for h in hours[present]],
        "temperature": [
            "" if gone else f"{value:.1f}"
            for gone, value in zip(empty[present], temperature[present], strict=True)
        ],
    }


def _sales(rng: np.random.Generator) -> _Columns:
    """A line, a year and a week, added."""
    day = np.arange(3 * 365)
    week = np.array([0, -4, -6, -3, 5, 18, -10])[(day + 2) % 7]  # 2022-01-01 is a Saturday.
    year = 22 * np.cos(2 * np.pi * (day - 200) / 365.25) + 8 * np.cos(4 * np.pi * day / 365.25)
    sales = 200 + 0.06 * day + year + week + 5 * rng.normal(size=len(day))
    return {
        "date": [str(np.datetime64("2022-01-01") + np.timedelta64(int(d), "D")) for d in day],
        "sales": np.round(sales, 1),
    }


def _cities(rng: np.random.Generator) -> _Columns:
    """Rain falls off inland from a western coast and rises behind one range of mountains."""
    N = 300
    centres = np.array([[-122, 46], [-120, 38], [-112, 34], [-106, 40], [-98, 46], [-97, 33]])
    region = rng.integers(0, 6, N)
    longitude, latitude = (centres[region] + rng.normal(0, [2.2, 2.0], (N, 2))).T
    coast = np.exp(-(((longitude + 126) / 6) ** 2)) * np.clip(latitude - 30, 0, None)
    east = 5 * np.exp(-(((longitude + 94) / 5) ** 2)) * np.exp(-(((latitude - 33) / 6) ** 2))
    rain = 300 + 70 * coast + 180 * east + 60 * rng.normal(size=N)
    names = np.array(["cascades", "sierra", "desert", "rockies", "prairie", "gulf"])
    return {
        "city": [f"city {i:03d}" for i in range(N)],
        "region": names[region],
        "longitude": np.round(longitude, 2),
        "latitude": np.round(latitude, 2),
        "rain": np.round(np.clip(rain, 5, None)).astype(int),
    }


def _visits(rng: np.random.Generator) -> _Columns:
    """Gamma-Poisson counts whose mean depends on temperature and weekend, and crowded days."""
    N = 300
    temperature = np.round(rng.normal(14, 8, N), 1)
    weekend = rng.random(N) < 2 / 7
    mean = np.exp(2.2 + 0.5 * weekend - ((temperature - 20) / 14) ** 2)
    visitors = rng.poisson(mean * rng.gamma(4, 1 / 4, N))
    crowded = rng.choice(N, 6, replace=False)
    visitors[crowded] += rng.integers(40, 120, 6)
    return {
        "temperature": temperature,
        "day": np.where(weekend, "weekend", "weekday"),
        "visitors": visitors,
    }


_MAKERS: dict[str, Callable[[np.random.Generator], _Columns]] = {
    "houses": _houses,
    "churn": _churn,
    "sensor": _sensor,
    "sales": _sales,
    "cities": _cities,
    "visits": _visits,
}
