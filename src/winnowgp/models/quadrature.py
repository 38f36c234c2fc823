"""Expectations and predictive densities of likelihoods by quadrature."""

from dataclasses import dataclass
from functools import lru_cache
from math import log, pi, sqrt
from typing import Any, TypeAlias

import numpy as np
import torch
from gpytorch.likelihoods import (
    LaplaceLikelihood,
    NegativeBinomialLikelihood,
    PoissonLikelihood,
    StudentTLikelihood,
)
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributions import Normal

from winnowgp.linalg import cholesky, solve_lower


def hermite_nodes(count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return Gauss-Hermite nodes `[T 1 …]` of N(0, 1), and their weights, which sum to one."""
    shape = [count] + [1] * like.dim()
    z, weights = (x.to(like).reshape(shape) for x in _hermite(count))
    return z, weights


@lru_cache
def _hermite(count: int) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    locations, weights = np.polynomial.hermite.hermgauss(count)
    return torch.from_numpy(sqrt(2) * locations), torch.from_numpy(weights / weights.sum())


def standard_deviation(variance: Tensor) -> Tensor:
    """Return √variance, bounded away from zero, where the square root has no derivative."""
    return variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()


@lru_cache(maxsize=16)
def normal_nodes(count: int, dimension: int) -> Float[Tensor, "T D"]:
    """Sobol points mapped to N(0, I), each with its reflection, and of covariance I exactly.

    Sums over them are exact for polynomials of degree three.
    """
    # Kept for later calls, which may want gradients.
    with torch.inference_mode(False):
        return _made(max(count, 2 * dimension), dimension)


def _made(count: int, dimension: int) -> Float[Tensor, "T D"]:
    uniform = torch.quasirandom.SobolEngine(dimension, scramble=True, seed=0).draw(
        count, dtype=torch.float64
    )
    # Scrambled points may touch the ends, where the normal's quantile is infinite.
    half = torch.special.ndtri(uniform.clamp(1e-6, 1 - 1e-6))
    root = cholesky(half.mT @ half / count).L
    half = solve_lower(root, half.mT).mT
    return torch.cat([half, -half])


# Nodes for a Gaussian that lie dense where the integrand changes fast.


# Standard deviations either side beyond which a Gaussian is not looked at: e⁻⁴⁰.
_REACH = 9.0


@dataclass(frozen=True, slots=True)
class GradedNodes:
    """∫ N(f; μ, σ²) g(f) df ≈ Σ_t exp(log_weight_t) g(f_t), f_t = μ + σ z_t."""

    z: Float[Tensor, "T *shape"]
    log_weight: Float[Tensor, "T *shape"]


@torch.no_grad()
def graded_nodes(
    mean: Float[Tensor, "*shape"],
    deviation: Float[Tensor, "*shape"],
    *,
    centre: Float[Tensor, "*shape"],
    scale: Float[Tensor, "*shape"],
    count: int,
) -> GradedNodes:
    """Trapezia equally spaced in u, f = centre + w sinh u, w = min(scale, σ).

    About the centre steps are a share of w, farther out the same share of the distance, until
    nine σ beyond both mean and centre: two scales that differ by a factor of a million cost three
    times the nodes of one. Trapezia of smooth functions converge exponentially.

    Args:
        centre: where the integrand changes fast; within a few σ of the mean, or at its peak.
        scale: over which it does.
    """
    w = torch.minimum(scale, deviation)
    reach = _REACH * deviation
    low = ((torch.minimum(mean, centre) - reach - centre) / w).asinh()
    high = ((torch.maximum(mean, centre) + reach - centre) / w).asinh()
    share = torch.linspace(0, 1, count, dtype=mean.dtype, device=mean.device)
    u = low + (high - low) * share.reshape(-1, *([1] * mean.dim()))
    z = (centre - mean + w * u.sinh()) / deviation
    # df = w cosh u du, and N(f) df = φ(z) df / σ
    step = (w / deviation * u.cosh() * (high - low) / (count - 1)).log()
    return GradedNodes(z, step - 0.5 * z.square() - 0.5 * log(2 * pi))


# Counts of rate softplus(f), Poisson or negative binomial, with a Gaussian for f.
#
# Far above zero GPyTorch's rate is f itself, on the scale of the counts, while all that is not
# smooth
# happens within a few units of f = 0, and a count y is seen to √y. So q(f) may be a thousand times
# wider than what it is to be integrated with, between whose nodes of Gauss and Hermite the answer
# falls: densities were wrong by tens of nats, and bounds had many optima.


Counts: TypeAlias = PoissonLikelihood | NegativeBinomialLikelihood

LOWEST_RATE = -30.0

_EXPECTATION_NODES, _DENSITY_NODES = 128, 256
# Standard deviations of q(f) from zero, and units of f, within which softplus is not smooth.
_NEAR, _WIDE = 8.0, 1.0

_BISECTIONS = 64


def count_log_prob(
    likelihood: Counts, f: Float[Tensor, "T *shape"], Y: Float[Tensor, "..."]
) -> Float[Tensor, "T *shape"]:
    """log p(y | f), also far out where GPyTorch's own is infinite or not a number."""
    # Below −30 the rate softplus(f) is eᶠ. A Poisson count needs y events, and log p = y f + …;
    # all y of a negative binomial one may come in a single burst, and log p = f + ….
    near = f.clamp_min(LOWEST_RATE)
    bursts = Y if isinstance(likelihood, PoissonLikelihood) else (Y > 0).to(Y)
    return likelihood.forward(near).log_prob(Y) + bursts * (f - near)


def count_expectation(
    likelihood: Counts,
    Y: Float[Tensor, "N P"],
    mean: Float[Tensor, "*S N P"],
    deviation: Float[Tensor, "*S N P"],
    *,
    nodes: tuple[Tensor, Tensor],
) -> Float[Tensor, "*S N P"]:
    """E log p(y | f), with graded nodes about f = 0 where q(f) is wide and reaches it.

    Args:
        nodes: of N(0, 1) with their weights, for all other rows.
    """
    z, weights = nodes
    nats = (weights * count_log_prob(likelihood, mean + deviation * z, Y)).sum(0)
    wide = (deviation > _WIDE) & (mean.abs() < _NEAR * deviation)
    if not bool(wide.any()):
        return nats
    y, m, s = (x.expand(mean.shape)[wide] for x in (Y, mean, deviation))
    return nats.masked_scatter(wide, _wide_expectation(likelihood, y, m, s))


def _wide_expectation(
    likelihood: Counts, y: Float[Tensor, " W"], m: Float[Tensor, " W"], s: Float[Tensor, " W"]
) -> Float[Tensor, " W"]:
    with torch.no_grad():
        centre = torch.minimum(torch.maximum(torch.zeros_like(m), m - 6 * s), m + 6 * s)
        nodes = graded_nodes(
            m, s, centre=centre, scale=torch.ones_like(m), count=_EXPECTATION_NODES
        )
        weight = nodes.log_weight.softmax(0)
    return (weight * count_log_prob(likelihood, m + s * nodes.z, y)).sum(0)


def count_log_density(
    likelihood: Counts,
    Y: Float[Tensor, "N P"],
    mean: Float[Tensor, "N P"],
    deviation: Float[Tensor, "N P"],
) -> Float[Tensor, "N P"]:
    """log E p(y | f), with nodes about the peak of p(y | f) q(f)."""
    peak, width = _peak(likelihood, Y, mean.detach(), deviation.detach())
    fixed = mean.detach(), deviation.detach()
    nodes = graded_nodes(*fixed, centre=peak, scale=width.clamp_max(1.0), count=_DENSITY_NODES)
    f = fixed[0] + fixed[1] * nodes.z
    # The nodes stay where they are; q(f) moves over them.
    step = nodes.log_weight + 0.5 * nodes.z.square() + fixed[1].log()
    log_q = -0.5 * ((f - mean) / deviation).square() - deviation.log()
    return (count_log_prob(likelihood, f, Y) + log_q + step).logsumexp(0)


def _peak(
    likelihood: Counts, Y: Tensor, mean: Tensor, deviation: Tensor
) -> tuple[Float[Tensor, "N P"], Float[Tensor, "N P"]]:
    """Where p(y | f) q(f) is greatest, by bisection, and its width there."""
    unit = likelihood.forward(torch.zeros_like(mean))
    # E[y | f] = a softplus(f), and log p(0 | f) = −κ softplus(f).
    softplus = torch.nn.functional.softplus(torch.zeros_like(mean))
    a = unit.mean.detach() / softplus
    steepest = -unit.log_prob(torch.zeros_like(mean)).detach() / softplus
    rate = (Y / a).clamp_min(torch.finfo(mean.dtype).tiny)
    best = rate + torch.log(-torch.expm1(-rate))
    high = torch.maximum(mean, best)
    low = torch.minimum(mean, torch.maximum(best, mean - steepest * deviation.square()))
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        up = _slope(likelihood, Y, middle, mean, deviation) > 0
        low, high = torch.where(up, middle, low), torch.where(up, high, middle)
    peak = 0.5 * (low + high)
    with torch.enable_grad():
        at = peak.requires_grad_()
        slope = _slope(likelihood, Y, at, mean, deviation, bent=True)
        (curvature,) = torch.autograd.grad(slope.sum(), at)
    # q(f) alone bends by −1/σ².
    width = torch.maximum(-curvature, deviation.square().reciprocal()).rsqrt()
    return peak.detach(), width


def _slope(
    likelihood: Counts, Y: Tensor, f: Tensor, mean: Tensor, deviation: Tensor, *, bent: bool = False
) -> Tensor:
    """∂/∂f [log p(y | f) + log q(f)]; `bent`: to be differentiated again."""
    with torch.enable_grad():
        f = f if bent else f.detach().requires_grad_()
        nats = count_log_prob(likelihood, f, Y) - 0.5 * ((f - mean) / deviation).square()
        return torch.autograd.grad(nats.sum(), f, create_graph=bent)[0]


# Student-t and Laplace noise around a Gaussian f, exact however narrow the noise is.
#
# Quadrature of f sees a narrow density, and the kink of a Laplace one, only where a node happens to
# lie.


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
    logarithm: Any = _Logarithm.apply(square, variance, (nu * likelihood.noise).reshape(()))
    zero = mean.new_zeros(1)
    peak = likelihood.forward(zero).log_prob(zero)
    return peak - 0.5 * (nu + 1) * logarithm


class _Logarithm(torch.autograd.Function):
    """E log(1 + z²/s) for a Gaussian z of mean square z̄² and variance v, once differentiable.

    With a = t/s, r = a/(1 + 2av) and k = E e^{−az²} = (1 + 2av)^{−½} e^{−r z̄²}, integrals over t of

        ∂(1 − k)/∂z̄² = k r,   ∂(1 − k)/∂v = k r (1 − 2 r z̄²);

    it depends on z̄²/s and v/s alone, which gives the derivative of s. Autograd's own took twice as
    long on 2,000 rows.
    """

    @staticmethod
    def forward(ctx: Any, square: Tensor, variance: Tensor, s: Tensor) -> Tensor:
        log_t = torch.linspace(-36, 4, 161, dtype=square.dtype, device=square.device)
        t = log_t.exp()
        weights = (-t).exp() * (log_t[1] - log_t[0])
        q, v = square.flatten(), variance.flatten()
        a = (t / s)[:, None]
        widened = torch.addcmul(a.new_ones(()), a, v, value=2)
        r = a / widened
        logarithm = widened.log_().mul_(-0.5).addcmul_(r, q, value=-1)
        kept = torch.expm1(logarithm)
        if any(ctx.needs_input_grad):
            r_k = (kept + 1).mul_(r)
            once, twice = weights @ r_k, weights @ r_k.mul_(r)
            by_v = torch.addcmul(once, q, twice, value=-2)
            by_s = -(q * once + v * by_v) / s
            ctx.save_for_backward(*(part.reshape(square.shape) for part in (once, by_v, by_s)))
        return -(weights @ kept).reshape(square.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *output: Tensor
    ) -> tuple[Tensor | None, ...]:
        by_square, by_v, by_s = (output[0] * part for part in ctx.saved_tensors)
        return by_square, by_v, by_s.sum()


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


# E log Φ(s f) for a Gaussian f and a sign s, with its derivatives by hand.
#
# Over nodes ε_t of N(0, 1) with weights w_t, z_t = s (μ + σ ε_t) and h = φ/Φ,
#
#     E = Σ_t w_t log Φ(z_t),   ∂E/∂μ = s Σ_t w_t h(z_t),   ∂E/∂σ² = s Σ_t w_t ε_t h(z_t) / (2σ).


def probit_expectation(
    sign: Float[Tensor, " N"],
    mean: Float[Tensor, " N"],
    variance: Float[Tensor, " N"],
    *,
    nodes: Float[Tensor, " T"],
    weights: Float[Tensor, " T"],
) -> Float[Tensor, " N"]:
    """E log Φ(s f) of each row in nats, once differentiable in mean and variance."""
    nats: Any = _Expectation.apply(mean, variance, sign, nodes, weights)
    return nats


class _Expectation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, variance: Tensor, sign: Tensor, nodes: Tensor, weights: Tensor
    ) -> Tensor:
        deviation = variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
        z = torch.addcmul(sign * mean, nodes[:, None], sign * deviation)
        # erfcx(−z/√2) = 2 Φ(z) e^{z²/2}, which overflows where log Φ is nothing anyway.
        z.clamp_max_(sqrt(1.6 * log(torch.finfo(z.dtype).max)))
        scaled = torch.special.erfcx(z * -sqrt(0.5))
        nats = torch.addcmul(scaled.log().sub_(log(2)), z, z, value=-0.5)
        if any(ctx.needs_input_grad):
            # h = φ/Φ
            h = scaled.reciprocal_().mul_(sqrt(2 / pi))
            level, tilt = torch.stack([weights, weights * nodes]) @ h
            # A variance of zero has a square root without a derivative.
            curvature = torch.where(variance > 0, 0.5 * sign * tilt / deviation, 0.0)
            ctx.save_for_backward(sign * level, curvature)
        return weights @ nats

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *output: Tensor
    ) -> tuple[Tensor | None, ...]:
        slope, curvature = ctx.saved_tensors
        return output[0] * slope, output[0] * curvature, None, None, None


