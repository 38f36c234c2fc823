"""Relevance and effect of each column of a table on predictions."""

from typing import Any

import numpy as np
from gpytorch.kernels import Kernel
from numpy.typing import NDArray
from scipy.stats import norm
from torch import Tensor

from winnowgp.data import TableEncoder
from winnowgp.data.encoding import ColumnEncoding
from winnowgp.estimators.classification import SparseGPClassifier
from winnowgp.estimators.regression import SparseGPRegressor
from winnowgp.estimators.validation import has_noise
from winnowgp.report.summary import Curve, Effect

STEPS = 41

MOST_CLASSES = 6

Values = NDArray[np.float64]


def relevances(kernel: Kernel, encoder: TableEncoder) -> dict[str, float] | None:
    """Return 1 / lengthscale of each standardised column, the largest of its features.

    The result is None unless the kernel has one lengthscale per feature.
    """
    scales = [
        1 / component.lengthscale.detach().reshape(-1).numpy()
        for component in kernel.modules()
        if isinstance(component, Kernel)
        and component.has_lengthscale
        and component.lengthscale.numel() == len(encoder.features)
    ]
    if not scales:
        return None
    ends = np.cumsum([len(column.features) for column in encoder.columns])[:-1]
    features = np.split(np.max(scales, axis=0), ends)
    return {
        column.name: float(own.max()) if len(own) else 0.0
        for column, own in zip(encoder.columns, features, strict=True)
    }


def column_effect(
    model: SparseGPRegressor | SparseGPClassifier,
    encoder: TableEncoder,
    column: ColumnEncoding,
    *,
    between: tuple[float, float] | None,
) -> Effect:
    """Return predictions as one column varies and all others are typical, with ± 2 sd.

    Args:
        between: the ends of the grid, for numbers and dates.
    """
    at: list[Any] = (
        list(column.categories)
        if between is None
        else np.linspace(between[0], between[1], STEPS).tolist()
    )
    X = np.hstack(
        [
            _features(other, at if other is column else [other.typical] * len(at))
            for other in encoder.columns
        ]
    )
    curves = (
        _class_curves(model, X) if isinstance(model, SparseGPClassifier) else [_curve(model, X)]
    )
    return {"column": column.name, "kind": column.kind, "at": at, "curves": curves}


def _features(column: ColumnEncoding, values: list[Any]) -> Values:
    if column.kind == "words":
        return np.array(
            [[float(category == value) for category in column.categories] for value in values]
        )
    numbers = np.array(values, dtype=np.float64)[:, None]
    return np.hstack([numbers, np.zeros_like(numbers)]) if column.flagged else numbers


def _curve(model: SparseGPRegressor, X: Values) -> Curve:
    """Return the mean of an observation, and ± 2 sd of the function without noise.

    For a model of log y it is the median, which the mean exceeds by a factor that is the noise's.
    """
    latent = model._predict_latent(model._inputs(X), model.posterior_.predict, observed=False)
    sd = latent.variance.sqrt()
    lower, upper = (_in_units(model, latent.mean + 2 * side * sd) for side in (-1, 1))
    mean = _in_units(model, latent.mean) if model.log_target else model.predict(X)
    return {"label": "", "mean": mean.tolist(), "lower": lower.tolist(), "upper": upper.tolist()}


def _in_units(model: SparseGPRegressor, f: Tensor) -> Values:
    """Return the target that belongs to a latent value: itself, eᶠ, or the mean of counts."""
    if has_noise(model.likelihood_):
        return model._y_scaler.values(f)
    return model.likelihood_.forward(f[:, 0]).mean.numpy()


def _class_curves(model: SparseGPClassifier, X: Values) -> list[Curve]:
    """Return the probability of the second of two classes with ± 2 sd, or of several without."""
    probability = model.predict_proba(X)
    if len(model.classes_) == 2:
        latent = model.posterior_.predict(model._inputs(X))
        mean, sd = latent.mean[:, 0].numpy(), latent.variance[:, 0].sqrt().numpy()
        return [
            {
                "label": str(model.classes_[1]),
                "mean": probability[:, 1].tolist(),
                "lower": norm.cdf(mean - 2 * sd).tolist(),
                "upper": norm.cdf(mean + 2 * sd).tolist(),
            }
        ]
    return [
        {"label": str(label), "mean": p.tolist(), "lower": [], "upper": []}
        for label, p in list(zip(model.classes_, probability.T, strict=True))[:MOST_CLASSES]
    ]
