"""Priors on hyper-parameters, as GPyTorch registers them on kernels, means and likelihoods."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, log, pi, sqrt
from typing import final

import torch
from gpytorch.kernels import MaternKernel, RBFKernel, RQKernel, ScaleKernel
from gpytorch.likelihoods.noise_models import HomoskedasticNoise, MultitaskHomoskedasticNoise
from gpytorch.module import Module
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
    return log_prior_of(model)()


def log_prior_of(model: nn.Module) -> Callable[[], Scalar]:
    """Return `log_prior` as a function of the current parameters, which finds the priors once."""
    zero = next(model.parameters()).new_zeros(())
    priors = [
        (prior, value, module)
        for module in model.modules()
        for prior, value, _ in getattr(module, "_priors", {}).values()
    ]
    return lambda: sum((_log_density(p, value(m)).sum() for p, value, m in priors), start=zero)


def log_normal_priors(model: nn.Module) -> dict[int, tuple[float, float, float]] | None:
    """Return the priors of positive parameters, by the identity of the raw parameter.

    Each has the mean m and the width s of log x, and the value of log x above which the density is
    constant, infinite for most. Other priors than those of `add_weak_priors` have no such form:
    None if there is one.
    """
    known: dict[int, tuple[float, float, float]] = {}
    for module in model.modules():
        for prior, value, _ in getattr(module, "_priors", {}).values():
            simple = type(prior) in (LogNormalPrior, LongLengthscalePrior) and prior.loc.dim() == 0
            if not simple or not isinstance(value, _Parameter):
                return None
            raw = id(getattr(module, f"raw_{value.name}"))
            if raw in known:
                return None
            mean, width = prior.loc.item(), prior.scale.item()
            is_long = type(prior) is LongLengthscalePrior
            known[raw] = (mean, width, mean - width**2 if is_long else inf)
    return known


# Mode and width of the weak priors, for standardised inputs and targets. The lengthscales of a
# kernel on D columns grow as √D, as the distances between rows do.
_LENGTHSCALE, _VARIANCE, WEAK_NOISE = (3.0, 1.0), (1.0, 2.0), (0.5, 1.5)


def add_weak_priors(
    module: nn.Module, *, noise: tuple[float, float] = WEAK_NOISE, irrelevant: bool = True
) -> None:
    """Register weak priors on lengthscales, kernel variances and noise that have none.

    They are for standardised inputs and targets. The log density of a variance or of the noise is a
    parabola in its logarithm; that of a lengthscale is one below its mode and constant above, so
    that irrelevant columns cost nothing. Smooth functions with noise are then more probable than
    functions that interpolate the rows, by a few nats. With few rows these nats decide; their
    share vanishes as rows are added.

    Args:
        noise: mode and width of the prior of the noise variance, the width in its logarithm.
        irrelevant: whether columns may be irrelevant at no cost. If not, the log density of a
            lengthscale is a parabola above its mode too: very few rows often seem not to depend
            on a column.
    """
    for part in module.modules():
        if isinstance(part, RBFKernel | MaternKernel | RQKernel):
            mode, width = _LENGTHSCALE
            mode *= sqrt(part.lengthscale.shape[-1])
            kind = LongLengthscalePrior if irrelevant else LogNormalPrior
            _register(part, "lengthscale", mode, width, kind)
        elif isinstance(part, ScaleKernel):
            _register(part, "outputscale", *_VARIANCE)
        elif isinstance(part, HomoskedasticNoise | MultitaskHomoskedasticNoise):
            _register(part, "noise", *noise)


def remove_priors(module: nn.Module) -> None:
    """Remove all priors that are registered on a module and its parts."""
    for part in module.modules():
        priors = getattr(part, "_priors", {})
        for name in [*priors]:
            del priors[name], part._modules[name]


@final
class LongLengthscalePrior(LogNormalPrior):
    """A log-normal density below its mode exp(loc − scale²), and its largest value above it.

    It is improper: only differences of its logarithm have a meaning.
    """

    def log_prob(self, x: Tensor) -> Tensor:
        """Return the log density of each value, up to a constant."""
        return _log_normal(self, torch.minimum(x, (self.loc - self.scale.square()).exp()))


def _register(
    part: nn.Module,
    name: str,
    mode: float,
    width: float,
    kind: type[LogNormalPrior] = LogNormalPrior,
) -> None:
    """Register a density of x that is largest at `mode`: log p(x) = c − log²(x/mode)/(2 width²)."""
    if f"{name}_prior" not in getattr(part, "_priors", {}):
        # The density of x, rather than of log x, has its mode at exp(loc − scale²).
        prior = kind(log(mode) + width**2, width).to(getattr(part, name))
        parameter = _Parameter(name)
        part.register_prior(f"{name}_prior", prior, parameter, parameter.initialise)  # pyright: ignore[reportCallIssue]


@final
@dataclass(frozen=True, slots=True)
class _Parameter:
    """A parameter of any module by its name; it can be pickled, and GPyTorch's closures cannot."""

    name: str

    def __call__(self, module: nn.Module) -> Tensor:
        return getattr(module, self.name)

    def initialise(self, module: Module, value: Tensor | float) -> None:
        module.initialize(**{self.name: value})


def _log_density(prior: Distribution, value: Tensor) -> Tensor:
    """Return the log density of each value; −∞ outside the support, where PyTorch raises."""
    if type(prior) is LongLengthscalePrior:
        return prior.log_prob(value)
    if type(prior) is LogNormalPrior:
        return _log_normal(prior, value)
    try:
        inside = prior.support.check(value)  # pyright: ignore[reportOptionalMemberAccess]
    except NotImplementedError:
        return prior.log_prob(value)
    if bool(torch.all(inside)):
        return prior.log_prob(value)
    return value.new_tensor(-inf)


def _log_normal(prior: LogNormalPrior, value: Tensor) -> Tensor:
    """Return the log density; quicker than `log_prob`, without synchronisation with a GPU."""
    log_value, scale = value.log(), prior.scale
    z = (log_value - prior.loc) / scale
    return -0.5 * z.square() - log_value - (scale * sqrt(2 * pi)).log()
