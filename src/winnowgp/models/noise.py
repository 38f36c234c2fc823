"""Gaussian noise with one variance for all targets, or one for each."""

from gpytorch.constraints import GreaterThan
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from gpytorch.likelihoods.noise_models import MultitaskHomoskedasticNoise
from jaxtyping import Float
from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.typing import TargetNoise

LEAST_NOISE = 1e-6
"""Smallest noise variance that is learnt; for standardised targets in the estimators."""


def gaussian_noise(start: Float[Tensor, ""] | Float[Tensor, " P"]) -> GaussianLikelihood:
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
