"""Noise that depends on the inputs, and its prediction, for the sparse GP regressor."""

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood
from numpy.typing import NDArray

from winnowgp.errors import InputError
from winnowgp.estimators import validation
from winnowgp.estimators.base import check_kernel_columns, rows_at_once
from winnowgp.estimators.kernels import kernel_from, parse_kernel
from winnowgp.estimators.numeric_targets import NumericTargets
from winnowgp.models import MixturePosterior, Posterior, SparseGP, VariationalGP
from winnowgp.models.heteroscedastic import (
    HeteroscedasticGP,
    HeteroscedasticPosterior,
    LogVarianceLikelihood,
)
from winnowgp.models.likelihoods import HeteroscedasticLikelihood
from winnowgp.models.priors import add_weak_priors


@dataclass(kw_only=True, eq=False, repr=False)
class VaryingNoise(NumericTargets, ABC):
    """The base class of regressors whose Gaussian noise may depend on the inputs.

    Args:
        noise_kernel: kernel of the log noise variance for `likelihood="heteroscedastic"`: a string
            or a GPyTorch kernel for standardised inputs, as for `kernel`. The log noise has
            inducing points of its own, as few as `tolerance` allows; none if noise does not vary.
    """

    noise_kernel: Any = "rbf"

    @property
    def n_noise_inducing_(self) -> int:
        """Number of inducing points of the log noise; zero if noise does not vary."""
        return self._log_noise("n_noise_inducing_").M

    @property
    def noise_inducing_points_(self) -> NDArray[np.float64]:
        """Locations of the inducing points of the log noise, `[M D]`."""
        return self._x_scaler.inverse(self._log_noise("noise_inducing_points_").Z).numpy()

    @torch.no_grad()
    def predict_noise(self, X: Any) -> NDArray[np.float64]:
        """Return the standard deviation of the noise of each row, `[N]` or `[N P]`.

        With `likelihood="heteroscedastic"` it is the root of the expected noise variance, so that
        the variance of an observation is the sum of its square and that of the function.

        Args:
            X: inputs `[N D]`.
        """
        inputs = self._inputs(X)
        self._refuse_logarithm("noise in the units of the targets")
        if not isinstance(self.likelihood_, GaussianLikelihood | HeteroscedasticLikelihood):
            raise InputError(
                "`predict_noise` needs Gaussian noise, 'gaussian' or 'heteroscedastic'; got "
                f"`likelihood={self.likelihood!r}`."
            )
        if isinstance(self.posterior_, MixturePosterior):
            variance = self.posterior_.noise.expand(len(inputs), self.posterior_.P)
        elif not isinstance(self.posterior_, HeteroscedasticPosterior):
            variance = self.likelihood_.noise.expand(len(inputs), self.posterior_.P)
        else:
            chunks = inputs.split(rows_at_once(self.posterior_))
            variance = torch.cat([self.posterior_.predict_noise(rows).mean for rows in chunks])
        return self._y_scaler.deviations(variance.sqrt().cpu())

    def _log_noise(self, attribute: str) -> Posterior:
        """Return q(g), or raise an error if the model has none."""
        if not isinstance(getattr(self, "posterior_", None), HeteroscedasticPosterior):
            raise AttributeError(
                f"`{attribute}` exists after a fit with `likelihood='heteroscedastic'` only."
            )
        return self.posterior_.log_noise

    def _constant_noise_posterior(self, what: str) -> Posterior | MixturePosterior:
        """Return q(f) with one noise variance for all rows, which is all that `what` represents."""
        posterior = self.posterior_
        if not isinstance(posterior, HeteroscedasticPosterior):
            return posterior
        if posterior.log_noise.M:
            raise InputError(
                f"{what} cannot represent noise that depends on the inputs; fit with "
                "`likelihood='gaussian'`, or save the model with `save`."
            )
        return posterior.with_constant_noise()


def check_varying_noise(params: validation.Parameters) -> None:
    """Raise an `InputError` if other parameters cannot be used with noise that varies."""
    others = {
        "schedule": ("fast", "the paper's schedule has constant noise"),
        "warm_start": (False, "a fit begins with constant noise"),
        "max_predict_us": (None, "set `max_points` instead"),
    }
    for name, (allowed, why) in others.items():
        if getattr(params, name) != allowed:
            raise InputError(
                f"`{name}` must be {allowed!r} for `likelihood='heteroscedastic'`: {why}; got "
                f"{getattr(params, name)!r}."
            )


def check_noise_kernel(params: validation.Parameters, D: int, *, names: Sequence[str]) -> None:
    """Parse the kernel of the log noise, and check that it can be evaluated on D columns."""
    if isinstance(params.noise_kernel, str):
        # The string may name columns.
        columns = {str(name): [number] for number, name in enumerate(names)}
        params.noise_kernel = parse_kernel(
            params.noise_kernel, D, columns=columns, name="noise_kernel"
        )
    kernel = kernel_from(params.noise_kernel, D, scale=torch.ones(D), name="noise_kernel")
    check_kernel_columns(kernel, D, name="noise_kernel")


def with_log_noise(function: SparseGP, params: validation.Parameters) -> HeteroscedasticGP:
    """Return the model with a process for the log noise, whose candidates the schedule selects."""
    D = function.candidates.shape[1]
    kernel = kernel_from(params.noise_kernel, D, scale=params.x_scaler.scale)
    if params.priors == "weak" and not isinstance(params.noise_kernel, Kernel):
        add_weak_priors(kernel)
    none = function.candidates.detach()[:0]
    log_noise = VariationalGP(kernel, none, likelihood=LogVarianceLikelihood())
    return HeteroscedasticGP(function, log_noise.to(params.device))
