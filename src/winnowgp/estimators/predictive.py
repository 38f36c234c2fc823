"""Predictive distributions of observations, for intervals and calibration."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import norm, poisson

from winnowgp.errors import InputError
from winnowgp.estimators.sparse_gp_regressor import SparseGPRegressor

Values = NDArray[np.float64]
_NODES = 32


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
    """A mixture of Poisson distributions: rates `[T N]` with weights `[T]`, by quadrature."""

    mean: Values
    sd: Values
    rates: Values
    weights: Values

    def cdf(self, y: Values) -> Values:
        return self.weights @ (poisson.cdf(y, self.rates) - 0.5 * poisson.pmf(y, self.rates))

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
        return self.weights @ poisson.cdf(y, self.rates)


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
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
    f = torch.from_numpy(f_mean + f_sd * nodes[:, None]).clamp_min(-30.0)
    rates = model.likelihood_.forward(f).mean.numpy()
    return CountPredictive(mean, sd, rates, weights / weights.sum())
