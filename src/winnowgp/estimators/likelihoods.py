"""Likelihoods by name."""

from typing import TypeGuard

from gpytorch.constraints import GreaterThan
from gpytorch.likelihoods import (
    GaussianLikelihood,
    LaplaceLikelihood,
    Likelihood,
    PoissonLikelihood,
    SoftmaxLikelihood,
    StudentTLikelihood,
)

from winnowgp.errors import InputError
from winnowgp.models import LEAST_NOISE
from winnowgp.models.observations import is_plain

LIKELIHOODS = {
    "gaussian": GaussianLikelihood,
    "student-t": StudentTLikelihood,
    "laplace": LaplaceLikelihood,
    "poisson": PoissonLikelihood,
}


def likelihood_from(likelihood: str | Likelihood) -> Likelihood:
    """A likelihood by name, or the one given; whoever keeps it copies it.

    >>> likelihood_from("student-t").deg_free.item()
    7.0
    """
    if isinstance(likelihood, SoftmaxLikelihood):
        raise InputError("`likelihood` is softmax, which is for classes; use a classifier.")
    if isinstance(likelihood, Likelihood):
        return likelihood
    if not isinstance(likelihood, str) or likelihood not in LIKELIHOODS:
        raise InputError(
            f"`likelihood` must be one of {', '.join(LIKELIHOODS)} or a GPyTorch likelihood; "
            f"got {likelihood!r}."
        )
    kind = LIKELIHOODS[likelihood]
    if kind is PoissonLikelihood:
        return kind()
    return kind(noise_constraint=GreaterThan(LEAST_NOISE))


def has_noise(
    likelihood: Likelihood,
) -> TypeGuard[GaussianLikelihood | StudentTLikelihood | LaplaceLikelihood]:
    """Whether targets are the latent function plus noise; they can then be standardised."""
    return is_plain(likelihood, GaussianLikelihood, StudentTLikelihood, LaplaceLikelihood)
