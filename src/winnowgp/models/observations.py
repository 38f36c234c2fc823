"""What a GPyTorch likelihood says about observations, given independent Gaussians for the latents.

A likelihood either sees one latent function for each target column (Gaussian, Bernoulli, Poisson,
Student-t, Laplace, Beta, negative binomial: whatever GPyTorch integrates in one dimension), or is
softmax, which sees them all at once. Integrals over one latent are closed (Gaussian, Laplace),
smooth ones that are exact (Student-t), or Gauss-Hermite quadrature, which is good where the
likelihood is not much narrower than q(f); those over the latents of softmax are sums over fixed
quasi-random nodes. Nothing here draws a random number.
"""

from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from math import log, pi, sqrt
from typing import Any

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
from torch.distributions import Normal

from winnowgp.errors import InputError
from winnowgp.linalg import cholesky, solve_lower

# Nodes of Gauss and Hermite for E[log p(y | f)], and for densities, which are narrower than q(f).
EXPECTATION_NODES, DENSITY_NODES = 20, 100
# Quasi-random nodes for softmax; each counts twice, as itself and reflected.
SOFTMAX_NODES, SOFTMAX_DENSITY_NODES = 64, 512
_SOFTMAX_ROWS = 1024
_LOWEST_RATE = -30.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """Mean and variance of each row and output."""

    mean: Float[Tensor, "N P"]
    variance: Float[Tensor, "N P"]


def owned(likelihood: Likelihood) -> Likelihood:
    """A copy that a model may keep, with quadrature to the working precision.

    GPyTorch stores its nodes in single precision, which limits bounds to seven digits.
    """
    if isinstance(likelihood, _OneDimensionalLikelihood):
        copied = deepcopy(likelihood)
        locations, weights = np.polynomial.hermite.hermgauss(EXPECTATION_NODES)
        copied.quadrature.locations = torch.from_numpy(locations)
        copied.quadrature.weights = torch.from_numpy(weights)
        return copied
    if isinstance(likelihood, GaussianLikelihood | SoftmaxLikelihood):
        return deepcopy(likelihood)
    raise InputError(
        "`likelihood` must be Gaussian, softmax, or one that GPyTorch integrates in one dimension "
        "(Bernoulli, Poisson, Student-t, Laplace, Beta, negative binomial, your own subclass of "
        f"`_OneDimensionalLikelihood`); got {type(likelihood).__name__}."
    )


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
        f = _softmax_samples(mean, variance, SOFTMAX_NODES)
        chosen = _logits(likelihood, mean).gather(-1, Y.long().expand(*mean.shape[:-1], 1))
        return chosen - _logits(likelihood, f).logsumexp(-1, keepdim=True).mean(0)
    if isinstance(likelihood, GaussianLikelihood):
        noise = likelihood.noise
        return Normal(mean, noise.sqrt()).log_prob(Y) - 0.5 * variance / noise
    if isinstance(likelihood, LaplaceLikelihood):
        return _laplace_expectation(likelihood, Y, mean, variance)
    if isinstance(likelihood, StudentTLikelihood):
        return _student_expectation(likelihood, Y, mean, variance)
    # A variance of zero has a square root without a derivative.
    marginals: Any = Normal(mean, _positive(variance).sqrt())
    if isinstance(likelihood, _OneDimensionalLikelihood):
        return likelihood.quadrature(lambda f: _log_prob(likelihood, f, Y), marginals)
    return likelihood.expected_log_prob(Y, marginals)


def _log_prob(likelihood: Likelihood, f: Tensor, Y: Tensor) -> Tensor:
    """log p(y | f), also far out where GPyTorch's own is infinite or not a number."""
    if isinstance(likelihood, BernoulliLikelihood):
        # GPyTorch's own log Φ(z) jumps by 2e-3 nats at z = −1, and errs by as much below.
        return torch.special.log_ndtr((2 * Y - 1) * f)
    if isinstance(likelihood, PoissonLikelihood | NegativeBinomialLikelihood):
        # Below −30 the rate softplus(f) is eᶠ, and log p is linear in f, or zero where y = 0.
        near = f.clamp_min(_LOWEST_RATE)
        return likelihood.forward(near).log_prob(Y) + (Y > 0) * (f - near)
    return likelihood.forward(f).log_prob(Y)


