"""Counts under latents however wide, against sums and known values."""

import pytest
import torch
from gpytorch.likelihoods import (
    Likelihood,
    NegativeBinomialLikelihood,
    PoissonLikelihood,
)
from torch import Tensor
from torch.distributions import Normal

from helpers.observation_problems import built
from winnowgp.models.likelihoods import observation_model

WIDE = [
    # Count, mean and standard deviation of f, and what a review found for Poisson counts.
    (1e6, 9e5, 1e6, -14.74),
    (7.0, -20.0, 100.0, -5.56),
    (0.0, -50.0, 1000.0, -0.654),
    (11973.0, 9636.5, 7788.0, None),
    (1e4, 1e4, 1e3, None),
    (1e4, 3e3, 2e3, None),
    (0.0, 0.0, 1000.0, None),
    (1.0, -3.0, 4.0, None),
    (1e4, 1e4, 0.1, None),
    (3.0, -60.0, 10.0, None),
]
COUNTING = {
    "poisson": built(PoissonLikelihood()),
    "negative binomial": built(NegativeBinomialLikelihood(), probs=0.4),
    "wide negative binomial": built(NegativeBinomialLikelihood(), probs=0.95),
    "failures": built(NegativeBinomialLikelihood(num_failures_param=True), probs=0.4),
}


def log_count(likelihood: Likelihood, y: float, f: Tensor) -> Tensor:
    """log p(y | f) with the rate eᶠ where softplus(f) has no digits left."""
    log_rate = torch.where(f < -30, f, torch.nn.functional.softplus(f.clamp_min(-30)).log())
    if isinstance(likelihood, PoissonLikelihood):
        return y * log_rate - log_rate.exp() - torch.lgamma(f.new_tensor(y + 1))
    assert isinstance(likelihood, NegativeBinomialLikelihood)
    p = likelihood.probs
    size = log_rate.exp() * (1.0 if likelihood.num_failures_param else (1 - p) / p)
    log_size = log_rate + (0.0 if likelihood.num_failures_param else ((1 - p) / p).log())
    # Γ(y + r) / Γ(r) = r Γ(y + r) / Γ(1 + r), which has digits where r has none.
    ways = log_size + torch.lgamma(y + size) - torch.lgamma(1 + size) if y else 0 * size
    return ways - torch.lgamma(f.new_tensor(y + 1)) + y * p.log() + size * torch.log1p(-p)


@pytest.mark.parametrize("name", COUNTING)
@pytest.mark.parametrize(("y", "m", "s", "known"), WIDE)
def test_counts_are_integrated_however_wide_the_latent_is(
    name: str, y: float, m: float, s: float, known: float | None
) -> None:
    """Against 200,000 trapezia; the logarithm of a density to 1e-4 nats, found to 2e-5."""
    likelihood = COUNTING[name]
    z = torch.linspace(-14, 14, 200_001, dtype=torch.float64)
    log_weight = Normal(0.0, 1.0).log_prob(z) + (z[1] - z[0]).log()
    log_p = log_count(likelihood, y, m + s * z)
    Y, mean, variance = (torch.full((1, 1), v, dtype=torch.float64) for v in (y, m, s**2))
    density = observation_model(likelihood).log_density(Y, mean, variance).item()
    assert density == pytest.approx((log_weight + log_p).logsumexp(0).item(), abs=1e-4)
    if known is not None and name == "poisson":
        assert density == pytest.approx(known, abs=5e-3)
    nats = observation_model(likelihood).expected_log_prob(Y, mean, variance).item()
    assert nats == pytest.approx((log_weight.exp() * log_p).sum().item(), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", COUNTING)
@pytest.mark.parametrize(("y", "m", "s"), [(40.0, 10.0, 30.0), (0.0, -5.0, 8.0), (3.0, 2.0, 0.4)])
def test_integrals_of_counts_have_the_slopes_of_central_differences(
    name: str, y: float, m: float, s: float
) -> None:
    likelihood, Y = COUNTING[name], torch.full((1, 1), y, dtype=torch.float64)
    mean, variance = (
        torch.full((1, 1), v, dtype=torch.float64, requires_grad=True) for v in (m, s**2)
    )
    model = observation_model(likelihood)
    for call in (model.expected_log_prob, model.log_density):
        slopes = torch.autograd.grad(call(Y, mean, variance).sum(), (mean, variance))
        for moved, slope in zip((mean, variance), slopes, strict=True):
            h = 1e-4 * moved.abs().item()
            ends = []
            with torch.no_grad():
                for step in (h, -h):
                    moved += step
                    ends.append(call(Y, mean, variance).item())
                    moved -= step
            assert slope.item() == pytest.approx((ends[0] - ends[1]) / (2 * h), rel=1e-5, abs=1e-9)
