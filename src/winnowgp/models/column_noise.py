"""Gaussian noise of one variance for all columns of a table, or one for each."""

from gpytorch.constraints import GreaterThan
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.likelihoods.noise_models import MultitaskHomoskedasticNoise
from jaxtyping import Float
from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.models.sparse_gp import LEAST_NOISE


def gaussian_noise(start: Float[Tensor, " columns"]) -> GaussianLikelihood:
    """A Gaussian likelihood that learns as many variances as `start` has, one or P.

    Its `noise` is a vector, which stands next to tables `[N P]` column by column.
    """
    if not bool((start > LEAST_NOISE).all()):
        raise InputError(
            f"`noise` is a variance and must exceed {LEAST_NOISE}; got {start.min().item()}."
        )
    likelihood = GaussianLikelihood()
    likelihood.noise_covar = MultitaskHomoskedasticNoise(
        len(start), noise_constraint=GreaterThan(LEAST_NOISE)
    )
    likelihood.to(start)
    likelihood.noise_covar.initialize(noise=start)
    return likelihood
