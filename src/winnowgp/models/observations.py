"""The interface of observation models, integrated by quadrature, and user-defined likelihoods.

An observation model computes the expected log probability, the predictive log density and the
predictive moments, distribution function and quantiles of p(y | f) under independent Gaussian
latents. Gauss-Hermite quadrature is accurate where the likelihood is not much narrower than q(f);
`likelihoods` has the models with a closed or a more accurate form. Nothing here draws a random
number. `gaussian_noise` is the likelihood of models that need no integrals.
"""

from dataclasses import dataclass
from typing import Any, final

import torch
from gpytorch.constraints import GreaterThan
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from gpytorch.likelihoods.noise_models import MultitaskHomoskedasticNoise
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution, Normal

from winnowgp.data import MaskedMatrix
from winnowgp.errors import InputError
from winnowgp.models import quadrature
from winnowgp.typing import TargetNoise

LEAST_NOISE = 1e-6
"""Smallest noise variance that is learnt; for standardised targets in the estimators."""

# Gauss-Hermite nodes for E[log p(y | f)], and for densities, which are narrower than q(f).
EXPECTATION_NODES, DENSITY_NODES = 20, 100

# Quantiles that are found at once: with 337 nodes, the most, 44 MiB.
_QUANTILE_NUMBERS = 2**14


@dataclass(frozen=True, slots=True)
class Prediction:
    """Mean and variance of each row and output."""

    mean: Float[Tensor, "*S N P"]
    variance: Float[Tensor, "*S N P"]


