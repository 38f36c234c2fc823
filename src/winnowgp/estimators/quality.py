"""How good predictions are on rows the fit never saw."""

from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm, poisson

from winnowgp.estimators.predictive import Predictive, predictive
from winnowgp.estimators.sparse_gp_classifier import SparseGPClassifier
from winnowgp.estimators.sparse_gp_regressor import SparseGPRegressor
from winnowgp.models import LEAST_NOISE
from winnowgp.report.findings import Confusion, Metric, Quality, Reliability

LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
BINS = 10
MOST_RESIDUALS = 400
"""Held-out rows kept for pictures, so that a file does not grow with the data."""

Values = NDArray[np.float64]


def regression_quality(
    model: SparseGPRegressor, X: Values, y: Values, *, y_train: Values
) -> Quality:
    """Errors, log density, coverage of intervals, and residuals; for counts too."""
    found = predictive(model, X)
    shown = np.linspace(0, len(y) - 1, min(len(y), MOST_RESIDUALS)).astype(int)
    return {
        "rows": len(y),
        "metrics": [
            _metric("RMSE", _rmse(y, found.mean), _rmse(y, y_train.mean()), "lower"),
            _metric("R²", _r_squared(y, found.mean), _r_squared(y, y_train.mean()), "higher"),
            _metric(
                "log density a row",
                float(model.log_density(X, y).mean()),
                _constant_density(model, y, y_train),
                "higher",
            ),
        ],
        "coverage": [(level, _covered(found, y, level)) for level in LEVELS],
        "pit": np.histogram(found.cdf(y), bins=BINS, range=(0, 1))[0].tolist(),
        "residuals": {
            "actual": y[shown].tolist(),
            "predicted": found.mean[shown].tolist(),
            "sd": found.sd[shown].tolist(),
        },
        "reliability": [],
        "confusion": None,
    }


def classification_quality(
    model: SparseGPClassifier, X: Values, labels: NDArray[Any], *, train_labels: NDArray[Any]
) -> Quality:
    """Accuracy, log probability, reliability of probabilities, and the confusion of classes."""
    classes = model.classes_
    probability = model.predict_proba(X)
    best = probability.argmax(1)
    shares = np.array([(train_labels == c).mean() for c in classes])
    truth = labels[:, None] == classes
    with np.errstate(divide="ignore"):
        constant = np.log(np.maximum(truth @ shares, 1e-12)).mean()
    return {
        "rows": len(labels),
        "metrics": [
            _metric(
                "accuracy",
                float((classes[best] == labels).mean()),
                float((labels == classes[shares.argmax()]).mean()),
                "higher",
            ),
            _metric(
                "log probability a row",
                float(np.maximum(model.log_density(X, labels), np.log(1e-12)).mean()),
                float(constant),
                "higher",
            ),
            _metric(
                "Brier score",
                float(((probability - truth) ** 2).sum(1).mean()),
                float(((shares - truth) ** 2).sum(1).mean()),
                "lower",
            ),
        ],
        "coverage": [],
        "pit": [],
        "residuals": None,
        "reliability": _reliability(probability, truth),
        "confusion": _confusion(classes, best, truth),
    }


def _metric(name: str, value: float, baseline: float, better: str) -> Metric:
    return {"name": name, "value": value, "baseline": baseline, "better": better}


def _rmse(y: Values, predicted: Any) -> float:
    return float(np.sqrt(np.mean((y - predicted) ** 2)))


def _r_squared(y: Values, predicted: Any) -> float:
    spread = np.mean((y - y.mean()) ** 2)
    return float(1 - np.mean((y - predicted) ** 2) / spread) if spread > 0 else 0.0


def _constant_density(model: SparseGPRegressor, y: Values, y_train: Values) -> float:
    """Of one Gaussian, or one Poisson, for every row.

    The Gaussian is no narrower than the model's own noise may be, or a target that never varies
    would have a baseline of infinite density.
    """
    if model.likelihood == "poisson":
        return float(poisson.logpmf(y, max(y_train.mean(), 1e-12)).mean())
    least = sqrt(LEAST_NOISE) * model._y_units.columns.scale.item()
    return float(norm.logpdf(y, y_train.mean(), max(y_train.std(), least)).mean())


def _covered(found: Predictive, y: Values, level: float) -> float:
    lower, upper = found.interval(level)
    return float(((y >= lower) & (y <= upper)).mean())


def _reliability(probability: Values, truth: NDArray[np.bool_]) -> list[Reliability]:
    """Over all classes, or the second of two, in bins of equal width."""
    if probability.shape[1] == 2:
        probability, truth = probability[:, 1:], truth[:, 1:]
    p, hit = probability.ravel(), truth.ravel()
    bins = np.minimum((p * BINS).astype(int), BINS - 1)
    return [
        {
            "probability": float(p[bins == b].mean()),
            "frequency": float(hit[bins == b].mean()),
            "rows": int((bins == b).sum()),
        }
        for b in range(BINS)
        if (bins == b).any()
    ]


def _confusion(classes: NDArray[Any], best: NDArray[Any], truth: NDArray[np.bool_]) -> Confusion:
    counts = [
        [int((truth[:, i] & (best == j)).sum()) for j in range(len(classes))]
        for i in range(len(classes))
    ]
    return {"labels": [str(c) for c in classes], "counts": counts}
