"""Likelihoods: expectations, densities and predictive moments."""

from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from math import log, sqrt
from typing import Any, TypeGuard, TypeVar

import numpy as np
import torch
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    BetaLikelihood,
    GaussianLikelihood,
    LaplaceLikelihood,
    Likelihood,
    NegativeBinomialLikelihood,
    PoissonLikelihood,
    SoftmaxLikelihood,
    StudentTLikelihood,
    _OneDimensionalLikelihood,
)
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution, Normal

from winnowgp.data import MaskedMatrix
from winnowgp.errors import InputError
from winnowgp.models.quadrature import (
    LOWEST_RATE,
    SOFTMAX_NODES,
    count_expectation,
    count_log_density,
    laplace_expectation,
    laplace_log_density,
    normal_nodes,
    probit_expectation,
    softmax_coupling,
    softmax_expectation,
    student_expectation,
    student_log_density,
)

# What a GPyTorch likelihood says about observations, given independent Gaussians for the latents.
#
# A likelihood either sees one latent function for each target column (Gaussian, Bernoulli, Poisson,
# Student-t, Laplace, Beta, negative binomial, or a user's own), or is softmax, which sees them all
# at
# once. Integrals over one latent are closed (Gaussian, Laplace), smooth ones that are exact
# (Student-t), over graded nodes (counts), or Gauss-Hermite quadrature, which is good where the
# likelihood is not much narrower than q(f); those over the latents of softmax are sums over fixed
# quasi-random nodes. What a user's own class says itself, by `expected_log_prob`, `log_marginal` or
# `marginal`, is believed. Nothing here draws a random number.


# Nodes of Gauss and Hermite for E[log p(y | f)], and for densities, which are narrower than q(f).
EXPECTATION_NODES, DENSITY_NODES = 20, 100
# Quasi-random nodes for densities of softmax; each counts twice, as itself and reflected.
SOFTMAX_DENSITY_NODES = 512

_LEAST_SOFTMAX_NODES = 16
# Numbers held at once for densities of softmax: 32 MiB.
_SOFTMAX_NUMBERS = 2**22

_Kind = TypeVar("_Kind", bound=Likelihood)

_METHODS = ("forward", "expected_log_prob", "log_marginal", "marginal")


@dataclass(frozen=True, slots=True)
class Prediction:
    """Mean and variance of each row and output."""

    mean: Float[Tensor, "*S N P"]
    variance: Float[Tensor, "*S N P"]


def copy_likelihood(likelihood: Likelihood) -> Likelihood:
    """A copy that a model may keep, with quadrature to the working precision.

    GPyTorch stores its nodes in single precision, which limits bounds to seven digits.
    """
    _check_usable(likelihood)
    copied = deepcopy(likelihood)
    if isinstance(copied, _OneDimensionalLikelihood):
        locations, weights = np.polynomial.hermite.hermgauss(EXPECTATION_NODES)
        copied.quadrature.locations = torch.from_numpy(locations)
        copied.quadrature.weights = torch.from_numpy(weights)
    return copied


def _check_usable(likelihood: Likelihood) -> None:
    name = type(likelihood).__name__
    if isinstance(likelihood, SoftmaxLikelihood):
        if not is_plain(likelihood, SoftmaxLikelihood):
            raise InputError(
                "`likelihood` must be SoftmaxLikelihood itself where it sees several latent "
                f"functions at once; got {name}, with methods of its own."
            )
        return
    theirs = {method for method in _METHODS if _is_own(likelihood, method)}
    usable = (
        isinstance(likelihood, _OneDimensionalLikelihood)
        or is_plain(likelihood, GaussianLikelihood)
        or (isinstance(likelihood, GaussianLikelihood) and "forward" in theirs)
        or "expected_log_prob" in theirs
    )
    if not usable:
        raise InputError(
            "`likelihood` must be Gaussian, softmax, one that GPyTorch integrates in one dimension "
            "(Bernoulli, Poisson, Student-t, Laplace, Beta, negative binomial, your own subclass "
            "of `_OneDimensionalLikelihood`), or your own that defines `expected_log_prob`; "
            f"got {name}."
        )
    batched = {n: list(p.shape) for n, p in likelihood.named_parameters() if p.dim() > 1}
    if batched and not theirs:
        raise InputError(
            f"`likelihood` must not have a batch shape; got {name} with parameters of shape "
            f"{batched}. All target columns share one likelihood."
        )


