"""Priors on hyper-parameters, as GPyTorch registers them on kernels, means and likelihoods."""

from math import inf, log, pi, sqrt

import torch
from gpytorch.kernels import MaternKernel, RBFKernel, RQKernel, ScaleKernel
from gpytorch.likelihoods.noise_models import HomoskedasticNoise
from gpytorch.priors import LogNormalPrior
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


# Mode and width of the weak priors, for standardised inputs and targets. The lengthscales of a
# kernel on D columns grow as √D, as the distances between rows do.
_LENGTHSCALE, _VARIANCE, _NOISE = (3.0, 1.0), (1.0, 2.0), (0.5, 1.5)


def add_weak_priors(module: nn.Module) -> None:
    """Register weak priors on lengthscales, kernel variances and noise that have none.

    They are for standardised inputs and targets. The logarithm of a lengthscale, of a variance or
    of the noise has a parabola around its mode: smooth functions with noise are more probable than
    functions that interpolate the rows, and the prior costs a few nats at most where the rows say
    otherwise. With few rows these nats decide; their share vanishes as rows are added.
    """
    for part in module.modules():
        if isinstance(part, RBFKernel | MaternKernel | RQKernel):
            mode, width = _LENGTHSCALE
            mode *= sqrt(part.lengthscale.shape[-1])
            _register(part, "lengthscale", mode, width)
        elif isinstance(part, ScaleKernel):
            _register(part, "outputscale", *_VARIANCE)
        elif isinstance(part, HomoskedasticNoise):
            _register(part, "noise", *_NOISE)


def _register(part: nn.Module, name: str, mode: float, width: float) -> None:
    """Register a density of x that is largest at `mode`: log p(x) = c − log²(x/mode)/(2 width²)."""
    if f"{name}_prior" not in getattr(part, "_priors", {}):
        # The density of x, rather than of log x, has its mode at exp(loc − scale²).
        prior = LogNormalPrior(log(mode) + width**2, width).to(getattr(part, name))
        part.register_prior(f"{name}_prior", prior, name)  # pyright: ignore[reportCallIssue]


def _log_density(prior: Distribution, value: Tensor) -> Tensor:
    """Return the log density of each value; −∞ outside the support, where PyTorch raises."""
    if type(prior) is LogNormalPrior:
        # Quicker than `log_prob`, and without synchronisation with a GPU.
        log_value, scale = value.log(), prior.scale
        z = (log_value - prior.loc) / scale
        return -0.5 * z.square() - log_value - (scale * sqrt(2 * pi)).log()
    try:
        inside = prior.support.check(value)  # pyright: ignore[reportOptionalMemberAccess]
    except NotImplementedError:
        return prior.log_prob(value)
    if bool(torch.all(inside)):
        return prior.log_prob(value)
    return value.new_tensor(-inf)
