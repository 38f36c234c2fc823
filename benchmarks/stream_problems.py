"""Streams of `stream.py`: batches of training rows, and test rows after each of them."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import make_moons

from right_number_problems import table_path

Array = NDArray[Any]
Rows = tuple[Array, Array]

TABLES = ("concrete", "skillcraft", "kin8nm")
BATCHES = 20


@dataclass(frozen=True, slots=True)
class Stream:
    """Batches, and the rows that are predicted after each of them.

    Attributes:
        batches: inputs and targets to learn from.
        tests: rows to predict after each batch.
        first: test rows of the first batch.
    """

    batches: list[Rows]
    tests: list[Rows]
    first: Rows

    @property
    def all(self) -> Rows:
        """All rows to learn from."""
        return joined(self.batches)


def joined(parts: list[Rows]) -> Rows:
    """Return the rows of several parts."""
    return np.vstack([X for X, _ in parts]), np.concatenate([y for _, y in parts])


def _table(name: str) -> Rows:
    """Return the rows of a table of $WINNOWGP_DATA, whose last column is the target."""
    path = table_path(name)
    if path is None:
        raise FileNotFoundError(f"{name}.csv.gz is in none of the folders of WINNOWGP_DATA.")
    values = np.loadtxt(path, delimiter=",", skiprows=1)
    return values[:, :-1], values[:, -1]


def sorted_table(name: str, seed: int) -> Stream:
    """Return VIPS's protocol: rows sorted by the first column, each batch split 80/20."""
    X, y = _table(name)
    X, y = (X - X.mean(0)) / X.std(0), (y - y.mean()) / y.std()
    order = np.argsort(X[:, 0], kind="stable")
    rng, batches, tests = np.random.default_rng(seed), [], []
    for rows in np.array_split(order, BATCHES):
        rows = rng.permutation(rows)
        train, test = rows[: int(0.8 * len(rows))], rows[int(0.8 * len(rows)) :]
        batches.append((X[train], y[train]))
        tests.append((X[test], y[test]))
    return Stream(batches, _so_far(tests), tests[0])


def synthetic(kind: str, seed: int) -> Stream:
    """Return batches of a function of one input, drawn i.i.d., or moving away and returning."""
    rng, batches, tests = np.random.default_rng(seed), [], []
    count = 40
    for number in range(count):
        low, high = 0.0, 10.0
        if kind == "away":
            # From 0 to 16 and back.
            low = 16 * (1 - abs(2 * number / (count - 1) - 1))
            high = low + 4
        X, noise = rng.uniform(low, high, (132, 1)), rng.normal(size=132)
        y = np.sin(2 * X[:, 0]) * (1 + 0.3 * np.cos(0.7 * X[:, 0])) + 0.2 * noise
        batches.append((X[:32], y[:32]))
        tests.append((X[32:], y[32:]))
    return Stream(batches, _so_far(tests), tests[0])


def magnetometer(*, paths: bool) -> Stream:
    """Return the field along path 3 in order of time, predicted on the other four paths.

    Args:
        paths: whether the other paths follow, one after another; then every tenth row of all five
            is predicted.
    """
    folder = Path(os.environ.get("WINNOWGP_DATA", "~/.cache/winnowgp")).expanduser()
    table = np.loadtxt(folder / "magnetometer.csv.gz", delimiter=",", skiprows=1)
    path, X, y = table[:, 0], table[:, 1:3], table[:, 3]
    own = path == 3
    X = (X - X[own].mean(0)) / X[own].std(0)
    y = (y - y[own].mean()) / y[own].std()
    held = np.arange(len(y)) % 10 == 0 if paths else ~own
    order = (3, 1, 2, 4, 5) if paths else (3,)
    batches = [
        (X[rows], y[rows])
        for number in order
        for rows in np.array_split(np.flatnonzero((path == number) & ~held), BATCHES)
    ]
    first = np.flatnonzero(own & held)[:50] if paths else np.flatnonzero(own)[:470]
    return Stream(batches, [(X[held], y[held])] * len(batches), (X[first], y[first]))


def two_moons(seed: int, *, ordered: bool) -> Stream:
    """Return two moons, sorted by the first input or shuffled; the first batch has both classes."""
    moons: Any = make_moons(1500, noise=0.25, random_state=seed)
    X, y = moons
    order = np.argsort(X[:1000, 0]) if ordered else np.arange(1000)
    batches, waiting = [], order[:0]
    for rows in np.array_split(order, BATCHES):
        waiting = np.concatenate([waiting, rows])
        if batches or len(np.unique(y[waiting])) == 2:
            batches.append((X[waiting], y[waiting]))
            waiting = order[:0]
    test = X[1000:], y[1000:]
    return Stream(batches, [test] * len(batches), test)


def problem(part: str, table: str, seed: int) -> Stream:
    """Return the stream of a part of the benchmark."""
    if part == "uci":
        return sorted_table(table, seed)
    if part == "moons":
        return two_moons(seed, ordered=table == "sorted")
    if part == "magnetometer":
        return magnetometer(paths=table == "all paths")
    return synthetic(part, seed)


def _so_far(tests: list[Rows]) -> list[Rows]:
    return [joined(tests[: number + 1]) for number in range(len(tests))]