def is_plain(likelihood: Likelihood, *kinds: type[_Kind]) -> TypeGuard[_Kind]:
    """Whether it is of such a class of GPyTorch, and every method that makes it one is GPyTorch's.

    A subclass that says p(y | f) differently must not be taken for its parent.
    """
    return any(
        isinstance(likelihood, kind)
        and all(getattr(type(likelihood), m) is getattr(kind, m) for m in _METHODS)
        for kind in kinds
    )


def _is_own(likelihood: Likelihood, method: str) -> bool:
    """Whether a user's class has the last word on a method."""
    written = next(kind for kind in type(likelihood).__mro__ if method in vars(kind))
    return not written.__module__.startswith("gpytorch.")


def latent_functions(likelihood: Likelihood, P: int) -> int:
    """How many latent functions P target columns need."""
    if not isinstance(likelihood, SoftmaxLikelihood):
        return P
    if P != 1:
        raise InputError(f"softmax needs one column of class numbers; got {P} target columns.")
    return likelihood.num_features


def check_targets(likelihood: Likelihood, Y: Float[Tensor, "N P"]) -> None:
    """An error where the likelihood gives some target no probability at all."""
    whole = bool((Y.round() == Y).all())
    if isinstance(likelihood, BernoulliLikelihood) and not bool(((Y == 0) | (Y == 1)).all()):
        raise InputError(f"Bernoulli targets must be 0 or 1; got {_some(Y[(Y != 0) & (Y != 1)])}.")
    if isinstance(likelihood, SoftmaxLikelihood):
        C = likelihood.num_classes
        if not whole or bool((Y < 0).any()) or bool((Y >= C).any()):
            raise InputError(
                f"softmax targets must be class numbers 0 to {C - 1}; "
                f"got {_some(Y[(Y < 0) | (Y >= C) | (Y.round() != Y)])}."
            )
    if isinstance(likelihood, PoissonLikelihood | NegativeBinomialLikelihood) and (
        not whole or bool((Y < 0).any())
    ):
        raise InputError(
            "counts must be whole numbers of at least 0; "
            f"got {_some(Y[(Y < 0) | (Y.round() != Y)])}."
        )
    if isinstance(likelihood, BetaLikelihood) and not bool(((Y > 0) & (Y < 1)).all()):
        raise InputError(
            f"Beta targets must lie strictly between 0 and 1; got {_some(Y[(Y <= 0) | (Y >= 1)])}."
        )


def expected_log_prob(
    likelihood: Likelihood,
    Y: Float[Tensor, "N P"],
    mean: Float[Tensor, "*S N F"],
    variance: Float[Tensor, "*S N F"],
) -> Float[Tensor, "*S N P"]:
    """E_q(f)[log p(y | f)] of each row and target, in nats; f has F independent Gaussians a row."""
    if isinstance(likelihood, SoftmaxLikelihood):
        return _softmax_expectation(likelihood, Y, mean, variance)
    if is_plain(likelihood, GaussianLikelihood):
        noise = likelihood.noise
        return Normal(mean, noise.sqrt()).log_prob(Y) - 0.5 * variance / noise
    if is_plain(likelihood, StudentTLikelihood):
        return student_expectation(likelihood, Y, mean, variance)
    if is_plain(likelihood, BernoulliLikelihood):
        return _bernoulli_expectation(Y, mean, variance)
    deviation = _deviation(variance)
    if is_plain(likelihood, LaplaceLikelihood):
        return laplace_expectation(likelihood, Y, mean, deviation)
    if _is_own(likelihood, "expected_log_prob"):
        marginals: Any = Normal(mean, deviation)
        nats = likelihood.expected_log_prob(Y, marginals)
        return _one_each(nats, mean, likelihood, "expected_log_prob")
    if is_plain(likelihood, PoissonLikelihood, NegativeBinomialLikelihood):
        return count_expectation(
            likelihood, Y, mean, deviation, nodes=_hermite(EXPECTATION_NODES, mean)
        )
    z, weights = _hermite(EXPECTATION_NODES, mean)
    return (weights * _given(likelihood, mean + deviation * z).log_prob(Y)).sum(0)


