"""Integrals over the latents against fine grids, in one dimension and in three."""

from typing import Any

import pytest
import torch
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    BetaLikelihood,
    FixedNoiseGaussianLikelihood,
    GaussianLikelihood,
    LaplaceLikelihood,
    Likelihood,
    MultitaskGaussianLikelihood,
    NegativeBinomialLikelihood,
    PoissonLikelihood,
    SoftmaxLikelihood,
    StudentTLikelihood,
    _OneDimensionalLikelihood,
)
from torch import Tensor
from torch.distributions import Normal

from helpers.observation_problems import MEAN, REAL, VARIANCE, built, latents, on_a_grid, softmax
from winnowgp.errors import InputError
from winnowgp.models.likelihoods import copy_likelihood, observation_model

BINARY = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
COUNTS = torch.tensor([[0.0, 3.0], [2.0, 7.0], [1.0, 0.0]], dtype=torch.float64)
SHARES = torch.tensor([[0.2, 0.7], [0.93, 0.05], [0.5, 0.4]], dtype=torch.float64)


class Cauchy(_OneDimensionalLikelihood):
    """A user's own, without a mean or a variance."""

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any):
        return torch.distributions.Cauchy(function_samples, torch.ones_like(function_samples))


class Bell(_OneDimensionalLikelihood):
    """A user's own, whose expectation has a closed form."""

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any):
        return Normal(function_samples, torch.ones_like(function_samples))


class Logit(BernoulliLikelihood):
    """A user's own link in a class of GPyTorch's."""

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any):
        return torch.distributions.Bernoulli(logits=function_samples)


class LogPoisson(PoissonLikelihood):
    """Another, of counts."""

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any):
        return torch.distributions.Poisson(function_samples.exp())


ONE_LATENT: dict[str, tuple[Likelihood, Tensor]] = {
    "gaussian": (built(GaussianLikelihood(), noise=0.3), REAL),
    "bernoulli": (built(BernoulliLikelihood()), BINARY),
    "poisson": (built(PoissonLikelihood()), COUNTS),
    "student": (built(StudentTLikelihood(), noise=1.2, deg_free=4.5), REAL),
    "laplace": (built(LaplaceLikelihood(), noise=0.5), REAL),
    "beta": (built(BetaLikelihood(), scale=6.0), SHARES),
    "negative binomial": (built(NegativeBinomialLikelihood(), probs=0.4), COUNTS),
    "own": (built(Cauchy()), REAL),
    "own logit": (built(Logit()), BINARY),
    "own log link": (built(LogPoisson()), COUNTS),
}
# How far from the truth twenty nodes of Gauss and Hermite are, in nats, where it is more than 1e-9:
# the logarithm of a Cauchy density has poles one scale off the real line. The grid below is within
# 1e-7 of |y − f|, which has a kink.
EXPECTED_TO = {"laplace": 1e-6, "own": 2e-6}
# How far a hundred are, where it is more than 1e-10.
DENSITY_TO = {"laplace": 1e-6, "own": 1e-9}
one_latent = pytest.mark.parametrize("name", ONE_LATENT)


def log_probability(likelihood: Likelihood, Y: Tensor, f: Tensor) -> Tensor:
    """log p(y | f) of latents `[T N P]`, from torch's own distributions."""
    if type(likelihood) is BernoulliLikelihood:
        return torch.special.log_ndtr((2 * Y - 1) * f)
    if isinstance(likelihood, GaussianLikelihood):
        return Normal(f, likelihood.noise.sqrt()).log_prob(Y)
    return likelihood.forward(f).log_prob(Y)


@one_latent
def test_expected_log_probabilities_are_the_integrals(name: str) -> None:
    likelihood, Y = ONE_LATENT[name]
    expected = on_a_grid(lambda f: log_probability(likelihood, Y, f))
    ours = observation_model(likelihood).expected_log_prob(Y, MEAN, VARIANCE)
    torch.testing.assert_close(ours, expected, rtol=0, atol=EXPECTED_TO.get(name, 1e-9))


@one_latent
def test_densities_are_the_integrals(name: str) -> None:
    likelihood, Y = ONE_LATENT[name]
    expected = on_a_grid(lambda f: log_probability(likelihood, Y, f).exp()).log()
    ours = observation_model(likelihood).log_density(Y, MEAN, VARIANCE)
    torch.testing.assert_close(ours, expected, rtol=0, atol=DENSITY_TO.get(name, 1e-10))