# E log softmax(f)_y for independent Gaussians f, with its derivatives by hand.
#
# Over nodes ε_t, f_t = μ + σ ε_t and p_t = softmax(f_t), all means over t:
#
#     E = μ_y − mean log Σ_c exp f_tc
#     ∂E/∂μ_c = [c = y] − mean p_tc,   ∂E/∂σ_c² = −mean p_tc ε_tc / (2σ_c)
#     −∂²E/∂μ∂μᵀ = diag(mean p_t) − mean p_t p_tᵀ
#
# One softmax serves them all: a fourth of the time that automatic differentiation takes for ten
# classes and 1,400 rows. Classes come first in memory, so that sums over them run along rows.


# Quasi-random nodes; each counts twice, as itself and reflected.
SOFTMAX_NODES = 64
# Rows at once, fewer where classes are many: 16 MiB of probabilities.
_ROWS, _NUMBERS = 512, 2**21


def softmax_expectation(
    classes: Int[Tensor, " N"], mean: Float[Tensor, "N C"], variance: Float[Tensor, "N C"]
) -> Float[Tensor, " N"]:
    """E log p(y | f) of each row in nats, once differentiable in mean and variance."""
    nats: Any = _SoftmaxExpectation.apply(mean, variance, classes)
    return nats


@torch.no_grad()
def softmax_coupling(
    mean: Float[Tensor, "N C"], variance: Float[Tensor, "N C"]
) -> Float[Tensor, "N C C"]:
    """diag(mean p) − mean p pᵀ of each row, positive semi-definite; zero along (1, …, 1)."""
    coupling, basis = mean.new_empty(*mean.shape, mean.shape[1]), _basis(mean)
    for rows in _parts(mean, basis):
        _, p = _probabilities(mean[rows], variance[rows], basis)
        p = p.permute(2, 0, 1).contiguous()
        coupling[rows] = torch.diag_embed(p.mean(-1)) - p @ p.mT / p.shape[-1]
    return coupling


