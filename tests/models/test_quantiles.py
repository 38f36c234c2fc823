"""Quantiles of predictive distributions against SciPy, sums of densities, grids and samples."""

from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    BetaLikelihood,
    GaussianLikelihood,
    LaplaceLikelihood,
    Likelihood,
    NegativeBinomialLikelihood,
    PoissonLikelihood,
    StudentTLikelihood,
    _OneDimensionalLikelihood,
)
from scipy import stats
from torch import Tensor
from torch.distributions import Cauchy, Gamma, Poisson

from helpers.observation_problems import MEAN, VARIANCE, built, softmax
from winnowgp.errors import InputError
from winnowgp.models.likelihoods import observation_model

# Without 0.5, which is P(Y = 0) of a Poisson count at mean 0: rounding decides.
P = torch.tensor([0.01, 0.05, 0.45, 0.9, 0.999], dtype=torch.float64)


class OwnCauchy(_OneDimensionalLikelihood):
    """A user-defined likelihood without mean and variance."""

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any):
        return Cauchy(function_samples, torch.ones_like(function_samples))


class OwnGamma(_OneDimensionalLikelihood):
    """A user-defined likelihood of positive targets."""

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any):
        return Gamma(torch.full_like(function_samples, 3.0), function_samples.exp())


class LogPoisson(PoissonLikelihood):
    """A subclass of a count likelihood with another link."""

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any):
        return Poisson(function_samples.exp())


LIKELIHOODS: dict[str, Likelihood] = {
    "gaussian": built(GaussianLikelihood(), noise=0.3),
    "student": built(StudentTLikelihood(), noise=1.2, deg_free=4.5),
    "laplace": built(LaplaceLikelihood(), noise=0.5),
    "beta": built(BetaLikelihood(), scale=6.0),
    "poisson": built(PoissonLikelihood()),
    "negative binomial": built(NegativeBinomialLikelihood(), probs=0.4),
    "own": built(OwnCauchy()),
    "own positive": built(OwnGamma()),
    "own log link": built(LogPoisson()),
}
COUNTS = ("poisson", "negative binomial", "own log link")
every = pytest.mark.parametrize("name", LIKELIHOODS)


def quantiles(name: str, mean: Tensor = MEAN, variance: Tensor = VARIANCE) -> Tensor:
    return observation_model(LIKELIHOODS[name]).quantiles(mean, variance, P)


def draws(name: str, n: int, mean: Tensor = MEAN, variance: Tensor = VARIANCE) -> Tensor:
    """Samples of new observations, `[n N P]`, from PyTorch's own distributions."""
    g = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        f = mean + variance.sqrt() * torch.randn((n, *mean.shape), generator=g, dtype=mean.dtype)
        likelihood: Any = LIKELIHOODS[name]
        if name == "gaussian":
            return torch.normal(f, likelihood.noise.sqrt().expand(f.shape))
        return likelihood.forward(f).sample()


@every
def test_quantiles_are_exceeded_as_often_as_they_claim(name: str) -> None:
    # 40,000 draws and 30 quantiles: |z| exceeds 4.5 once in 5,000 runs.
    y, n = draws(name, 40_000), 40_000
    found = quantiles(name)
    below = (y[:, None] <= found).double().mean(0)
    strictly = (y[:, None] < found).double().mean(0)
    p = P[:, None, None].expand_as(below)
    error = (p * (1 - p) / n).sqrt()
    if name in COUNTS:
        # P(Y < y) < p ≤ P(Y ≤ y)
        assert bool(((below - p) / error > -4.5).all())
        assert bool(((strictly - p) / error < 4.5).all())
    else:
        assert ((below - p) / error).abs().max() < 4.5
    if name in COUNTS:
        # The z-score sees a quantile that is off by one where counts are small.
        assert bool((((y[:, None] <= found - 1).double().mean(0) - p) / error < -4.5).any())


@every
def test_cdf_equals_integral_of_density(name: str) -> None:
    model = observation_model(LIKELIHOODS[name])
    found = quantiles(name)
    at = model.cdf(found, MEAN, VARIANCE)
    if name in COUNTS:
        counts = torch.arange(int(found.max()) + 1, dtype=torch.float64)
        nats = torch.stack(
            [model.log_density(k.expand(MEAN.shape), MEAN, VARIANCE) for k in counts]
        )
        sums = nats.exp().cumsum(0)
        exact = sums.gather(0, found.long())
        torch.testing.assert_close(at, exact, rtol=0, atol=1e-9)
        least = (sums[:, None] < P[:, None, None]).sum(0).double()
        assert torch.equal(found, least)
    else:
        torch.testing.assert_close(at, P[:, None, None].expand_as(at), rtol=0, atol=1e-10)
        # dF/dy by central differences is the density.
        step = 1e-5
        slope = (
            model.cdf(found + step, MEAN, VARIANCE) - model.cdf(found - step, MEAN, VARIANCE)
        ) / (2 * step)
        density = torch.stack([model.log_density(y, MEAN, VARIANCE).exp() for y in found])
        torch.testing.assert_close(slope, density, rtol=1e-5, atol=1e-8)