def log_density(
    likelihood: Likelihood,
    Y: Float[Tensor, "N P"],
    mean: Float[Tensor, "N F"],
    variance: Float[Tensor, "N F"],
) -> Float[Tensor, "N P"]:
    """log E_q(f)[p(y | f)] of each row and target, in nats."""
    if isinstance(likelihood, GaussianLikelihood):
        return Normal(mean, (variance + likelihood.noise).sqrt()).log_prob(Y)
    if isinstance(likelihood, BernoulliLikelihood):
        # E[Φ((2y − 1) f)] = Φ((2y − 1) mean / √(1 + variance))
        return torch.special.log_ndtr((2 * Y - 1) * mean / (1 + variance).sqrt())
    if isinstance(likelihood, SoftmaxLikelihood):
        return _softmax_log_probability(likelihood, mean, variance).gather(1, Y.long())
    if isinstance(likelihood, StudentTLikelihood):
        return _student_log_density(likelihood, Y, mean, variance)
    if isinstance(likelihood, LaplaceLikelihood):
        return _laplace_log_density(likelihood, Y, mean, variance)
    f, weights = _hermite(mean, variance)
    return (_log_prob(likelihood, f, Y) + weights.log()).logsumexp(0)


def observation(
    likelihood: Likelihood, mean: Float[Tensor, "N F"], variance: Float[Tensor, "N F"]
) -> Prediction:
    """Mean and variance of a new observation of each row.

    Classes are coded one column each: the mean is their probability.
    """
    if isinstance(likelihood, GaussianLikelihood):
        return Prediction(mean, variance + likelihood.noise)
    if isinstance(likelihood, SoftmaxLikelihood):
        probability = _softmax_log_probability(likelihood, mean, variance).exp()
        return Prediction(probability, probability * (1 - probability))
    if isinstance(likelihood, BernoulliLikelihood):
        probability = torch.special.ndtr(mean / (1 + variance).sqrt())
        return Prediction(probability, probability * (1 - probability))
    f, weights = _hermite(mean, variance)
    if isinstance(likelihood, PoissonLikelihood | NegativeBinomialLikelihood):
        f = f.clamp_min(_LOWEST_RATE)
    y = likelihood.forward(f)
    centre = (weights * y.mean).sum(0)
    # Var y = E Var[y | f] + Var E[y | f]
    spread = (weights * (y.variance + (y.mean - centre).square())).sum(0)
    return Prediction(centre, spread)


def _laplace_expectation(
    likelihood: LaplaceLikelihood, Y: Tensor, mean: Tensor, variance: Tensor
) -> Tensor:
    """−log 2b − E|y − f|/b with b² the noise; E|z| = z̄ (2Φ(z̄/s) − 1) + 2 s φ(z̄/s).

    Quadrature would see the kink of |y − f| only where a node happens to lie.
    """
    b, s, z = likelihood.noise.sqrt(), _positive(variance).sqrt(), Y - mean
    ratio = z / s
    density = torch.exp(-0.5 * ratio.square()) / sqrt(2 * pi)
    distance = z * (2 * torch.special.ndtr(ratio) - 1) + 2 * s * density
    return -(2 * b).log() - distance / b


def _laplace_log_density(
    likelihood: LaplaceLikelihood, Y: Tensor, mean: Tensor, variance: Tensor
) -> Tensor:
    """Of a Laplace variable plus a Gaussian one, in closed form."""
    b, s, z = likelihood.noise.sqrt(), _positive(variance).sqrt(), Y - mean
    above = -z / b + torch.special.log_ndtr(z / s - s / b)
    below = z / b + torch.special.log_ndtr(-z / s - s / b)
    return -(2 * b).log() + 0.5 * (s / b).square() + torch.logaddexp(above, below)


