"""Student-t and Laplace noise around a Gaussian f, exact however narrow the noise is.

Quadrature of f sees a narrow density, and the kink of a Laplace one, only where a node happens to
lie.
"""

from math import pi, sqrt

import torch
from gpytorch.likelihoods import LaplaceLikelihood, StudentTLikelihood
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Normal


def laplace_expectation(
    likelihood: LaplaceLikelihood,
    Y: Float[Tensor, "N P"],
    mean: Float[Tensor, "*S N P"],
    deviation: Float[Tensor, "*S N P"],
) -> Float[Tensor, "*S N P"]:
    """−log 2b − E|y − f|/b with b² the noise; E|z| = z̄ (2Φ(z̄/s) − 1) + 2 s φ(z̄/s)."""
    b, s, z = likelihood.noise.sqrt(), deviation, Y - mean
    ratio = z / s
    density = torch.exp(-0.5 * ratio.square()) / sqrt(2 * pi)
    distance = z * (2 * torch.special.ndtr(ratio) - 1) + 2 * s * density
    return -(2 * b).log() - distance / b


def laplace_log_density(
    likelihood: LaplaceLikelihood,
    Y: Float[Tensor, "N P"],
    mean: Float[Tensor, "*S N P"],
    deviation: Float[Tensor, "*S N P"],
) -> Float[Tensor, "*S N P"]:
    """Of a Laplace variable plus a Gaussian one, in closed form."""
    b, s, z = likelihood.noise.sqrt(), deviation, Y - mean
    above = -z / b + torch.special.log_ndtr(z / s - s / b)
    below = z / b + torch.special.log_ndtr(-z / s - s / b)
    return -(2 * b).log() + 0.5 * (s / b).square() + torch.logaddexp(above, below)


def student_expectation(
    likelihood: StudentTLikelihood,
    Y: Float[Tensor, "N P"],
    mean: Float[Tensor, "*S N P"],
    variance: Float[Tensor, "*S N P"],
) -> Float[Tensor, "*S N P"]:
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


def student_log_density(
    likelihood: StudentTLikelihood,
    Y: Float[Tensor, "N P"],
    mean: Float[Tensor, "*S N P"],
    variance: Float[Tensor, "*S N P"],
) -> Float[Tensor, "*S N P"]:
    """A Student-t is a Gaussian of precision g/σ² with g ~ Gamma(ν/2, ν/2): a sum over log g."""
    half = 0.5 * likelihood.deg_free
    u = torch.linspace(-36, 6, 337, dtype=mean.dtype, device=mean.device)[:, None, None]
    log_weight = (half * (u - u.exp())).log_softmax(0)
    wide = Normal(mean, (variance + likelihood.noise * (-u).exp()).sqrt())
    return (wide.log_prob(Y) + log_weight).logsumexp(0)
