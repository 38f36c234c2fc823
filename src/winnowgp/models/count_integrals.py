"""Counts of rate softplus(f), Poisson or negative binomial, with a Gaussian for f.

Far above zero GPyTorch's rate is f itself, on the scale of the counts, while all that is not smooth
happens within a few units of f = 0, and a count y is seen to √y. So q(f) may be a thousand times
wider than what it is to be integrated with, between whose nodes of Gauss and Hermite the answer
falls: densities were wrong by tens of nats, and bounds had many optima.
"""

from typing import TypeAlias

import torch
from gpytorch.likelihoods import NegativeBinomialLikelihood, PoissonLikelihood
from jaxtyping import Float
from torch import Tensor

from winnowgp.models.graded_nodes import graded_nodes

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
