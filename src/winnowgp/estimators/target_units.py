"""Targets as users have them, and as models see them."""

from dataclasses import dataclass
from typing import Any, final

import numpy as np
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from winnowgp.data import Dataset, Standardiser
from winnowgp.errors import InputError
from winnowgp.estimators.likelihoods import has_noise
from winnowgp.estimators.tensors import tensor
from winnowgp.models import check_targets


@final
@dataclass(frozen=True, slots=True)
class TargetUnits:
    """z = (y − shift) / scale, column by column; a single target has no axis of outputs outside.

    Only where targets are the function plus noise: counts and shares stay what they are.

    >>> import torch
    >>> from gpytorch.likelihoods import GaussianLikelihood
    >>> data = Dataset.of(torch.zeros(2, 1).double(), torch.tensor([1.0, 3.0]).double())
    >>> units = TargetUnits.of(data, GaussianLikelihood(), single=True)
    >>> Y = units.columns.forward(data.Y)
    >>> Y.tolist(), units.values(Y).tolist(), units.deviations(Y).tolist()
    ([[-1.0], [1.0]], [1.0, 3.0], [-1.0, 1.0])
    """

    columns: Standardiser
    single: bool
    """Whether `fit` was given `[N]` rather than `[N P]`."""

    @classmethod
    def of(cls, data: Dataset, likelihood: Likelihood, *, single: bool) -> "TargetUnits":
        """The units of checked targets."""
        if not has_noise(likelihood):
            return cls(Standardiser.none(data.Y), single)
        return cls(Standardiser.of(data.Y, weights=data.weights), single)

    @property
    def P(self) -> int:
        """Number of target columns."""
        return len(self.columns.shift)

    def seen(
        self, y: Any, likelihood: Likelihood, *, inputs: Float[Tensor, "N D"]
    ) -> Float[Tensor, "N P"]:
        """Targets to be scored, as the model sees them; an error if they do not fit."""
        Y = Dataset.of(inputs, tensor(y)).Y
        if Y.shape[1] != self.P:
            raise InputError(
                f"`y` must have {self.P} target columns as in `fit`; got {Y.shape[1]}."
            )
        Y = self.columns.forward(Y)
        check_targets(likelihood, Y)
        return Y

    def values(self, Y: Float[Tensor, "*S P"]) -> NDArray[np.float64]:
        """Means, quantiles and draws."""
        return self._outside(self.columns.inverse(Y))

    def deviations(self, sd: Float[Tensor, "*S P"]) -> NDArray[np.float64]:
        """Standard deviations."""
        return self._outside(sd * self.columns.scale)

    def variances(self, variance: Float[Tensor, "*S P"]) -> NDArray[np.float64]:
        """Variances and covariances."""
        return self._outside(variance * self.columns.scale.square())

    def log_densities(self, nats: Float[Tensor, "*S P"]) -> NDArray[np.float64]:
        """log p(y) = log p(z) − log scale."""
        return self._outside(nats - self.columns.scale.log())

    def noise(self, likelihood: Likelihood) -> NDArray[np.float64]:
        """Noise variance of each target, `[P]`; NaN where the likelihood has none."""
        if not has_noise(likelihood):
            return np.full(self.P, np.nan)
        return (likelihood.noise * self.columns.scale.square()).detach().numpy()

    def _outside(self, values: Tensor) -> NDArray[np.float64]:
        """Without the output axis, the last one, if there was none in `fit`."""
        return (values[..., 0] if self.single else values).numpy()