def _softmax_expectation(
    likelihood: SoftmaxLikelihood, Y: Tensor, mean: Tensor, variance: Tensor
) -> Tensor:
    if likelihood.mixing_weights is None:
        classes = Y[:, 0].long().expand(mean.shape[:-1]).flatten()
        rows = (mean.reshape(-1, mean.shape[-1]), variance.reshape(-1, mean.shape[-1]))
        return softmax_expectation(classes, *rows).reshape(*mean.shape[:-1], 1)
    f = _softmax_samples(mean, variance, SOFTMAX_NODES)
    chosen = _logits(likelihood, mean).gather(-1, Y.long().expand(*mean.shape[:-1], 1))
    return chosen - _logits(likelihood, f).logsumexp(-1, keepdim=True).mean(0)


def _bernoulli_expectation(Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Quadrature of log Φ, which GPyTorch's own log_prob gets wrong by 2e-3 nats near z = −1."""
    z, weights = _hermite(EXPECTATION_NODES, mean)
    flat = probit_expectation(
        (2 * Y - 1).expand(mean.shape).flatten(),
        mean.flatten(),
        variance.flatten(),
        nodes=z.flatten(),
        weights=weights.flatten(),
    )
    return flat.reshape(mean.shape)


def latent_coupling(
    likelihood: Likelihood, mean: Float[Tensor, "N F"], variance: Float[Tensor, "N F"]
) -> Float[Tensor, "N F F"] | None:
    """−∂²E/∂μ∂μᵀ of E = E_q(f)[log p(y | f)] of each row; None where each latent is seen alone."""
    if not isinstance(likelihood, SoftmaxLikelihood):
        return None
    if likelihood.mixing_weights is None:
        return softmax_coupling(mean, variance)
    mixing = likelihood.mixing_weights.detach()
    p = _logits(likelihood, _softmax_samples(mean, variance, SOFTMAX_NODES)).softmax(-1).detach()
    p = p.permute(1, 2, 0)
    classes = torch.diag_embed(p.mean(-1)) - p @ p.mT / p.shape[-1]
    return mixing.mT @ classes @ mixing


def log_density(
    likelihood: Likelihood,
    Y: Float[Tensor, "N P"],
    mean: Float[Tensor, "N F"],
    variance: Float[Tensor, "N F"],
    *,
    components: int = 1,
) -> Float[Tensor, "N P"]:
    """log E_q(f)[p(y | f)] of each row and target, in nats.

    Args:
        components: of a mixture, where the rows are those of one; each may then be rougher.
    """
    if is_plain(likelihood, GaussianLikelihood):
        return Normal(mean, (variance + likelihood.noise).sqrt()).log_prob(Y)
    if is_plain(likelihood, BernoulliLikelihood):
        # E[Φ((2y − 1) f)] = Φ((2y − 1) mean / √(1 + variance))
        return torch.special.log_ndtr((2 * Y - 1) * mean / (1 + variance).sqrt())
    if isinstance(likelihood, SoftmaxLikelihood):
        return _softmax_log_probability(likelihood, mean, variance, components).gather(1, Y.long())
    if is_plain(likelihood, StudentTLikelihood):
        return student_log_density(likelihood, Y, mean, variance)
    deviation = _deviation(variance)
    if is_plain(likelihood, LaplaceLikelihood):
        return laplace_log_density(likelihood, Y, mean, deviation)
    if is_plain(likelihood, PoissonLikelihood, NegativeBinomialLikelihood):
        return count_log_density(likelihood, Y, mean, deviation)
    if _is_own(likelihood, "log_marginal"):
        marginals: Any = Normal(mean, deviation)
        nats = likelihood.log_marginal(Y, marginals)
        return _one_each(nats, mean, likelihood, "log_marginal")
    z, weights = _hermite(DENSITY_NODES, mean)
    log_prob = _given(likelihood, mean + deviation * z, "log_marginal").log_prob(Y)
    return (log_prob + weights.log()).logsumexp(0)


def observation(
    likelihood: Likelihood,
    mean: Float[Tensor, "N F"],
    variance: Float[Tensor, "N F"],
    *,
    components: int = 1,
) -> Prediction:
    """Mean and variance of a new observation of each row.

    Classes are coded one column each: the mean is their probability.

    Args:
        components: of a mixture, where the rows are those of one; each may then be rougher.
    """
    if is_plain(likelihood, GaussianLikelihood):
        return Prediction(mean, variance + likelihood.noise)
    if isinstance(likelihood, SoftmaxLikelihood):
        probability = _softmax_log_probability(likelihood, mean, variance, components).exp()
        return Prediction(probability, probability * (1 - probability))
    if is_plain(likelihood, BernoulliLikelihood):
        probability = torch.special.ndtr(mean / (1 + variance).sqrt())
        return Prediction(probability, probability * (1 - probability))
    deviation = _deviation(variance)
    if _is_own(likelihood, "marginal"):
        marginals: Any = Normal(mean, deviation)
        seen = likelihood.marginal(marginals)
        moments = (_one_each(m, mean, likelihood, "marginal") for m in (seen.mean, seen.variance))
        return Prediction(*moments)
    z, weights = _hermite(DENSITY_NODES, mean)
    f = mean + deviation * z
    if is_plain(likelihood, PoissonLikelihood, NegativeBinomialLikelihood):
        f = f.clamp_min(LOWEST_RATE)
    y = _given(likelihood, f, "marginal")
    centre = (weights * y.mean).sum(0)
    # Var y = E Var[y | f] + Var E[y | f]
    spread = (weights * (y.variance + (y.mean - centre).square())).sum(0)
    return Prediction(centre, spread)


def _given(likelihood: Likelihood, f: Tensor, instead: str = "expected_log_prob") -> Distribution:
    """p(y | f), if the likelihood says."""
    try:
        return likelihood.forward(f)
    except NotImplementedError as error:
        raise InputError(
            f"`likelihood` must define `forward`, p(y | f), or `{instead}`; "
            f"{type(likelihood).__name__} has neither."
        ) from error


def _one_each(values: Tensor, like: Tensor, likelihood: Likelihood, method: str) -> Tensor:
    if values.shape != like.shape:
        raise InputError(
            f"`{method}` of {type(likelihood).__name__} must return one number for each row and "
            f"target, of shape {list(like.shape)}; got {list(values.shape)}."
        )
    return values


def _deviation(variance: Tensor) -> Tensor:
    """A variance of zero has a square root without a derivative."""
    return variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()


def _hermite(count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes `[T 1 …]` of N(0, 1), and their weights, which add up to one."""
    shape = [count] + [1] * like.dim()
    z, weights = (x.to(like).reshape(shape) for x in _hermite_nodes(count))
    return z, weights


@lru_cache
def _hermite_nodes(count: int) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    locations, weights = np.polynomial.hermite.hermgauss(count)
    return torch.from_numpy(sqrt(2) * locations), torch.from_numpy(weights / weights.sum())


def _softmax_samples(mean: Tensor, variance: Tensor, count: int) -> Tensor:
    """Nodes `[T *S N F]` for F independent Gaussians a row, the same for every row."""
    nodes = normal_nodes(count, mean.shape[-1]).to(mean)
    shape = [len(nodes)] + [1] * (mean.dim() - 1) + [mean.shape[-1]]
    return mean + _deviation(variance) * nodes.reshape(shape)


def _logits(likelihood: SoftmaxLikelihood, f: Tensor) -> Tensor:
    """GPyTorch's own `forward` transposes where there are as many rows as classes."""
    mixing = likelihood.mixing_weights
    return f if mixing is None else f @ mixing.mT


def _softmax_log_probability(
    likelihood: SoftmaxLikelihood,
    mean: Float[Tensor, "N F"],
    variance: Float[Tensor, "N F"],
    components: int,
) -> Float[Tensor, "N C"]:
    """log E_q(f)[softmax(f)] of each row, a few rows at a time."""
    count = max(_LEAST_SOFTMAX_NODES, SOFTMAX_DENSITY_NODES // components)
    widest = max(likelihood.num_classes, likelihood.num_features)
    rows = max(1, _SOFTMAX_NUMBERS // (2 * max(count, 2 * widest) * widest))
    parts = zip(mean.split(rows), variance.split(rows), strict=True)
    samples = (_softmax_samples(m, v, count) for m, v in parts)
    shares = [_logits(likelihood, f).log_softmax(-1).logsumexp(0) - log(len(f)) for f in samples]
    return torch.cat(shares)


def _some(values: Tensor) -> str:
    return ", ".join(f"{v:g}" for v in values.unique()[:5].tolist())


# Something possible where an entry is missing, for likelihoods that must see a number.


def fill_with_observed(table: MaskedMatrix) -> Float[Tensor, "N P"]:
    """The table with missing entries replaced by one that was observed."""
    some = table.Y[table.observed]
    return table.filled(some[0].item() if len(some) else 0.0)
