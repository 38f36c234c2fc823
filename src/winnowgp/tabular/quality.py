"""Predictive distributions and held-out quality."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import sqrt
from typing import Any, TypeAlias, final

import numpy as np
import torch
from gpytorch.likelihoods import Likelihood, NegativeBinomialLikelihood, PoissonLikelihood
from numpy.typing import NDArray
from scipy.stats import nbinom, norm, poisson
from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.estimators.classification import ClassTargets, SparseGPClassifier
from winnowgp.estimators.deep import DeepGPClassifier, DeepGPRegressor
from winnowgp.estimators.regression import SparseGPRegressor
from winnowgp.estimators.rows import TargetScaler
from winnowgp.models.likelihoods import is_plain, observation_model, predicted_quantiles
from winnowgp.models.mixture import mixed, mixture_moments
from winnowgp.models.observations import LEAST_NOISE, Prediction
from winnowgp.models.quadrature import gaussian_quantiles
from winnowgp.report.summary import Confusion, Metric, Quality, Reliability

Values = NDArray[np.float64]

LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
BINS = 10
Regressor: TypeAlias = SparseGPRegressor | DeepGPRegressor
TableEstimator: TypeAlias = Regressor | SparseGPClassifier | DeepGPClassifier
"""An estimator of a model of a table."""

MOST_RESIDUALS = 400
"""Held-out rows that are stored for plots, so that a file does not grow with the data."""

_LEAST_PROBABILITY = 1e-12
# Rows whose distribution functions are computed at once.
_ROWS = 4096


@final
@dataclass(frozen=True, slots=True)
class Predictive:
    """The predictive distribution of a new observation of one target at each row."""

    mean: Values
    sd: Values
    _parts: tuple[tuple[Prediction, Likelihood], ...]
    """Latent functions and their likelihood; several are a mixture."""
    _weights: Tensor
    """The weights of the mixture."""
    _scaler: TargetScaler

    def cdf(self, y: Values) -> Values:
        """Return P(Y < y) + ½ P(Y = y) of each row, which is uniform if the model is calibrated."""
        below, up_to = self._ends(y)
        return 0.5 * (below + up_to)

    def quantiles(self, probabilities: Sequence[float]) -> NDArray[np.float64]:
        """Return the least y of each row with P(Y ≤ y) ≥ p, `[Q N]`."""
        wanted = torch.tensor(probabilities, dtype=torch.float64)
        (latent, likelihood), *others = self._parts
        if others:
            if any(other is not likelihood for _, other in others):
                observed = _observed(self._parts)
                return self._scaler.values(
                    gaussian_quantiles(*observed, wanted, weights=self._weights)
                )
            # Samples of a deep GP: one likelihood of a mixture of latent functions.
            latent = Prediction(
                torch.stack([f.mean for f, _ in self._parts]),
                torch.stack([f.variance for f, _ in self._parts]),
            )
            return self._scaler.values(
                predicted_quantiles(likelihood, latent, wanted, observed=True)
            )
        model = observation_model(likelihood)
        return self._scaler.values(model.quantiles(latent.mean, latent.variance, wanted))

    def quantile(self, p: float) -> Values:
        """Return the least y of each row with P(Y ≤ y) ≥ p."""
        return self.quantiles([p])[0]

    def interval(self, level: float) -> tuple[Values, Values]:
        """Return the central interval that contains an observation with probability `level`."""
        if not 0 < level < 1:
            raise InputError(f"`level` must lie between 0 and 1, such as 0.95; got {level}.")
        lower, upper = self.quantiles([(1 - level) / 2, (1 + level) / 2])
        return lower, upper

    def coverage(self, y: Values, levels: Sequence[float]) -> list[float]:
        """Return the share of rows whose observation lies within the interval of each level.

        y is at least the p-quantile if P(Y ≤ y) ≥ p, and at most if P(Y < y) < p.
        """
        below, up_to = self._ends(y)
        return [
            float(((up_to >= (1 - level) / 2) & (below < (1 + level) / 2)).mean())
            for level in levels
        ]

    def _ends(self, y: Values) -> tuple[Values, Values]:
        """Return P(Y < y) and P(Y ≤ y) of each row."""
        latent, likelihood = self._parts[0]
        Y = self._scaler.standardise(y, likelihood, inputs=latent.mean)
        up_to = below = self._cdf(Y)
        if is_plain(likelihood, PoissonLikelihood, NegativeBinomialLikelihood):
            below = torch.where(Y > 0, self._cdf((Y - 1).clamp_min(0)), 0.0)
        return below[:, 0].numpy(), up_to[:, 0].numpy()

    def _cdf(self, Y: Tensor) -> Tensor:
        return mixed(torch.stack([_cdf(Y, *part) for part in self._parts]), self._weights)


def _cdf(Y: Tensor, latent: Prediction, likelihood: Likelihood) -> Tensor:
    model = observation_model(likelihood)
    blocks = (part.split(_ROWS) for part in (Y, latent.mean, latent.variance))
    return torch.cat([model.cdf(*block) for block in zip(*blocks, strict=True)])


def _observed(parts: Sequence[tuple[Prediction, Likelihood]]) -> tuple[Tensor, Tensor]:
    """Return means and variances of an observation under each part, `[S N P]`."""
    each = [observation_model(one).predict(f.mean, f.variance) for f, one in parts]
    return torch.stack([o.mean for o in each]), torch.stack([o.variance for o in each])


def predictive(model: Regressor, X: Any, *, noise_variance: Any = None) -> Predictive:
    """Return the predictive distribution of a regressor of one target, in the target's units.

    Args:
        noise_variance: known noise variances of the observations, if there are any.
    """
    if not model._y_scaler.single:
        raise InputError("predictive distributions need one target; fit one model per target.")
    inputs = model._inputs(X)
    known = model._known_noise(noise_variance, len(inputs))
    # The likelihood adds its own noise to the variance.
    extra = 0.0 if known is None else known.cpu()
    latents = model._latents(inputs)
    # Members of a mixture may share a likelihood.
    copies = {id(likelihood): deepcopy(likelihood).cpu() for _, likelihood, _ in latents}
    parts = tuple(
        (Prediction(latent.mean, latent.variance + extra), copies[id(likelihood)])
        for latent, likelihood, _ in latents
    )
    weights = torch.tensor([weight for *_, weight in latents], dtype=torch.float64)
    observed = mixture_moments(*_observed(parts), weights)
    mean, sd = model._y_scaler.moments(observed.mean, observed.variance)
    return Predictive(mean, sd, parts, weights, model._y_scaler)


def held_out_quality(
    model: TableEstimator,
    X: Values,
    y: NDArray[Any],
    *,
    y_train: NDArray[Any],
    noise_variance: Values | None = None,
) -> Quality:
    """Return the quality of a model on held-out rows, beside that of a constant.

    Args:
        y: targets of the rows, numbers or labels.
        y_train: those of the training rows, which determine the constant.
        noise_variance: known noise variances of the rows, if there are any.
    """
    if isinstance(model, ClassTargets):
        return classification_quality(model, X, y, train_labels=y_train)
    return regression_quality(model, X, y, y_train=y_train, noise_variance=noise_variance)


def regression_quality(
    model: Regressor,
    X: Values,
    y: Values,
    *,
    y_train: Values,
    noise_variance: Values | None = None,
) -> Quality:
    """Return errors, log density, coverage of intervals and residuals on held-out rows."""
    observation = predictive(model, X, noise_variance=noise_variance)
    shown = np.linspace(0, len(y) - 1, min(len(y), MOST_RESIDUALS)).astype(int)
    return {
        "rows": len(y),
        "metrics": [
            _metric("RMSE", _rmse(y, observation.mean), _rmse(y, y_train.mean()), "lower"),
            _metric("R²", r_squared(y, observation.mean), r_squared(y, y_train.mean()), "higher"),
            _metric(
                "log density per observation",
                float(model.log_density(X, y, noise_variance=noise_variance).mean()),
                float(constant_densities(model, y, y_train).mean()),
                "higher",
            ),
        ],
        "coverage": list(zip(LEVELS, observation.coverage(y, LEVELS), strict=True)),
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
    model: ClassTargets, X: Values, labels: NDArray[Any], *, train_labels: NDArray[Any]
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


def constant_densities(model: Regressor, y: Values, y_train: Values) -> Values:
    """Return the log density of each row under one distribution for all.

    It is Gaussian, or Poisson for counts. For a model with a negative binomial likelihood it is
    negative binomial with the mean and the variance of the training rows, if they vary more than
    Poisson counts.
    The Gaussian is no narrower than the least noise of the model, because a constant target would
    have a baseline of infinite density.
    """
    if model.likelihood in ("poisson", "negative-binomial"):
        mean, variance = max(y_train.mean(), 1e-12), y_train.var()
        if model.likelihood == "negative-binomial" and variance > mean:
            # A variance of mean + mean²/r, and a probability of mean/variance.
            return nbinom.logpmf(y, mean**2 / (variance - mean), mean / variance)
        return poisson.logpmf(y, mean)
    scale = model._y_scaler.columns.scale.item()
    # A deviation of log y is relative to the level of y.
    least = sqrt(LEAST_NOISE) * scale * (abs(y_train.mean()) if model._takes_logarithm() else 1.0)
    return norm.logpdf(y, y_train.mean(), max(y_train.std(), least))


def class_densities(model: ClassTargets, X: Values, labels: NDArray[Any]) -> Values:
    """Return the log probability of each label, at least log 1e-12."""
    return np.maximum(model.log_density(X, labels), np.log(_LEAST_PROBABILITY))


def constant_class_densities(
    classes: NDArray[Any], labels: NDArray[Any], train_labels: NDArray[Any]
) -> Values:
    """Return the log of the share of each label among the training rows, at least log 1e-12."""
    shares = np.array([(train_labels == c).mean() for c in classes])
    return np.log(np.maximum((labels[:, None] == classes) @ shares, _LEAST_PROBABILITY))


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
