"""Estimators whose minibatches several processes share."""

from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from winnowgp.data import Dataset, Source, shard
from winnowgp.data.distributed import ProcessGroup
from winnowgp.estimators import DeepGPClassifier, DeepGPRegressor, SparseGPClassifier
from winnowgp.training.adam import Minibatches

_RNG = np.random.default_rng(5)
X = _RNG.uniform(-2, 2, size=(60, 2))
Y = np.sin(2 * X[:, 0]) + 0.1 * _RNG.normal(size=60)
CLASSES = (Y > 0).astype(int) + (X[:, 1] > 1)

_DEEP: dict[str, Any] = {"epochs": (1, 4, 2), "batch_size": 12, "n_candidates": 6}
ESTIMATORS: dict[str, tuple[Any, Any]] = {
    "classes": (
        SparseGPClassifier(
            schedule="paper",
            alpha=0.05,
            epochs=(2, 3, 2),
            batch_size=12,
            n_candidates=6,
            random_state=0,
        ),
        CLASSES,
    ),
    "layers": (DeepGPRegressor(**_DEEP, random_state=0), Y),
    "layers of classes": (DeepGPClassifier(**_DEEP, random_state=0), CLASSES),
    "a seed of chance": (DeepGPRegressor(**_DEEP, hidden_mean="identity"), Y),
}


def source(targets: Any) -> Source:
    return shard(Dataset.of(torch.tensor(X), torch.tensor(targets, dtype=torch.float64)))


def summary(fitted: Any) -> dict[str, Any]:
    """Return what processes compare: the ELBO, the inducing points and predictions."""
    points = fitted.inducing_points_
    listed = points if isinstance(points, tuple) else (points,)
    method = getattr(fitted, "predict_proba", fitted.predict)
    return {
        "bound": fitted.elbo_,
        "points": [part.tolist() for part in listed],
        "predicted": method(X[:4]).tolist(),
    }


def fits(process_group: ProcessGroup) -> dict[str, Any]:
    """Return a summary of each fit, and the sizes of the minibatches that this process used."""
    assert source(Y).process_group == process_group
    return {name: _fitted(*problem) for name, problem in ESTIMATORS.items()}


def _fitted(estimator: Any, targets: Any) -> dict[str, Any]:
    whole, sizes = Minibatches.next, set[int]()

    def counted(parts: Minibatches) -> Dataset:
        part = whole(parts)
        sizes.add(part.N)
        return part

    with patch.object(Minibatches, "next", counted):
        return {**summary(estimator.fit(source(targets))), "rows": sorted(sizes)}
