"""Predictive distributions and held-out quality."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import sqrt
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, ndtr
from scipy.stats import norm, poisson

from winnowgp.errors import InputError
from winnowgp.estimators.classification import SparseGPClassifier
from winnowgp.estimators.regression import SparseGPRegressor
from winnowgp.models.sgpr import LEAST_NOISE
from winnowgp.report.summary import Confusion, Metric, Quality, Reliability

Values = NDArray[np.float64]

LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
BINS = 10
MOST_RESIDUALS = 400
"""Held-out rows that are stored for plots, so that a file does not grow with the data."""

_NODES = 64
_LEAST_PROBABILITY = 1e-12


class Predictive(ABC):
    """The predictive distribution of a new observation at each row."""

    mean: Values
    sd: Values

    @abstractmethod
    def cdf(self, y: Values) -> Values:
        """Return P(Y < y) + ½ P(Y = y) of each row, which is uniform if the model is calibrated."""

    @abstractmethod
    def quantile(self, p: float) -> Values:
        """Return the least y of each row with P(Y ≤ y) ≥ p."""

    def interval(self, level: float) -> tuple[Values, Values]:
        """Return the central interval that contains an observation with probability `level`."""
        if not 0 < level < 1:
            raise InputError(f"`level` must lie between 0 and 1, such as 0.95; got {level}.")
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)


@final
@dataclass(frozen=True, slots=True)
class GaussianPredictive(Predictive):
    """The Gaussian predictive distribution N(mean, sd²)."""

    mean: Values
    sd: Values

    def cdf(self, y: Values) -> Values:
        return norm.cdf((y - self.mean) / self.sd)

    def quantile(self, p: float) -> Values:
        return self.mean + norm.ppf(p) * self.sd


@final
@dataclass(frozen=True, slots=True)
class CountPredictive(Predictive):
    """The predictive distribution of Poisson counts of rate softplus(f), f ~ N(f_mean, f_sd²).

    A Poisson count is at most y where a Gamma(y + 1) variable G exceeds its rate, so that

        P(Y ≤ y) = E_f[P(G > softplus(f))] = E_G[P(f < softplus⁻¹(G))].

    The integrand varies on the scale √y in the first form and f_sd in the second; the quadrature
    uses the variable with the narrower distribution, so that its nodes resolve the integrand.
    """

    mean: Values
    sd: Values
    f_mean: Values
    f_sd: Values

    def cdf(self, y: Values) -> Values:
        return 0.5 * (self._below(y) + self._below(y - 1))

    def quantile(self, p: float) -> Values:
        """Return the least integer y of each row with P(Y ≤ y) ≥ p, by bisection."""
        low = np.full(len(self.mean), -1.0)
        high = np.ceil(self.mean + 10 * self.sd + 10)
        while (short := self._below(high) < p).any():
            low, high = np.where(short, high, low), np.where(short, 2 * high, high)
        while (high - low > 1).any():
            middle = np.floor((low + high) / 2)
            enough = self._below(middle) >= p
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        return high

    def _below(self, y: Values) -> Values:
        """Return P(Y ≤ y) of each row."""
        y = np.floor(y)
        below, possible = np.zeros(len(self.mean)), y >= 0
        narrow = self.f_sd <= np.sqrt(np.maximum(y, 0) + 1)
        for rows, integral in ((narrow, _over_f), (~narrow, _over_rates)):
            used = rows & possible
            if used.any():
                below[used] = integral(y[used], self.f_mean[used], self.f_sd[used])
        return below


def _over_f(y: Values, mean: Values, sd: Values) -> Values:
    """Return E_f[P(G > softplus(f))] by Gauss–Hermite quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
    rates = np.logaddexp(0, mean + sd * nodes[:, None])
    return weights / weights.sum() @ poisson.cdf(y, rates)


def _over_rates(y: Values, mean: Values, sd: Values) -> Values:
    """Return E_G[P(f < softplus⁻¹(G))] by the trapezoidal rule over h = softplus⁻¹(G).

    The density of h is proportional to p(y | h) σ(h).
    """
    typical = y + 0.5
    centre = typical + np.log(-np.expm1(-typical))
    # The scale is √y for large counts; the tails of small counts decrease as eʰ.
    h = centre + (np.sqrt(y + 1) + 3) * np.linspace(-9, 9, 2 * _NODES + 1)[:, None]
    weights = poisson.pmf(y, np.logaddexp(0, h)) * expit(h)
    return (weights * ndtr((h - mean) / sd)).sum(0) / weights.sum(0)