def _student_expectation(
    likelihood: StudentTLikelihood, Y: Tensor, mean: Tensor, variance: Tensor
) -> Tensor:
    """log c − (ν + 1)/2 · E log(1 + z²/νσ²), exact however narrow the density is.

    E log(1 + x) = ∫ (1 − E e^{−tx}) e^{−t}/t dt for x ≥ 0, a smooth integral over log t, and
    E e^{−az²} = (1 + 2av)^{−½} exp(−a z̄²/(1 + 2av)).
    """
    nu, square = likelihood.deg_free, (Y - mean).square()
    log_t = torch.linspace(-36, 4, 161, dtype=mean.dtype, device=mean.device)
    t = log_t.exp().reshape(-1, *([1] * mean.dim()))
    a = t / (nu * likelihood.noise)
    widened = 1 + 2 * a * variance
    kept = -torch.expm1(-0.5 * widened.log() - a * square / widened)
    logarithm = (kept * (-t).exp()).sum(0) * (log_t[1] - log_t[0])
    zero = torch.zeros_like(mean)
    peak = likelihood.forward(zero).log_prob(zero)
    return peak - 0.5 * (nu + 1) * logarithm


def _student_log_density(
    likelihood: StudentTLikelihood, Y: Tensor, mean: Tensor, variance: Tensor
) -> Tensor:
    """A Student-t is a Gaussian of precision g/σ² with g ~ Gamma(ν/2, ν/2): a sum over log g."""
    half = 0.5 * likelihood.deg_free
    u = torch.linspace(-36, 6, 337, dtype=mean.dtype, device=mean.device)[:, None, None]
    log_weight = (half * (u - u.exp())).log_softmax(0)
    wide = Normal(mean, (variance + likelihood.noise * (-u).exp()).sqrt())
    return (wide.log_prob(Y) + log_weight).logsumexp(0)


def _positive(variance: Tensor) -> Tensor:
    return variance.clamp_min(torch.finfo(variance.dtype).tiny)


def _hermite(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes `[T N P]` of each Gaussian, and their weights, which add up to one."""
    locations, weights = np.polynomial.hermite.hermgauss(DENSITY_NODES)
    x = torch.from_numpy(locations).to(mean)[:, None, None]
    w = torch.from_numpy(weights).to(mean)[:, None, None]
    return mean + (2 * variance).sqrt() * x, w / w.sum()


def _softmax_samples(mean: Tensor, variance: Tensor, count: int) -> Tensor:
    """Nodes `[T *S N F]` for F independent Gaussians a row, the same for every row."""
    nodes = normal_nodes(count, mean.shape[-1]).to(mean)
    shape = [len(nodes)] + [1] * (mean.dim() - 1) + [mean.shape[-1]]
    return mean + _positive(variance).sqrt() * nodes.reshape(shape)


@lru_cache(maxsize=16)
def normal_nodes(count: int, dimension: int) -> Tensor:
    """Sobol points mapped to N(0, I), each with its reflection, and of covariance I exactly.

    Sums over them are exact for polynomials of degree three.
    """
    count = max(count, 2 * dimension)
    uniform = torch.quasirandom.SobolEngine(dimension, scramble=True, seed=0).draw(
        count, dtype=torch.float64
    )
    # Scrambled points may touch the ends, where the normal's quantile is infinite.
    half = torch.special.ndtri(uniform.clamp(1e-6, 1 - 1e-6))
    root = cholesky(half.mT @ half / count).L
    half = solve_lower(root, half.mT).mT
    return torch.cat([half, -half])


def _logits(likelihood: SoftmaxLikelihood, f: Tensor) -> Tensor:
    """GPyTorch's own `forward` transposes where there are as many rows as classes."""
    mixing = likelihood.mixing_weights
    return f if mixing is None else f @ mixing.mT


def _softmax_log_probability(
    likelihood: SoftmaxLikelihood, mean: Float[Tensor, "N F"], variance: Float[Tensor, "N F"]
) -> Float[Tensor, "N C"]:
    """log E_q(f)[softmax(f)] of each row, a few rows at a time."""
    parts = zip(mean.split(_SOFTMAX_ROWS), variance.split(_SOFTMAX_ROWS), strict=True)
    samples = (_softmax_samples(m, v, SOFTMAX_DENSITY_NODES) for m, v in parts)
    shares = [_logits(likelihood, f).log_softmax(-1).logsumexp(0) - log(len(f)) for f in samples]
    return torch.cat(shares)


def _some(values: Tensor) -> str:
    return ", ".join(f"{v:g}" for v in values.unique()[:5].tolist())
