"""Batches of two made streams, and models fitted to the first of them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from helpers.short_fits import shortest_fits
from winnowgp import SparseGPClassifier, SparseGPRegressor

Batch = tuple[NDArray[Any], NDArray[Any]]


def batch(seed: int, N: int = 20) -> Batch:
    """Return rows of a function of the first of two inputs."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(0, 6, (N, 2))
    return X, 4 + 3 * np.sin(X[:, 0]) + 0.3 * rng.standard_normal(N)


def labelled(seed: int, N: int = 25) -> Batch:
    """Return rows of two classes."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(0, 6, (N, 2))
    return X, np.where(np.sin(X[:, 0]) + 0.5 * rng.standard_normal(N) > 0, "high", "low")


def first_regressor() -> SparseGPRegressor:
    """Return a model that `fit` has learnt from the first batch, and that keeps no rows."""
    with shortest_fits():
        return SparseGPRegressor("rbf", random_state=0).fit(*batch(0))


def first_classifier() -> SparseGPClassifier:
    """Return a classifier that has learnt the first batch."""
    with shortest_fits():
        return SparseGPClassifier("rbf", random_state=0).partial_fit(
            *labelled(0), classes=["low", "high"]
        )
