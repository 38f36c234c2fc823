"""Likelihoods by name."""

from typing import TypeGuard

from gpytorch.likelihoods import (
    GaussianLikelihood,
    LaplaceLikelihood,
    Likelihood,
    PoissonLikelihood,
    StudentTLikelihood,
)

from winnowgp.errors import InputError

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
    if isinstance(likelihood, Likelihood):
        return likelihood
    if not isinstance(likelihood, str) or likelihood not in LIKELIHOODS:
        raise InputError(
            f"`likelihood` must be one of {', '.join(LIKELIHOODS)} or a GPyTorch likelihood; "
            f"got {likelihood!r}."
        )
    return LIKELIHOODS[likelihood]()


def has_noise(
    likelihood: Likelihood,
) -> TypeGuard[GaussianLikelihood | StudentTLikelihood | LaplaceLikelihood]:
    """Whether targets are the latent function plus noise; they can then be standardised."""
    return isinstance(likelihood, GaussianLikelihood | StudentTLikelihood | LaplaceLikelihood)
