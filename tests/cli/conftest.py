"""A small table with strings, missing values, an id column and dates; and models fitted to it."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.short_fits import short_fits
from winnowgp.cli.app import run

N = 60
HEADER = ["id", "x", "town", "day", "y", "up", "visits"]


def rows() -> list[list[Any]]:
    rng = np.random.default_rng(5)
    x = rng.uniform(0, 6, N)
    town = rng.choice(["Oslo", "Rome", "São Paulo"], N)
    y = np.sin(x) + 1.5 * (town == "Rome") + 0.1 * rng.normal(size=N)
    visits = rng.poisson(np.exp(1 + 0.5 * y))
    return [
        [
            f"r{i}",
            "" if i % 20 == 7 else f"{x[i]:.4f}",
            town[i],
            f"2024-{1 + i % 12:02d}-{1 + i % 28:02d}",
            f"{y[i]:.4f}",
            "yes" if y[i] > 0.7 else "no",
            visits[i],
        ]
        for i in range(N)
    ]


def write(path: Path, table: list[list[Any]], header: list[str] = HEADER) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *table])
    return path


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The table as a CSV file."""
    return write(tmp_path_factory.mktemp("shop") / "shop.csv", rows())


QUICK = ["--missing", "impute", "--id", "id", "--tolerance", "0.3", "--quiet"]
DROPS = {"y": "up,visits", "up": "y,visits,day", "visits": "y,up,day,town"}


@pytest.fixture(scope="session")
def models(shop: Path) -> dict[str, Path]:
    """A model for each task, by its target."""
    found = {}
    for target, drop in DROPS.items():
        found[target] = shop.parent / f"{target}.winnow"
        likelihood = "poisson" if target == "visits" else "auto"
        arguments = [
            "fit",
            str(shop),
            "-t",
            target,
            "--drop",
            drop,
            "--likelihood",
            likelihood,
            *QUICK,
        ]
        if target != "y":
            arguments += ["--kernel", "rbf"]
        with short_fits(sizes=1):
            assert run([*arguments, "-o", str(found[target])]) == 0
    return found
