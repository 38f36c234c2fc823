"""Poisson and negative binomial counts: their integrals over Gaussian latents.

The rate of counts is softplus(f). Far above zero it is f, on the scale of the counts, whereas
softplus bends within a few units of f = 0, and a count y determines f to √y. q(f) may therefore be
a thousand times wider than p(y | f), which falls between Gauss-Hermite nodes: densities were wrong
by tens of nats, and bounds had many optima. The nodes here are graded towards where p(y | f)
changes fast.
"""

from math import log
from typing import TypeAlias, final

import torch
from gpytorch.likelihoods import NegativeBinomialLikelihood, PoissonLikelihood
from jaxtyping import Float
from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.models.observations import (
    DENSITY_NODES,
    EXPECTATION_NODES,
    ObservationModel,
    Prediction,
    examples,
)
from winnowgp.models.quadrature import (
    distribution_cdf,
    graded_mean,
    graded_nodes,
    hermite_nodes,
    standard_deviation,
    within_reach,
)

Counts: TypeAlias = PoissonLikelihood | NegativeBinomialLikelihood

# Latent value below which the rate of counts is replaced by its exponential limit.
_LOWEST_RATE = -30.0
# Graded nodes for expectations, densities and distribution functions.
_EXPECTATION_NODES, _DENSITY_NODES, _CDF_NODES = 128, 256, 96
# q(f) is graded towards zero if its mean is within so many standard deviations of zero, and its
# standard deviation exceeds so many units of f.
_NEAR, _WIDE = 8.0, 1.0
_BISECTIONS = 64


@final
class CountObservations(ObservationModel):
    """Poisson or negative binomial counts, on nodes graded towards where p(y | f) changes fast."""

    likelihood: Counts

    def check_targets(self, Y: Float[Tensor, "N P"]) -> None:
        impossible = (Y < 0) | (Y.round() != Y)
        if bool(impossible.any()):
            raise InputError(
                f"counts must be whole numbers of at least 0; got {examples(Y[impossible])}."
            )

    def expected_log_prob(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return E log p(y | f), with nodes graded towards f = 0 if q(f) is wide and covers it."""
        z, weights = hermite_nodes(EXPECTATION_NODES, mean)
        deviation = standard_deviation(variance)
        nats = (weights * self._log_prob(mean + deviation * z, Y)).sum(0)
        wide = (deviation > _WIDE) & (mean.abs() < _NEAR * deviation)
        if not bool(wide.any()):
            return nats
        y, m, s = (x.expand(mean.shape)[wide] for x in (Y, mean, deviation))
        graded = graded_mean(
            lambda f: self._log_prob(f, y),
            m,
            s,
            centre=within_reach(torch.zeros_like(m), m.detach(), s.detach()),
            scale=torch.ones_like(m),
            count=_EXPECTATION_NODES,
        )
        return nats.masked_scatter(wide, graded)

    def log_density(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return log E p(y | f), with nodes graded towards the peak of p(y | f) q(f)."""
        deviation = standard_deviation(variance)
        fixed = mean.detach(), deviation.detach()
        peak, width = self._peak(Y, *fixed)
        nodes = graded_nodes(*fixed, centre=peak, scale=width.clamp_max(1.0), count=_DENSITY_NODES)
        f = fixed[0] + fixed[1] * nodes.z
        # Gradients are those of q(f) at fixed nodes.
        step = nodes.log_weight + 0.5 * nodes.z.square() + fixed[1].log()
        log_q = -0.5 * ((f - mean) / deviation).square() - deviation.log()
        return (self._log_prob(f, Y) + log_q + step).logsumexp(0)

    def predict(self, mean: Tensor, variance: Tensor) -> Prediction:
        z, weights = hermite_nodes(DENSITY_NODES, mean)
        f = mean + standard_deviation(variance) * z
        return self._moments(f.clamp_min(_LOWEST_RATE), weights)

    def cdf(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return P(Y ≤ y), with nodes graded towards the f at which y is the typical count."""
        # Nodes need distances that exceed rounding, also where f is known.
        s = torch.maximum(variance.sqrt(), 1e-10 * mean.abs().clamp_min(1.0)).expand(Y.shape)
        mean = mean.expand(Y.shape)
        # E[y | f] = a softplus(f) and Var[y | f] = b softplus(f); softplus(0) = log 2.
        unit = self.likelihood.forward(torch.zeros_like(mean))
        a, b = (moment / log(2) for moment in (unit.mean, unit.variance))
        rate = (Y + 0.5) / a
        step = rate + torch.log(-torch.expm1(-rate))
        scale = ((rate * b).sqrt() / a).clamp_min(1.0)

        def cdf(f: Tensor) -> Tensor:
            return distribution_cdf(self.likelihood.forward(f.clamp_min(_LOWEST_RATE)), Y)

        centre = within_reach(step, mean, s)
        return graded_mean(cdf, mean, s, centre=centre, scale=scale, count=_CDF_NODES)

    def _log_prob(self, f: Float[Tensor, "T *shape"], Y: Tensor) -> Float[Tensor, "T *shape"]:
        """Return log p(y | f), also far below zero, where GPyTorch's own is infinite or NaN."""
        # Below −30 the rate softplus(f) is eᶠ. For Poisson counts log p = y f + …; for negative
        # binomial counts log p = f + … if y > 0, because all y events may come in one burst.
        near = f.clamp_min(_LOWEST_RATE)
        bursts = Y if isinstance(self.likelihood, PoissonLikelihood) else (Y > 0).to(Y)
        return self.likelihood.forward(near).log_prob(Y) + bursts * (f - near)

    def _peak(
        self, Y: Tensor, mean: Tensor, deviation: Tensor
    ) -> tuple[Float[Tensor, "N P"], Float[Tensor, "N P"]]:
        """Return the maximum of p(y | f) q(f), by bisection, and its width."""
        unit = self.likelihood.forward(torch.zeros_like(mean))
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
            up = self._slope(Y, middle, mean, deviation) > 0
            low, high = torch.where(up, middle, low), torch.where(up, high, middle)
        peak = 0.5 * (low + high)
        with torch.enable_grad():
            at = peak.requires_grad_()
            slope = self._slope(Y, at, mean, deviation, bent=True)
            (curvature,) = torch.autograd.grad(slope.sum(), at)
        # The curvature of log q(f) alone is −1/σ².
        width = torch.maximum(-curvature, deviation.square().reciprocal()).rsqrt()
        return peak.detach(), width

    def _slope(
        self, Y: Tensor, f: Tensor, mean: Tensor, deviation: Tensor, *, bent: bool = False
    ) -> Tensor:
        """Return ∂/∂f [log p(y | f) + log q(f)], differentiable again if `bent`."""
        with torch.enable_grad():
            f = f if bent else f.detach().requires_grad_()
            nats = self._log_prob(f, Y) - 0.5 * ((f - mean) / deviation).square()
            return torch.autograd.grad(nats.sum(), f, create_graph=bent)[0]
