"""Settings and data of the fits of `right_number.py`.

A setting is a dictionary that identifies one fit: `what` (the part of the benchmark), `name`, the
numbers that the data depend on, `seed` and `device`. `rows` is its number of training rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.spatial.distance import cdist
from scipy.special import expit, xlogy
from scipy.stats import poisson

from winnowgp.data.catalogue import table_folders

Values = NDArray[np.float64]
Settings = dict[str, Any]

PARTS = ("tables", "truth", "rare", "columns", "sizes", "synthetic", "peers")
TABLES = {
    "energy": 768,
    "concrete": 1030,
    "skillcraft": 3338,
    "kin8nm": 8192,
    "kin40k": 40_000,
    "protein": 45_730,
}
"""Tables and their numbers of rows."""

FRESH = 2000
"""Fresh rows of a draw on which predictions are compared."""
FRESH_RARE = 5000
SIZES = (32, 64, 128)

_NOISES = (1e-3, 1e-2, 1e-1, 1.0)
_EXTENTS = {1: 20.0, 2: 5.0, 5: 3.0}
_RATES = {"bernoulli": (0.01, 0.02, 0.03, 0.04, 0.05), "poisson": (0.05, 0.1, 0.2, 0.35, 0.5)}
_STRENGTH = {"bernoulli": 2.0, "poisson": 1.0}
_INTENSITIES = {
    "noise": (0.3, 0.5477, 1.0),
    "smoothness": (0.8, 1.4142, 2.5),
    "clustering": (0.03, 0.1225, 0.5),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """Training and test rows in their original units."""

    X: Values
    y: Values
    X_test: Values
    y_test: Values

    @property
    def N(self) -> int:
        """Number of training rows."""
        return len(self.y)

    @property
    def scale(self) -> float:
        """Standard deviation of the training targets, by which the estimators divide."""
        return float(self.y.std()) or 1.0

    def standardised(self) -> "Problem":
        """Return the rows in units of the means and standard deviations of the training rows."""
        centre, spread = self.X.mean(0), self.X.std(0)
        spread = np.where(spread > 0, spread, 1.0)
        return Problem(
            (self.X - centre) / spread,
            (self.y - self.y.mean()) / self.scale,
            (self.X_test - centre) / spread,
            (self.y_test - self.y.mean()) / self.scale,
        )


def settings_of(
    part: str, *, seeds: Sequence[int], device: str, only: Sequence[str], exact_rows: int
) -> list[Settings]:
    """Return the settings of all fits of a part, those of few rows first.

    Args:
        only: names to keep; all if empty.
        exact_rows: largest number of rows of an exact GP; draws from known GPs have at most as
            many.
    """
    settings = [
        {"what": part, **case, "seed": seed, "device": device}
        for seed in seeds
        for case in _CASES[part](exact_rows)
        if not only or case["name"] in only
    ]
    # Stable: fits of as many rows keep their order.
    return sorted(settings, key=lambda case: case["rows"])


def _table_cases(exact_rows: int) -> list[Settings]:
    del exact_rows
    return [{"name": name, "rows": int(0.9 * N)} for name, N in TABLES.items() if table_path(name)]


def _small_table_cases(exact_rows: int) -> list[Settings]:
    return [
        case
        for case in _table_cases(exact_rows)
        if case["name"] in ("energy", "concrete", "kin8nm")
    ]


def _truth_cases(exact_rows: int) -> list[Settings]:
    draws: list[Settings] = [
        {"name": name, "D": D, "rows": N, "noise": noise}
        for N in (100, 300, 1000, 3000)
        for name in ("rbf", "matern32")
        for D in _EXTENTS
        for noise in _NOISES
    ]
    if exact_rows >= 10_000:
        draws += [
            {"name": name, "D": D, "rows": 10_000, "noise": noise}
            for name in ("rbf", "matern32")
            for D, noise in zip(_EXTENTS, (1e-3, 1e-2, 1.0), strict=True)
        ]
    parts: list[Settings] = [
        {"name": name, "rows": N}
        for N in (200, 600, 2000)
        for name, total in TABLES.items()
        if table_path(name) and 0.9 * total >= N
    ]
    return draws + parts


def _rare_cases(exact_rows: int) -> list[Settings]:
    del exact_rows
    return [
        {"name": name, "rate": rate, "rows": N, "effect": effect}
        for N in (1000, 2000, 5000, 10_000)
        for name, rates in _RATES.items()
        for rate in rates
        for effect in (True, False)
    ]


def _column_cases(exact_rows: int) -> list[Settings]:
    del exact_rows
    return [
        {"name": name, "irrelevant": irrelevant, "draw": draw, "rows": 1000}
        for draw in range(10)
        for irrelevant in (0, 3, 10, 30)
        for name in ("cycle", "smooth")
    ]


def _synthetic_cases(exact_rows: int) -> list[Settings]:
    del exact_rows
    return [
        {"name": name, "intensity": intensity, "draw": draw, "rows": 500}
        for draw in range(8)
        for name, intensities in _INTENSITIES.items()
        for intensity in intensities
    ]


_CASES = {
    "tables": _table_cases,
    "truth": _truth_cases,
    "rare": _rare_cases,
    "columns": _column_cases,
    "sizes": _small_table_cases,
    "synthetic": _synthetic_cases,
    "peers": _small_table_cases,
}


def table_path(name: str) -> Path | None:
    """Return the file of a table; None if it is in none of the folders."""
    paths = [folder / f"{name}.csv.gz" for folder in table_folders()]
    return next((path for path in paths if path.is_file()), None)


def split_table(name: str, *, seed: int, train: int | None = None) -> Problem:
    """Return a random split of a table, the one of `peers/gpflow_sgpr.py`.

    Args:
        train: number of training rows, with up to `FRESH` test rows; 90 % and all others if None.
    """
    path = table_path(name)
    if path is None:
        raise FileNotFoundError(f"{name}.csv.gz is in none of the folders of WINNOWGP_DATA.")
    values = np.loadtxt(path, delimiter=",", skiprows=1)
    values = values[np.random.default_rng(seed).permutation(len(values))]
    cut, end = (int(0.9 * len(values)), len(values)) if train is None else (train, train + FRESH)
    test = values[cut:end]
    return Problem(values[:cut, :-1], values[:cut, -1], test[:, :-1], test[:, -1])


def known_covariance(name: str, A: Values, B: Values) -> Values:
    """Return the covariance of a known GP of unit variance and unit lengthscale."""
    r = cdist(A, B)
    if name == "rbf":
        return np.exp(-0.5 * r**2)
    return (1 + np.sqrt(3) * r) * np.exp(-np.sqrt(3) * r)


def known_draw(settings: Settings) -> Problem:
    """Return rows of a function drawn from a known GP, and fresh rows of the same function.

    The noise of the setting is a variance; the function has unit variance.
    """
    name, D, N = settings["name"], settings["D"], settings["rows"]
    rng = _generator(settings)
    X = rng.uniform(0, _EXTENTS[D], (N + FRESH, D))
    K = known_covariance(name, X, X)
    K.flat[:: len(K) + 1] += 1e-8
    f = np.linalg.cholesky(K) @ rng.standard_normal(len(X))
    y = f + np.sqrt(settings["noise"]) * rng.standard_normal(len(X))
    return Problem(X[:N], y[:N], X[N:], y[N:])


@dataclass(frozen=True, slots=True)
class RareEvents:
    """Rows with few events, and the true log density of the test rows."""

    problem: Problem
    true_log_density: float


def rare_events(settings: Settings) -> RareEvents:
    """Return classes or counts of a given mean, with or without an effect of the inputs.

    The log odds or the log rate are b + s g(x), g = (sin 2x₁ + x₂)/sd(g), in four columns of which
    two have no effect. s is 2 for classes, 1 for counts, and 0 without an effect; b gives the mean.
    """
    rng, N, rate = _generator(settings), settings["rows"], settings["rate"]
    counts = settings["name"] == "poisson"
    X = rng.uniform(-2, 2, (N + FRESH_RARE, 4))
    g = np.sin(2 * X[:, 0]) + X[:, 1]
    strength = _STRENGTH[settings["name"]] if settings["effect"] else 0.0
    effect = strength * g / g.std()
    link = np.exp if counts else expit
    b = brentq(lambda b: float(link(b + effect).mean()) - rate, -30.0, 30.0)
    mean = link(b + effect)
    y = rng.poisson(mean).astype(float) if counts else (rng.random(len(X)) < mean).astype(float)
    y_test = y[N:]
    if counts:
        truth = poisson.logpmf(y_test, mean[N:])
    else:
        truth = xlogy(y_test, mean[N:]) + xlogy(1 - y_test, 1 - mean[N:])
    return RareEvents(Problem(X[:N], y[:N], X[N:], y_test), float(truth.mean()))


def with_irrelevant_columns(settings: Settings) -> Problem:
    """Return a function of one or three columns beside irrelevant ones; the targets are the same.

    `cycle`: a daily cycle in a time of 14 days, noise 0.3. `smooth`: sin 2x₁ + x₂²/2 + x₂x₃, noise
    0.3.
    """
    rng = _generator({**settings, "irrelevant": 0})
    N = settings["rows"]
    if settings["name"] == "cycle":
        X = rng.uniform(0, 14, (N + FRESH, 1))
        f = np.sin(2 * np.pi * X[:, 0])
    else:
        X = rng.standard_normal((N + FRESH, 3))
        f = np.sin(2 * X[:, 0]) + 0.5 * X[:, 1] ** 2 + X[:, 1] * X[:, 2]
    y = f + 0.3 * rng.standard_normal(len(X))
    X = np.hstack([X, rng.standard_normal((len(X), settings["irrelevant"]))])
    return Problem(X[:N], y[:N], X[N:], y[N:])


def _generator(settings: Settings) -> np.random.Generator:
    """Return a generator of the numbers of a setting, the device aside."""
    words = [f"{k}={v}" for k, v in sorted(settings.items()) if k != "device"]
    return np.random.default_rng([settings["seed"], *"; ".join(words).encode()])
