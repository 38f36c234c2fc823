"""Priors on hyper-parameters, as GPyTorch registers them on kernels, means and likelihoods."""

from math import inf

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from winnowgp.typing import Scalar


def log_prior(model: nn.Module) -> Scalar:
    """Return the log density of the hyper-parameters under their priors, in nats.

    It is the sum over all priors that are registered on parts of the model, such as
    `RBFKernel(lengthscale_prior=...)`, and zero without any. Each is a density of the parameter
    itself, not of its logarithm. Fits maximise the ELBO plus this sum.
    """
    total = next(model.parameters()).new_zeros(())
    for module in model.modules():
        for prior, value, _ in getattr(module, "_priors", {}).values():
            total = total + _log_density(prior, value(module)).sum()
    return total


def _log_density(prior: Distribution, value: Tensor) -> Tensor:
    """Return the log density of each value; −∞ outside the support, where PyTorch raises."""
    try:
        inside = prior.support.check(value)  # pyright: ignore[reportOptionalMemberAccess]
    except NotImplementedError:
        return prior.log_prob(value)
    if bool(torch.all(inside)):
        return prior.log_prob(value)
    return value.new_tensor(-inf)
