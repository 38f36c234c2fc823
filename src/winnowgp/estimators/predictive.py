"""Predictive distributions of observations, for intervals and calibration."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, ndtr
from scipy.stats import norm, poisson

from winnowgp.errors import InputError
from winnowgp.estimators.sparse_gp_regressor import SparseGPRegressor

Values = NDArray[np.float64]
_NODES = 64


class Predictive(ABC):
    """The distribution of a new observation of each row."""

    mean: Values
    sd: Values

    @abstractmethod
    def cdf(self, y: Values) -> Values:
        """P(Y < y) + ½ P(Y = y) of each row: uniform on average if the model is right."""

    @abstractmethod
    def quantile(self, p: float) -> Values:
        """The least y with P(Y ≤ y) ≥ p."""

    def interval(self, level: float) -> tuple[Values, Values]:
        """Central interval that holds a new observation with probability `level`."""
        if not 0 < level < 1:
            raise InputError(f"`level` must lie between 0 and 1, such as 0.95; got {level}.")
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)


@final
@dataclass(frozen=True, slots=True)
class GaussianPredictive(Predictive):
    """N(mean, sd²)."""

    mean: Values
    sd: Values

    def cdf(self, y: Values) -> Values:
        return norm.cdf((y - self.mean) / self.sd)

    def quantile(self, p: float) -> Values:
        return self.mean + norm.ppf(p) * self.sd


@final
@dataclass(frozen=True, slots=True)
class CountPredictive(Predictive):
    """Poisson counts of rate softplus(f), f ~ N(f_mean, f_sd²).

    A Poisson count is at most y where a Gamma(y + 1) variable G exceeds its rate, so that

        P(Y ≤ y) = E_f[P(G > softplus(f))] = E_G[P(f < softplus⁻¹(G))].

    What is inside changes over √y in the first form and over f_sd in the second; nodes are taken
    of whichever variable is narrower, and none falls between them.
    """

    mean: Values
    sd: Values
    f_mean: Values
    f_sd: Values

    def cdf(self, y: Values) -> Values:
        return 0.5 * (self._below(y) + self._below(y - 1))

    def quantile(self, p: float) -> Values:
        """Bisection over whole numbers."""
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
        """P(Y ≤ y) of each row."""
        y = np.floor(y)
        below, possible = np.zeros(len(self.mean)), y >= 0
        narrow = self.f_sd <= np.sqrt(np.maximum(y, 0) + 1)
        for rows, integral in ((narrow, _over_f), (~narrow, _over_rates)):
            used = rows & possible
            if used.any():
                below[used] = integral(y[used], self.f_mean[used], self.f_sd[used])
        return below


def _over_f(y: Values, mean: Values, sd: Values) -> Values:
    """E_f[P(G > softplus(f))] by Gauss and Hermite."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
    rates = np.logaddexp(0, mean + sd * nodes[:, None])
    return weights / weights.sum() @ poisson.cdf(y, rates)


def _over_rates(y: Values, mean: Values, sd: Values) -> Values:
    """E_G[P(f < softplus⁻¹(G))] by trapezia over h = softplus⁻¹(G), of density p(y | h) σ(h)."""
    typical = y + 0.5
    centre = typical + np.log(-np.expm1(-typical))
    # A share of √y for large counts; the tails of small ones fall as eʰ.
    h = centre + (np.sqrt(y + 1) + 3) * np.linspace(-9, 9, 2 * _NODES + 1)[:, None]
    weights = poisson.pmf(y, np.logaddexp(0, h)) * expit(h)
    return (weights * ndtr((h - mean) / sd)).sum(0) / weights.sum(0)


def predictive(model: SparseGPRegressor, X: Any) -> Predictive:
    """Of a regressor with Gaussian noise or counts and one target."""
    mean, sd = model.predict(X, return_std=True)
    if model.likelihood == "gaussian":
        return GaussianPredictive(mean, sd)
    if model.likelihood != "poisson":
        raise InputError(
            f"intervals are for `likelihood` 'gaussian' or 'poisson'; got {model.likelihood!r}."
        )
    f_mean, f_sd = model.predict(X, return_std=True, observed=False)
    return CountPredictive(mean, sd, f_mean, f_sd)