class _SoftmaxExpectation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor, classes: Tensor) -> Tensor:
        nats, basis = mean.gather(1, classes[:, None])[:, 0], _basis(mean)
        wanted = any(ctx.needs_input_grad)
        # mean p, and mean p ε
        sums = mean.new_empty(mean.shape[1], 2, len(mean) if wanted else 0)
        for rows in _parts(mean, basis):
            normaliser, p = _probabilities(mean[rows], variance[rows], basis)
            nats[rows] -= normaliser
            if wanted:
                sums[..., rows] = basis @ p / p.shape[1]
        if wanted:
            share, tilt = sums.permute(1, 2, 0)
            chosen = torch.nn.functional.one_hot(classes, mean.shape[1])
            # A variance of zero has a square root without a derivative.
            curvature = torch.where(variance > 0, -0.5 * tilt / standard_deviation(variance), 0.0)
            ctx.save_for_backward(chosen - share, curvature)
        return nats

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *output: Tensor
    ) -> tuple[Tensor | None, ...]:
        slope, curvature = ctx.saved_tensors
        return output[0][:, None] * slope, output[0][:, None] * curvature, None


def _probabilities(mean: Tensor, variance: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of log Σ_c exp f_tc `[N]`, and p `[C T N]`."""
    f = torch.bmm(basis.mT, torch.stack([mean.mT, standard_deviation(variance).mT], 1))
    top = f.amax(0)
    p = f.sub_(top).exp_()
    total = p.sum(0)
    p.div_(total)
    return total.log_().add_(top).mean(0), p


def _parts(mean: Tensor, basis: Tensor) -> list[slice]:
    """Rows whose probabilities `[C T N]` are held at once."""
    C, _, T = basis.shape
    count = max(1, min(_ROWS, _NUMBERS // (C * T)))
    return [slice(start, start + count) for start in range(0, len(mean), count)]


def _basis(mean: Tensor) -> Tensor:
    """(1, ε_t) of each class and node, `[C 2 T]`: f is a combination of both, by μ and σ."""
    nodes = normal_nodes(SOFTMAX_NODES, mean.shape[1]).to(mean).mT
    return torch.stack([torch.ones_like(nodes), nodes], 1)