@pytest.mark.parametrize("name", [name for name in ONE_LATENT if name != "own"])
def test_moments_of_an_observation_are_the_integrals(name: str) -> None:
    likelihood, _ = ONE_LATENT[name]
    if isinstance(likelihood, GaussianLikelihood):
        noise = likelihood.noise
        mean = on_a_grid(lambda f: f)
        square = on_a_grid(lambda f: noise + f.square())
    else:
        mean = on_a_grid(lambda f: likelihood.forward(f).mean)
        square = on_a_grid(
            lambda f: likelihood.forward(f).variance + likelihood.forward(f).mean.square()
        )
    ours = observation_model(likelihood).predict(MEAN, VARIANCE)
    torch.testing.assert_close(ours.mean, mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(ours.variance, square - mean.square(), rtol=1e-8, atol=1e-8)


def test_the_two_classes_of_bernoulli_share_all_probability() -> None:
    likelihood, Y = ONE_LATENT["bernoulli"]
    one, other = (
        observation_model(likelihood).log_density(y, MEAN, VARIANCE).exp() for y in (Y, 1 - Y)
    )
    torch.testing.assert_close(one + other, torch.ones_like(one))
    probability = observation_model(likelihood).predict(MEAN, VARIANCE).mean
    torch.testing.assert_close(torch.where(Y == 1, one, other), probability)


@pytest.mark.parametrize("name", ["poisson", "negative binomial"])
def test_counts_share_all_probability(name: str) -> None:
    Y = torch.arange(150, dtype=torch.float64)[:, None].expand(150, 3)
    mean, variance = MEAN[:, 0].expand(150, 3), VARIANCE[:, 0].expand(150, 3)
    total = observation_model(ONE_LATENT[name][0]).log_density(Y, mean, variance).exp().sum(0)
    torch.testing.assert_close(total, torch.ones(3, dtype=torch.float64), rtol=1e-6, atol=0)


@one_latent
def test_a_batch_of_latents_is_a_loop_and_has_gradients(name: str) -> None:
    likelihood, Y = ONE_LATENT[name]
    mean, variance = torch.stack([MEAN, MEAN.flip(0)]), torch.stack([VARIANCE, 2 * VARIANCE])
    together = observation_model(likelihood).expected_log_prob(Y, mean, variance)
    alone = [
        observation_model(likelihood).expected_log_prob(Y, m, v)
        for m, v in zip(mean, variance, strict=True)
    ]
    torch.testing.assert_close(together, torch.stack(alone))
    mean, certain = MEAN.clone().requires_grad_(), torch.zeros_like(MEAN).requires_grad_()
    nats = observation_model(likelihood).expected_log_prob(Y, mean, certain)
    torch.testing.assert_close(nats, log_probability(likelihood, Y, MEAN), rtol=1e-6, atol=1e-6)
    slopes = torch.autograd.grad(nats.sum(), (mean, certain))
    assert all(torch.isfinite(slope).all() for slope in slopes)


def test_nothing_is_drawn_at_random() -> None:
    likelihood, (mean, variance, Y) = softmax(True), latents(4)
    before = torch.get_rng_state()
    first = observation_model(likelihood).log_density(Y, mean, variance)
    torch.manual_seed(1)
    assert torch.equal(first, observation_model(likelihood).log_density(Y, mean, variance))
    torch.set_rng_state(before)
    observation_model(likelihood).predict(mean, variance)
    observation_model(likelihood).expected_log_prob(Y, mean, variance)
    assert torch.equal(before, torch.get_rng_state())


def test_an_owned_likelihood_is_a_copy_with_exact_nodes() -> None:
    theirs = Bell()
    ours = copy_likelihood(theirs).double()
    assert theirs.quadrature.locations.dtype == torch.float32
    Y, mean, variance = (torch.full((1, 1), x, dtype=torch.float64) for x in (1.0, 0.5, 0.3))
    # Single-precision nodes would keep seven digits of a polynomial.
    expected = Normal(mean, 1.0).log_prob(Y) - variance / 2
    nats = observation_model(ours).expected_log_prob(Y, mean, variance)
    torch.testing.assert_close(nats, expected, rtol=1e-13, atol=0)
    for likelihood in (GaussianLikelihood(), softmax(True)):
        assert copy_likelihood(likelihood) is not likelihood


@pytest.mark.parametrize(
    "likelihood",
    [
        MultitaskGaussianLikelihood(num_tasks=2),
        FixedNoiseGaussianLikelihood(noise=torch.ones(3)),
    ],
    ids=lambda likelihood: type(likelihood).__name__,
)
def test_other_likelihoods_are_refused_by_name(likelihood: Likelihood) -> None:
    with pytest.raises(InputError, match=f"`likelihood`.*got {type(likelihood).__name__}"):
        copy_likelihood(likelihood)


def test_softmax_has_latents_for_classes_or_features_and_others_for_columns() -> None:
    assert observation_model(softmax(False)).num_latents(1) == 3
    assert observation_model(SoftmaxLikelihood(num_features=2, num_classes=5)).num_latents(1) == 2
    assert observation_model(PoissonLikelihood()).num_latents(4) == 4
    with pytest.raises(InputError, match="one column of class numbers; got 2"):
        observation_model(softmax(False)).num_latents(2)


@pytest.mark.parametrize(
    ("likelihood", "bad", "words"),
    [
        (BernoulliLikelihood(), -1.0, "0 or 1; got -1"),
        (BernoulliLikelihood(), 0.5, "0 or 1; got 0.5"),
        (softmax(False), 3.0, "0 to 2; got 3"),
        (softmax(True), 4.0, "0 to 3; got 4"),
        (softmax(False), -1.0, "0 to 2; got -1"),
        (softmax(False), 0.5, "0 to 2; got 0.5"),
        (PoissonLikelihood(), -1.0, "whole numbers.*got -1"),
        (PoissonLikelihood(), 2.5, "whole numbers.*got 2.5"),
        (NegativeBinomialLikelihood(), -2.0, "whole numbers.*got -2"),
        (NegativeBinomialLikelihood(), 0.1, "whole numbers.*got 0.1"),
        (BetaLikelihood(), 0.0, "strictly between 0 and 1; got 0"),
        (BetaLikelihood(), 1.0, "strictly between 0 and 1; got 1"),
    ],
)
def test_targets_without_probability_are_named(
    likelihood: Likelihood, bad: float, words: str
) -> None:
    good = 0.5 if isinstance(likelihood, BetaLikelihood) else 1.0
    Y = torch.full((4, 1), good, dtype=torch.float64)
    observation_model(likelihood).check_targets(Y)
    Y[2] = bad
    with pytest.raises(InputError, match=words):
        observation_model(likelihood).check_targets(Y)


def test_any_number_is_a_target_of_regression() -> None:
    for name in ("gaussian", "student", "laplace", "own"):
        observation_model(ONE_LATENT[name][0]).check_targets(REAL)


@pytest.mark.parametrize("scale", [1.0, 0.1, 0.02])
@pytest.mark.parametrize("likelihood", [StudentTLikelihood(), LaplaceLikelihood()])
def test_densities_much_narrower_than_the_latent_are_exact(likelihood, scale: float) -> None:
    narrow = built(likelihood, noise=scale**2)
    f = torch.linspace(-12, 12, 600_001, dtype=torch.float64)
    weight = Normal(0.2, 1.0).log_prob(f).exp() * (f[1] - f[0])
    for y in (0.0, 0.7, 3.0):
        log_prob = narrow.forward(f).log_prob(torch.tensor(y, dtype=torch.float64))
        Y, mean, variance = (torch.full((1, 1), v, dtype=torch.float64) for v in (y, 0.2, 1.0))
        expected = observation_model(narrow).expected_log_prob(Y, mean, variance).item()
        assert expected == pytest.approx((weight * log_prob).sum().item(), abs=1e-5)
        density = observation_model(narrow).log_density(Y, mean, variance).item()
        assert density == pytest.approx((weight * log_prob.exp()).sum().log().item(), abs=1e-5)


def test_components_of_a_mixture_may_be_rougher() -> None:
    """Sixteen nodes and their reflections each, for 64 components: to 2e-3 in probability."""
    likelihood = softmax(False)
    mean, variance, Y = latents(64)
    mixture = observation_model(likelihood).predict(mean, variance).mean.mean(0)
    rough = observation_model(likelihood).predict(mean, variance, components=64).mean.mean(0)
    assert not torch.equal(rough, mixture)
    torch.testing.assert_close(rough, mixture, rtol=0, atol=2e-3)
    whole = observation_model(likelihood).log_density(Y, mean, variance).exp().mean()
    rough = observation_model(likelihood).log_density(Y, mean, variance, components=64).exp().mean()
    torch.testing.assert_close(rough, whole, rtol=0, atol=2e-3)