def test_quantiles_without_latent_variance_are_those_of_scipy() -> None:
    mean, none = MEAN[:, :1], torch.zeros(3, 1, dtype=torch.float64)
    rate = np.log1p(np.exp(mean.numpy()))
    p = P.numpy()[:, None, None]
    # Parameters that GPyTorch transforms are within 1e-7 of those that were set.
    fitted: dict[str, Any] = {name: LIKELIHOODS[name] for name in LIKELIHOODS}
    sd = {name: sqrt(fitted[name].noise.item()) for name in ("gaussian", "student", "laplace")}
    scale, dof = fitted["beta"].scale.item(), fitted["student"].deg_free.item()
    share, failed = (
        scale / (1 + np.exp(-mean.numpy())),
        1 - fitted["negative binomial"].probs.item(),
    )
    failures = fitted["negative binomial"].forward(mean).total_count.numpy()
    expected = {
        "gaussian": stats.norm.ppf(p, mean, sd["gaussian"]),
        "student": stats.t.ppf(p, dof, mean, sd["student"]),
        "laplace": stats.laplace.ppf(p, mean, sd["laplace"]),
        "beta": stats.beta.ppf(p, share + 1, scale + 1 - share),
        "poisson": stats.poisson.ppf(p, rate),
        "negative binomial": stats.nbinom.ppf(p, failures, failed),
        "own": stats.cauchy.ppf(p, mean, 1.0),
        "own positive": stats.gamma.ppf(p, 3.0, scale=np.exp(-mean.numpy())),
        "own log link": stats.poisson.ppf(p, np.exp(mean.numpy())),
    }
    for name in LIKELIHOODS:
        found = quantiles(name, mean, none)
        np.testing.assert_allclose(found, expected[name], rtol=1e-8, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("name", ["gaussian", "student", "laplace", "poisson"])
def test_quantiles_of_mixture_invert_mean_of_components(name: str) -> None:
    model = observation_model(LIKELIHOODS[name])
    mean = torch.stack([MEAN, MEAN + 5.0, 2.0 * MEAN])
    variance = torch.stack([VARIANCE, 0.1 * VARIANCE, 4.0 * VARIANCE])
    found = model.quantiles(mean, variance, P)
    components = list(zip(mean, variance, strict=True))
    below = torch.stack([model.cdf(found, m, v) for m, v in components]).mean(0)
    p = P[:, None, None]
    if name == "poisson":
        less = (found - 1).clamp_min(0)
        one_less = sum((found > 0) * model.cdf(less, m, v) for m, v in components)
        assert bool((below >= p).all())
        assert bool((one_less / 3 < p).all())
    else:
        torch.testing.assert_close(below, p.expand_as(below), rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", [PoissonLikelihood, NegativeBinomialLikelihood])
@pytest.mark.parametrize(
    ("m", "s"), [(900.0, 300.0), (-3.0, 40.0), (1e5, 2.0), (3.0, 0.1), (-20.0, 1.0)]
)
def test_count_cdf_with_wide_latent_equals_grid(kind: Any, m: float, s: float) -> None:
    likelihood: Any = built(kind())
    f = m + s * torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    weight = (-0.5 * ((f - m) / s).square()).softmax(0)
    y = torch.tensor([0.0, 1.0, 7.0, 500.0, 1e5], dtype=torch.float64)[:, None, None]
    # PyTorch's counts have no distribution function: SciPy's, on the grid.
    rate = np.maximum(np.logaddexp(0, f.numpy()), 1e-300)
    if kind is PoissonLikelihood:
        below = stats.poisson.cdf(y[..., 0].numpy(), rate)
    else:
        failures = likelihood.forward(f).total_count.clamp_min(1e-300).numpy()
        below = stats.nbinom.cdf(y[..., 0].numpy(), failures, 0.5)
    expected = below @ weight.numpy()
    latent = torch.full((1, 1), m).double(), torch.full((1, 1), s * s).double()
    found = observation_model(likelihood).cdf(y, *latent)[:, 0, 0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-8)


def test_quantiles_in_blocks_of_rows_equal_those_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = quantiles("student")
    monkeypatch.setattr("winnowgp.models.observations._QUANTILE_NUMBERS", 1)
    torch.testing.assert_close(quantiles("student"), whole, rtol=1e-9, atol=1e-9)


def test_quantiles_of_classes_are_refused() -> None:
    for likelihood in (built(BernoulliLikelihood()), softmax(mixing=False)):
        with pytest.raises(InputError, match="classes have no quantiles"):
            observation_model(likelihood).quantiles(torch.zeros(2, 3), torch.ones(2, 3), P)


@pytest.mark.parametrize("wrong", [[0.0], [1.0], [0.5, 1.2], [float("nan")], []])
def test_quantiles_of_impossible_probabilities_are_refused(wrong: list[float]) -> None:
    model = observation_model(LIKELIHOODS["gaussian"])
    with pytest.raises(InputError, match="strictly between 0 and 1"):
        model.quantiles(MEAN, VARIANCE, torch.tensor(wrong, dtype=torch.float64))