@dataclass(frozen=True)
class ObservationModel:
    """p(y | f) with one latent function per target column, integrated by Gauss-Hermite quadrature.

    Subclasses replace the integrals that have a closed or a more accurate form.
    """

    likelihood: Any
    """The GPyTorch likelihood."""

    def for_mixture(self, components: int) -> "ObservationModel":
        """Return a model for rows that are components of mixtures, which may use fewer nodes."""
        return self

    def num_latents(self, targets: int) -> int:
        """Return the number of latent functions for this number of target columns."""
        return targets

    def check_targets(self, Y: Float[Tensor, "N P"]) -> None:
        """Raise an `InputError` if the likelihood gives some target zero probability."""

    def initial_precision(self) -> Tensor | None:
        """Return the precision of Gaussian sites to start inference from, or None."""
        return None

    def expected_log_prob(
        self,
        Y: Float[Tensor, "N P"],
        mean: Float[Tensor, "*S N F"],
        variance: Float[Tensor, "*S N F"],
    ) -> Float[Tensor, "*S N P"]:
        """Return E_q(f)[log p(y | f)] of each row and target, in nats.

        q(f) has F independent Gaussians per row.
        """
        z, weights = quadrature.hermite_nodes(EXPECTATION_NODES, mean)
        f = mean + quadrature.standard_deviation(variance) * z
        return (weights * self._given(f, "expected_log_prob").log_prob(Y)).sum(0)

    def log_density(
        self,
        Y: Float[Tensor, "N P"],
        mean: Float[Tensor, "N F"],
        variance: Float[Tensor, "N F"],
    ) -> Float[Tensor, "N P"]:
        """Return log E_q(f)[p(y | f)] of each row and target, in nats."""
        z, weights = quadrature.hermite_nodes(DENSITY_NODES, mean)
        f = mean + quadrature.standard_deviation(variance) * z
        return (self._given(f, "log_marginal").log_prob(Y) + weights.log()).logsumexp(0)

    def predict(self, mean: Float[Tensor, "N F"], variance: Float[Tensor, "N F"]) -> Prediction:
        """Return mean and variance of a new observation of each row.

        Classes have one column each, whose mean is the class probability.
        """
        z, weights = quadrature.hermite_nodes(DENSITY_NODES, mean)
        return self._moments(mean + quadrature.standard_deviation(variance) * z, weights)

    def cdf(
        self,
        Y: Float[Tensor, "*Q N P"],
        mean: Float[Tensor, "N F"],
        variance: Float[Tensor, "N F"],
    ) -> Float[Tensor, "*Q N P"]:
        """Return P(y ≤ Y) = E_q(f)[P(y ≤ Y | f)] of each row and target."""
        z, weights = quadrature.hermite_nodes(DENSITY_NODES, Y)
        f = mean + quadrature.standard_deviation(variance) * z
        return (weights * quadrature.distribution_cdf(self._given(f, "marginal"), Y)).sum(0)

    def quantiles(
        self,
        mean: Float[Tensor, "*S N F"],
        variance: Float[Tensor, "*S N F"],
        probabilities: Float[Tensor, " Q"],
    ) -> Float[Tensor, "Q N P"]:
        """Return the least y of each row and target with P(y ≤ Y) ≥ p, by inverting `cdf`.

        Args:
            mean: means of q(f); leading axes are components of a mixture with equal weights.
            variance: variances of q(f).
            probabilities: strictly between 0 and 1.
        """
        quadrature.check_probabilities(probabilities)
        components = mean[None].flatten(0, -3), variance[None].flatten(0, -3)
        # Blocks of rows bound the memory of the quadrature.
        rows = max(1, _QUANTILE_NUMBERS // (len(probabilities) * mean.shape[-1]))
        blocks = zip(*(part.split(rows, dim=1) for part in components), strict=True)
        return torch.cat([self._quantiles(m, v, probabilities) for m, v in blocks], dim=1)

    def _quantiles(
        self,
        mean: Float[Tensor, "S N F"],
        variance: Float[Tensor, "S N F"],
        probabilities: Float[Tensor, " Q"],
    ) -> Float[Tensor, "Q N P"]:
        moments = [self.predict(m, v) for m, v in zip(mean, variance, strict=True)]
        means = torch.stack([moment.mean for moment in moments])
        variances = torch.stack([moment.variance for moment in moments])
        width = (variances + (means - means.mean(0)).square()).mean(0).sqrt()
        # A distribution such as Cauchy's has no moments.
        known = means.isfinite().all(0) & width.isfinite() & (width > 0)
        ends, discrete = quadrature.support(self._predictive(mean[0], variance[0]))

        def mixture_cdf(Y: Tensor, rows: Tensor) -> Tensor:
            parts = zip(mean[:, rows], variance[:, rows], strict=True)
            return sum((self.cdf(Y, m, v) for m, v in parts), Y.new_zeros(())) / len(mean)

        return quadrature.invert(
            mixture_cdf,
            probabilities,
            # The first latent function of a target is its level.
            centre=torch.where(known, means.mean(0), mean.mean(0)[:, : means.shape[-1]]),
            width=torch.where(known, width, 1.0),
            support=ends,
            discrete=discrete,
        )

    def _predictive(self, mean: Tensor, variance: Tensor) -> Distribution:
        """Return a distribution with the support of the predictive distribution."""
        return self._given(mean, "marginal")

    def coupling(
        self, mean: Float[Tensor, "N F"], variance: Float[Tensor, "N F"]
    ) -> Float[Tensor, "N F F"] | None:
        """Return −∂²E/∂μ∂μᵀ of E = E_q(f)[log p(y | f)]; None if each latent acts alone."""
        return None

    def _moments(self, f: Float[Tensor, "T N P"], weights: Tensor) -> Prediction:
        """Return mean and variance of y, with Var y = E Var[y | f] + Var E[y | f]."""
        y = self._given(f, "marginal")
        mean = (weights * y.mean).sum(0)
        return Prediction(mean, (weights * (y.variance + (y.mean - mean).square())).sum(0))

    def _given(self, f: Tensor, method: str) -> Distribution:
        """Return p(y | f), or name the `method` that a likelihood without it must define."""
        try:
            return self.likelihood.forward(f)
        except NotImplementedError as error:
            raise InputError(
                f"`likelihood` must define `forward`, p(y | f), or `{method}`; "
                f"{type(self.likelihood).__name__} has neither."
            ) from error


@final
@dataclass(frozen=True)
class UserDefinedObservations(ObservationModel):
    """A user's class; methods that it defines itself take precedence over quadrature."""

    parent: ObservationModel
    """The model of the GPyTorch class it derives from, which has the same targets."""

    def check_targets(self, Y: Float[Tensor, "N P"]) -> None:
        self.parent.check_targets(Y)

    def initial_precision(self) -> Tensor | None:
        return self.parent.initial_precision()

    def expected_log_prob(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        if not is_user_defined(self.likelihood, "expected_log_prob"):
            return super().expected_log_prob(Y, mean, variance)
        nats = self.likelihood.expected_log_prob(
            Y, Normal(mean, quadrature.standard_deviation(variance))
        )
        return self._checked(nats, mean, "expected_log_prob")

    def log_density(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        if not is_user_defined(self.likelihood, "log_marginal"):
            return super().log_density(Y, mean, variance)
        nats = self.likelihood.log_marginal(
            Y, Normal(mean, quadrature.standard_deviation(variance))
        )
        return self._checked(nats, mean, "log_marginal")

    def predict(self, mean: Tensor, variance: Tensor) -> Prediction:
        if not is_user_defined(self.likelihood, "marginal"):
            return super().predict(mean, variance)
        y = self._predictive(mean, variance)
        return Prediction(*(self._checked(m, mean, "marginal") for m in (y.mean, y.variance)))

    def cdf(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        if not is_user_defined(self.likelihood, "marginal"):
            return super().cdf(Y, mean, variance)
        return quadrature.distribution_cdf(self._predictive(mean, variance), Y)

    def _predictive(self, mean: Tensor, variance: Tensor) -> Distribution:
        if not is_user_defined(self.likelihood, "marginal"):
            return super()._predictive(mean, variance)
        return self.likelihood.marginal(Normal(mean, quadrature.standard_deviation(variance)))

    def _checked(self, values: Tensor, like: Tensor, method: str) -> Tensor:
        if values.shape != like.shape:
            raise InputError(
                f"`{method}` of {type(self.likelihood).__name__} must return one number for each "
                f"row and target, of shape {list(like.shape)}; got {list(values.shape)}."
            )
        return values


def is_user_defined(likelihood: Likelihood, method: str) -> bool:
    """Return whether a method is defined outside GPyTorch."""
    owner = next(kind for kind in type(likelihood).__mro__ if method in vars(kind))
    return not owner.__module__.startswith("gpytorch.")


def fill_with_observed(table: MaskedMatrix) -> Float[Tensor, "N P"]:
    """Return the table with missing entries replaced by one of its observed values.

    Likelihoods must be evaluated at possible targets, also where the result is masked afterwards.
    """
    observed = table.Y[table.observed]
    return table.filled(observed[0].item() if len(observed) else 0.0)


def gaussian_noise(
    start: Float[Tensor, ""] | Float[Tensor, " P"],
) -> GaussianLikelihood:
    """Return a Gaussian likelihood with one noise variance for all targets, or one for each.

    The second has GPyTorch's `MultitaskHomoskedasticNoise`; its `noise` is a vector, which
    broadcasts against targets `[N P]`.

    Args:
        start: initial variances, one number or `[P]`.
    """
    if not bool((start > LEAST_NOISE).all()):
        raise InputError(
            f"`noise` is a variance and must exceed {LEAST_NOISE}; got {start.min().item()}."
        )
    likelihood = GaussianLikelihood(noise_constraint=GreaterThan(LEAST_NOISE))
    if start.dim() == 0:
        likelihood.to(start)
        likelihood.noise = start
        return likelihood
    likelihood.noise_covar = MultitaskHomoskedasticNoise(
        len(start), noise_constraint=GreaterThan(LEAST_NOISE)
    )
    likelihood.to(start)
    likelihood.noise_covar.initialize(noise=start)
    return likelihood


def target_noise(likelihood: Likelihood) -> TargetNoise:
    """Return the noise variance of a Gaussian likelihood: a scalar, or one for each target."""
    assert isinstance(likelihood, GaussianLikelihood)
    shared = not isinstance(likelihood.noise_covar, MultitaskHomoskedasticNoise)
    return likelihood.noise.reshape(()) if shared else likelihood.noise


def examples(values: Tensor) -> str:
    """Return a few different values, for an error message."""
    return ", ".join(f"{v:g}" for v in values.unique()[:5].tolist())