def predictive(model: SparseGPRegressor, X: Any) -> Predictive:
    """Return the predictive distribution of a regressor of one target, Gaussian or counts."""
    mean, sd = model.predict(X, return_std=True)
    if model.likelihood == "gaussian":
        return GaussianPredictive(mean, sd)
    if model.likelihood != "poisson":
        raise InputError(
            "`likelihood` must be 'gaussian' or 'poisson' for predictive intervals; "
            f"got {model.likelihood!r}."
        )
    f_mean, f_sd = model.predict(X, return_std=True, observed=False)
    return CountPredictive(mean, sd, f_mean, f_sd)


def regression_quality(
    model: SparseGPRegressor, X: Values, y: Values, *, y_train: Values
) -> Quality:
    """Return errors, log density, coverage of intervals and residuals on held-out rows."""
    observation = predictive(model, X)
    shown = np.linspace(0, len(y) - 1, min(len(y), MOST_RESIDUALS)).astype(int)
    return {
        "rows": len(y),
        "metrics": [
            _metric("RMSE", _rmse(y, observation.mean), _rmse(y, y_train.mean()), "lower"),
            _metric("R²", r_squared(y, observation.mean), r_squared(y, y_train.mean()), "higher"),
            _metric(
                "log density per observation",
                float(model.log_density(X, y).mean()),
                float(constant_densities(model, y, y_train).mean()),
                "higher",
            ),
        ],
        "coverage": [(level, _covered(observation, y, level)) for level in LEVELS],
        "pit": np.histogram(observation.cdf(y), bins=BINS, range=(0, 1))[0].tolist(),
        "residuals": {
            "actual": y[shown].tolist(),
            "predicted": observation.mean[shown].tolist(),
            "sd": observation.sd[shown].tolist(),
        },
        "reliability": [],
        "confusion": None,
    }


def classification_quality(
    model: SparseGPClassifier, X: Values, labels: NDArray[Any], *, train_labels: NDArray[Any]
) -> Quality:
    """Return accuracy, log probability, reliability and the confusion matrix on held-out rows."""
    classes = model.classes_
    probability = model.predict_proba(X)
    best = probability.argmax(1)
    shares = np.array([(train_labels == c).mean() for c in classes])
    truth = labels[:, None] == classes
    constant = constant_class_densities(classes, labels, train_labels).mean()
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
                "log probability per observation",
                float(class_densities(model, X, labels).mean()),
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


def r_squared(y: Values, predicted: Any) -> float:
    """Return the share of the variance of y that predictions explain; 0 for constant targets."""
    spread = np.mean((y - y.mean()) ** 2)
    return float(1 - np.mean((y - predicted) ** 2) / spread) if spread > 0 else 0.0


def constant_densities(model: SparseGPRegressor, y: Values, y_train: Values) -> Values:
    """Return the log density of each row under one Gaussian or Poisson distribution for all.

    The Gaussian is no narrower than the least noise of the model, because a constant target would
    have a baseline of infinite density.
    """
    if model.likelihood == "poisson":
        return poisson.logpmf(y, max(y_train.mean(), 1e-12))
    least = sqrt(LEAST_NOISE) * model._y_scaler.columns.scale.item()
    return norm.logpdf(y, y_train.mean(), max(y_train.std(), least))


def class_densities(model: SparseGPClassifier, X: Values, labels: NDArray[Any]) -> Values:
    """Return the log probability of each label, at least log 1e-12."""
    return np.maximum(model.log_density(X, labels), np.log(_LEAST_PROBABILITY))


def constant_class_densities(
    classes: NDArray[Any], labels: NDArray[Any], train_labels: NDArray[Any]
) -> Values:
    """Return the log of the share of each label among the training rows, at least log 1e-12."""
    shares = np.array([(train_labels == c).mean() for c in classes])
    return np.log(np.maximum((labels[:, None] == classes) @ shares, _LEAST_PROBABILITY))


def _covered(observation: Predictive, y: Values, level: float) -> float:
    lower, upper = observation.interval(level)
    return float(((y >= lower) & (y <= upper)).mean())


def _reliability(probability: Values, truth: NDArray[np.bool_]) -> list[Reliability]:
    """Return predicted probabilities and frequencies in bins of equal width.

    All classes are counted; of two, the second one only.
    """
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
