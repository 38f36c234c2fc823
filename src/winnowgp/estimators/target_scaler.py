"""The units of numeric targets: standardised for training, restored in predictions."""

from dataclasses import dataclass
from typing import Any, final

import numpy as np
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from winnowgp.data import Dataset, Standardiser
from winnowgp.errors import InputError
from winnowgp.estimators import validation
from winnowgp.estimators.rows import tensor
from winnowgp.models.likelihoods import observation_model


@final
@dataclass(frozen=True, slots=True)
class TargetScaler:
    """Standardises numeric targets: z = (y − shift) / scale, column by column.

    Targets are scaled only if they are the latent function plus noise; counts and proportions stay
    as they are.

    >>> import torch
    >>> from gpytorch.likelihoods import GaussianLikelihood
    >>> data = Dataset.of(torch.zeros(2, 1).double(), torch.tensor([1.0, 3.0]).double())
    >>> scaler = TargetScaler.of(data, GaussianLikelihood(), single=True)
    >>> Z = scaler.columns.forward(data.Y)
    >>> Z.tolist(), scaler.values(Z).tolist(), scaler.deviations(Z).tolist()
    ([[-1.0], [1.0]], [1.0, 3.0], [-1.0, 1.0])
    """

    columns: Standardiser
    single: bool
    """Whether targets were passed to `fit` as `[N]` rather than `[N P]`."""
    log: bool = False
    """Whether the logarithm of the targets is standardised, rather than the targets."""

    @classmethod
    def of(cls, data: Dataset, likelihood: Likelihood, *, single: bool) -> "TargetScaler":
        """Return the scaler of the targets of some rows."""
        if not validation.has_noise(likelihood):
            return cls(Standardiser.none(data.Y), single)
        return cls(Standardiser.of(data.Y, weights=data.weights), single)

    @property
    def P(self) -> int:
        """Number of target columns."""
        return len(self.columns.shift)

    def standardise(
        self, y: Any, likelihood: Likelihood, *, inputs: Float[Tensor, "N D"]
    ) -> Float[Tensor, "N P"]:
        """Validate targets that are to be scored, and standardise them."""
        Y = Dataset.of(inputs, tensor(y), missing=self.P > 1).Y
        if Y.shape[1] != self.P:
            raise InputError(
                f"`y` must have {self.P} target columns as in `fit`; got {Y.shape[1]}."
            )
        Y = self.columns.forward(logarithm(Y) if self.log else Y)
        observation_model(likelihood).check_targets(Y)
        return Y

    def values(self, Y: Float[Tensor, "*S P"]) -> NDArray[np.float64]:
        """Return quantiles or samples, or without a logarithm means, in the targets' units."""
        values = self.columns.inverse(Y)
        return self._array(values.exp() if self.log else values)

    def moments(
        self, mean: Float[Tensor, "N P"], variance: Float[Tensor, "N P"]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return mean and standard deviation of y; log-normal if log y is Gaussian.

        E y = exp(m + v/2),   Var y = (E y)² (eᵛ − 1)
        """
        if not self.log:
            return self.values(mean), self.deviations(variance.sqrt())
        v = variance * self.columns.scale.square()
        level = (self.columns.inverse(mean) + 0.5 * v).exp()
        return self._array(level), self._array(level * v.expm1().sqrt())

    def joint_moments(
        self, mean: Float[Tensor, "N P"], covariance: Float[Tensor, "N N P"]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return mean and covariance of y; if log y is Gaussian, E yᵢ E yⱼ (exp Cᵢⱼ − 1)."""
        if not self.log:
            return self.values(mean), self.variances(covariance)
        C = covariance * self.columns.scale.square()
        level = (self.columns.inverse(mean) + 0.5 * C.diagonal().mT).exp()
        return self._array(level), self._array(level[:, None] * level * C.expm1())

    def deviations(self, sd: Float[Tensor, "*S P"]) -> NDArray[np.float64]:
        """Return standard deviations in the units of the targets."""
        return self._array(sd * self.columns.scale)

    def variances(self, variance: Float[Tensor, "*S P"]) -> NDArray[np.float64]:
        """Return variances or covariances in the squared units of the targets."""
        return self._array(variance * self.columns.scale.square())

    def log_densities(
        self, nats: Float[Tensor, "N P"], Y: Float[Tensor, "N P"]
    ) -> NDArray[np.float64]:
        """Return log densities of the targets: log p(y) = log p(z) − log scale, and − log y if
        z is their standardised logarithm.

        Args:
            nats: log densities of the standardised targets.
            Y: standardised targets.
        """
        nats = nats - self.columns.scale.log()
        return self._array(nats - self.columns.inverse(Y) if self.log else nats)

    def noise(self, likelihood: Likelihood) -> NDArray[np.float64]:
        """Return the noise variance of each target or its logarithm, `[P]`; NaN without noise."""
        if not validation.has_noise(likelihood):
            return np.full(self.P, np.nan)
        return (likelihood.noise * self.columns.scale.square()).detach().numpy()

    def _array(self, values: Tensor) -> NDArray[np.float64]:
        """Drop the last axis, that of the targets, if `fit` received targets `[N]`."""
        return (values[..., 0] if self.single else values).numpy()


def logarithm(
    Y: Float[Tensor, "*shape"], rows: NDArray[np.intp] | None = None
) -> Float[Tensor, "*shape"]:
    """Return log Y, or raise an error that names the first row that is not positive.

    Args:
        rows: index of each target among the user's rows; they are all of them by default.
    """
    wrong = (Y <= 0).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        row = at[0] if rows is None else int(rows[at[0]])
        raise InputError(
            f"`log_target` needs positive targets; got {Y[at]:g} in row {row + 1}. Leave such "
            "rows out, add a constant to the target, or fit without the logarithm."
        )
    return Y.log()
