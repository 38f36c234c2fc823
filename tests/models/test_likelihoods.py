"""Integrals of observation models against fine grids, in one dimension and in three."""

from typing import Any

import numpy as np
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
from winnowgp.models import classes as softmax_expectation
from winnowgp.models.likelihoods import copy_likelihood, observation_model

BINARY = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
COUNTS = torch.tensor([[0.0, 3.0], [2.0, 7.0], [1.0, 0.0]], dtype=torch.float64)
SHARES = torch.tensor([[0.2, 0.7], [0.93, 0.05], [0.5, 0.4]], dtype=torch.float64)


class Cauchy(_OneDimensionalLikelihood):
    """A user-defined likelihood without mean and variance."""

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any):
        return torch.distributions.Cauchy(function_samples, torch.ones_like(function_samples))


class Bell(_OneDimensionalLikelihood):
    """A user-defined likelihood whose expectation has a closed form."""

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any):
        return Normal(function_samples, torch.ones_like(function_samples))


class Logit(BernoulliLikelihood):
    """A subclass of a GPyTorch likelihood with another link."""

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any):
        return torch.distributions.Bernoulli(logits=function_samples)


class LogPoisson(PoissonLikelihood):
    """A subclass of a count likelihood with another link."""

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
# Errors of twenty Gauss-Hermite nodes, in nats, if they exceed 1e-9:
# the logarithm of a Cauchy density has poles one scale off the real line. The grid below is within
# 1e-7 of |y − f|, which has a kink.
EXPECTED_TO = {"laplace": 1e-6, "own": 2e-6}
# Errors of a hundred nodes, if they exceed 1e-10.
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
def test_expected_log_prob_equals_integral(name: str) -> None:
    likelihood, Y = ONE_LATENT[name]
    expected = on_a_grid(lambda f: log_probability(likelihood, Y, f))
    ours = observation_model(likelihood).expected_log_prob(Y, MEAN, VARIANCE)
    torch.testing.assert_close(ours, expected, rtol=0, atol=EXPECTED_TO.get(name, 1e-9))


@one_latent
def test_log_density_equals_integral(name: str) -> None:
    likelihood, Y = ONE_LATENT[name]
    expected = on_a_grid(lambda f: log_probability(likelihood, Y, f).exp()).log()
    ours = observation_model(likelihood).log_density(Y, MEAN, VARIANCE)
    torch.testing.assert_close(ours, expected, rtol=0, atol=DENSITY_TO.get(name, 1e-10))


@pytest.mark.parametrize("name", [name for name in ONE_LATENT if name != "own"])
def test_predict_equals_moments_of_integral(name: str) -> None:
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


def test_bernoulli_probabilities_sum_to_one() -> None:
    likelihood, Y = ONE_LATENT["bernoulli"]
    one, other = (
        observation_model(likelihood).log_density(y, MEAN, VARIANCE).exp() for y in (Y, 1 - Y)
    )
    torch.testing.assert_close(one + other, torch.ones_like(one))
    probability = observation_model(likelihood).predict(MEAN, VARIANCE).mean
    torch.testing.assert_close(torch.where(Y == 1, one, other), probability)


@pytest.mark.parametrize("name", ["poisson", "negative binomial"])
def test_count_probabilities_sum_to_one(name: str) -> None:
    Y = torch.arange(150, dtype=torch.float64)[:, None].expand(150, 3)
    mean, variance = MEAN[:, 0].expand(150, 3), VARIANCE[:, 0].expand(150, 3)
    total = observation_model(ONE_LATENT[name][0]).log_density(Y, mean, variance).exp().sum(0)
    torch.testing.assert_close(total, torch.ones(3, dtype=torch.float64), rtol=1e-6, atol=0)


@one_latent
def test_observations_batch_equals_loop_with_gradients(name: str) -> None:
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


def test_observations_draw_no_random_numbers() -> None:
    likelihood, (mean, variance, Y) = softmax(True), latents(4)
    before = torch.get_rng_state()
    first = observation_model(likelihood).log_density(Y, mean, variance)
    torch.manual_seed(1)
    assert torch.equal(first, observation_model(likelihood).log_density(Y, mean, variance))
    torch.set_rng_state(before)
    observation_model(likelihood).predict(mean, variance)
    observation_model(likelihood).expected_log_prob(Y, mean, variance)
    assert torch.equal(before, torch.get_rng_state())


def test_copy_likelihood_is_copy_with_exact_nodes() -> None:
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
def test_copy_likelihood_unsupported_raise(likelihood: Likelihood) -> None:
    with pytest.raises(InputError, match=f"`likelihood`.*got {type(likelihood).__name__}"):
        copy_likelihood(likelihood)


def test_num_latents_softmax_has_classes_or_features() -> None:
    assert observation_model(softmax(False)).num_latents(1) == 3
    assert observation_model(SoftmaxLikelihood(num_features=2, num_classes=5)).num_latents(1) == 2
    assert observation_model(PoissonLikelihood()).num_latents(4) == 4
    with pytest.raises(InputError, match="one column of class numbers; got 2"):
        observation_model(softmax(False)).num_latents(2)


@pytest.mark.parametrize(
    ("likelihood", "bad", "message"),
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
def test_check_targets_impossible_targets_raise(
    likelihood: Likelihood, bad: float, message: str
) -> None:
    good = 0.5 if isinstance(likelihood, BetaLikelihood) else 1.0
    Y = torch.full((4, 1), good, dtype=torch.float64)
    observation_model(likelihood).check_targets(Y)
    Y[2] = bad
    with pytest.raises(InputError, match=message):
        observation_model(likelihood).check_targets(Y)


def test_check_targets_regression_accepts_any_number() -> None:
    for name in ("gaussian", "student", "laplace", "own"):
        observation_model(ONE_LATENT[name][0]).check_targets(REAL)


@pytest.mark.parametrize("scale", [1.0, 0.1, 0.02])
@pytest.mark.parametrize("likelihood", [StudentTLikelihood(), LaplaceLikelihood()])
def test_log_density_narrow_likelihood_is_exact(likelihood, scale: float) -> None:
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


def test_log_density_mixture_components_may_use_fewer_nodes() -> None:
    """Sixteen nodes and their reflections each, for 64 components: to 2e-3 in probability."""
    likelihood = softmax(False)
    mean, variance, Y = latents(64)
    fine = observation_model(likelihood)
    coarse = fine.for_mixture(64)
    mixture = fine.predict(mean, variance).mean.mean(0)
    rough = coarse.predict(mean, variance).mean.mean(0)
    assert not torch.equal(rough, mixture)
    torch.testing.assert_close(rough, mixture, rtol=0, atol=2e-3)
    whole = fine.log_density(Y, mean, variance).exp().mean()
    rough = coarse.log_density(Y, mean, variance).exp().mean()
    torch.testing.assert_close(rough, whole, rtol=0, atol=2e-3)


def log_shares(likelihood: SoftmaxLikelihood, mean: Tensor, variance: Tensor, t: int = 30):
    """log p(class | f) `[T N C]` on a product of Gauss-Hermite nodes, and their weights `[T]`."""
    x, w = np.polynomial.hermite_e.hermegauss(t)
    axis, weight = torch.from_numpy(x), torch.from_numpy(w / w.sum())
    nodes = torch.cartesian_prod(axis, axis, axis)
    f = mean + variance.sqrt() * nodes[:, None]
    if likelihood.mixing_weights is not None:
        f = torch.einsum("cf,tnf->tnc", likelihood.mixing_weights, f)
    return f.log_softmax(-1), torch.cartesian_prod(weight, weight, weight).prod(1)


# 4 rows, and as many rows as classes or latents, which GPyTorch mistakes for a transpose.
@pytest.mark.parametrize("N", [3, 4, 5])
@pytest.mark.parametrize("mixing", [False, True])
def test_softmax_agrees_with_product_quadrature(mixing: bool, N: int) -> None:
    """64 and 512 nodes and their reflections: to 0.006 nats in expectation, 1e-3 in probability."""
    likelihood, (mean, variance, Y) = softmax(mixing), latents(N)
    log_p, weight = log_shares(likelihood, mean, variance)
    classes = Y.long().expand(len(log_p), N, 1)
    chosen = log_p.gather(-1, classes)
    expected = torch.einsum("t,tnp->np", weight, chosen)
    ours = observation_model(likelihood).expected_log_prob(Y, mean, variance)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0.006)
    density = torch.einsum("t,tnp->np", weight, chosen.exp())
    ours = observation_model(likelihood).log_density(Y, mean, variance).exp()
    torch.testing.assert_close(ours, density, rtol=0, atol=1e-3)
    p = torch.einsum("t,tnc->nc", weight, log_p.exp())
    seen = observation_model(likelihood).predict(mean, variance)
    torch.testing.assert_close(seen.mean, p, rtol=0, atol=1e-3)
    torch.testing.assert_close(seen.variance, seen.mean * (1 - seen.mean))


@pytest.mark.parametrize("mixing", [False, True])
def test_softmax_agrees_with_random_draws(mixing: bool, generator: torch.Generator) -> None:
    """40,000 draws, |z| < 4 for three rows, with 0.006 nats for the fixed nodes' own error."""
    likelihood, (mean, variance, Y) = softmax(mixing), latents(3)
    noise = torch.randn(40_000, 3, 3, generator=generator, dtype=torch.float64)
    f = mean + variance.sqrt() * noise
    if likelihood.mixing_weights is not None:
        f = f @ likelihood.mixing_weights.mT
    draws = f.log_softmax(-1).gather(-1, Y.long().expand(40_000, 3, 1))[..., 0]
    error = (
        observation_model(likelihood).expected_log_prob(Y, mean, variance)[:, 0] - draws.mean(0)
    ).abs()
    assert ((error - 0.006).clamp_min(0) < 4 * draws.std(0) / 40_000**0.5).all()


@pytest.mark.parametrize("mixing", [False, True])
def test_softmax_probabilities_sum_to_one(mixing: bool) -> None:
    likelihood, (mean, variance, Y) = softmax(mixing), latents(5)
    total = sum(
        observation_model(likelihood).log_density(torch.full_like(Y, c), mean, variance).exp()
        for c in range(likelihood.num_classes)
    )
    torch.testing.assert_close(total, torch.ones_like(Y))
    torch.testing.assert_close(
        observation_model(likelihood).predict(mean, variance).mean.sum(1), torch.ones_like(Y[:, 0])
    )


@pytest.mark.parametrize("mixing", [False, True])
def test_softmax_accepts_batches_and_certain_latents(mixing: bool) -> None:
    likelihood, (mean, variance, Y) = softmax(mixing), latents(3)
    means, variances = torch.stack([mean, -mean]), torch.stack([variance, 2 * variance])
    together = observation_model(likelihood).expected_log_prob(Y, means, variances)
    alone = [
        observation_model(likelihood).expected_log_prob(Y, m, v)
        for m, v in zip(means, variances, strict=True)
    ]
    torch.testing.assert_close(together, torch.stack(alone))
    certain = torch.zeros_like(variance).requires_grad_()
    nats = observation_model(likelihood).expected_log_prob(Y, mean, certain)
    log_p, _ = log_shares(likelihood, mean, torch.zeros_like(mean), t=1)
    torch.testing.assert_close(nats, log_p[0].gather(-1, Y.long()))
    assert torch.isfinite(torch.autograd.grad(nats.sum(), certain)[0]).all()


@pytest.mark.parametrize("mixing", [False, True])
def test_softmax_coupling_is_negative_second_derivative(mixing: bool) -> None:
    likelihood, (mean, variance, Y) = softmax(mixing), latents(4)
    ours = observation_model(likelihood).coupling(mean, variance)
    assert ours is not None
    h = 1e-4

    def slope(at: Tensor) -> Tensor:
        at = at.clone().requires_grad_()
        nats = observation_model(likelihood).expected_log_prob(Y, at, variance).sum()
        return torch.autograd.grad(nats, at)[0]

    for f in range(3):
        step = torch.zeros_like(mean)
        step[:, f] = h
        change = (slope(mean + step) - slope(mean - step)) / (2 * h)
        torch.testing.assert_close(ours[:, f], -change, rtol=1e-5, atol=1e-7)
    assert observation_model(BernoulliLikelihood()).coupling(mean, variance) is None


def test_softmax_far_class_has_finite_density() -> None:
    mean = torch.tensor([[800.0, 0.0, 0.0]], dtype=torch.float64)
    Y = torch.tensor([[2.0]], dtype=torch.float64)
    # log E e^(f₂ − f₀) = −800 + ½ (0.1 + 0.1)
    ours = observation_model(softmax(False)).log_density(Y, mean, torch.full_like(mean, 0.1))
    torch.testing.assert_close(ours, torch.full_like(Y, -799.9), rtol=0, atol=0.01)


def test_softmax_row_blocks_give_equal_results(monkeypatch) -> None:
    likelihood, (mean, variance, Y) = softmax(True), latents(7)
    whole = observation_model(likelihood).predict(mean, variance).mean
    expected = observation_model(softmax(False)).expected_log_prob(Y, mean, variance)
    coupling = observation_model(softmax(False)).coupling(mean, variance)
    monkeypatch.setattr(softmax_expectation, "_SOFTMAX_NUMBERS", 2 * 4 * 1024)
    monkeypatch.setattr(softmax_expectation, "_NUMBERS", 1)
    torch.testing.assert_close(observation_model(likelihood).predict(mean, variance).mean, whole)
    torch.testing.assert_close(
        observation_model(softmax(False)).expected_log_prob(Y, mean, variance), expected
    )
    torch.testing.assert_close(observation_model(softmax(False)).coupling(mean, variance), coupling)


class UserGaussian(Likelihood):
    """A user-defined likelihood with its own expectation: Gaussian noise of variance 0.25."""

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any):
        raise NotImplementedError

    def expected_log_prob(self, observations: Tensor, function_dist: Any, *args: Any, **_: Any):
        nats = Normal(function_dist.mean, 0.5).log_prob(observations)
        return nats - 2 * function_dist.variance


class UserGaussianAll(UserGaussian):
    """A user-defined likelihood with its own expectation and predictions."""

    def log_marginal(self, observations: Tensor, function_dist: Any, *args: Any, **_: Any):
        return self.marginal(function_dist).log_prob(observations)

    def marginal(self, function_dist: Any, *args: Any, **_: Any):
        return Normal(function_dist.mean, (function_dist.variance + 0.25).sqrt())


class UserGaussianBell(UserGaussian):
    """A user-defined likelihood with predictions by quadrature of `forward`."""

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any):
        return Normal(function_samples, 0.5)


class Exponential(GaussianLikelihood):
    """Gaussian noise around another function of f."""

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any):
        return Normal(function_samples.exp(), self.noise.sqrt())


@pytest.mark.parametrize("kind", [UserGaussianAll, UserGaussianBell])
def test_user_likelihood_own_methods_take_precedence(kind: type[Likelihood]) -> None:
    ours, gaussian = built(kind()), built(GaussianLikelihood(), noise=0.25)
    assert observation_model(ours).num_latents(2) == 2
    observation_model(ours).check_targets(REAL)
    for method in ("expected_log_prob", "log_density"):
        values, expected = (
            getattr(observation_model(one), method)(REAL, MEAN, VARIANCE)
            for one in (ours, gaussian)
        )
        torch.testing.assert_close(values, expected)
    seen, expected = (observation_model(one).predict(MEAN, VARIANCE) for one in (ours, gaussian))
    torch.testing.assert_close(seen.mean, expected.mean)
    torch.testing.assert_close(seen.variance, expected.variance)


def test_user_likelihood_missing_methods_are_named() -> None:
    ours = built(UserGaussian())
    with pytest.raises(
        InputError, match=r"must define `forward`.*or `log_marginal`; UserGaussian has"
    ):
        observation_model(ours).log_density(REAL, MEAN, VARIANCE)
    with pytest.raises(InputError, match=r"must define `forward`.*or `marginal`; UserGaussian has"):
        observation_model(ours).predict(MEAN, VARIANCE)


def test_user_likelihood_wrong_shape_raises() -> None:
    class Summed(UserGaussian):
        def expected_log_prob(self, observations: Tensor, function_dist: Any, *args: Any, **_: Any):
            return function_dist.mean.sum(-1)

    with pytest.raises(InputError, match=r"`expected_log_prob` of Summed.*\[3, 2\]; got \[3\]"):
        observation_model(built(Summed())).expected_log_prob(REAL, MEAN, VARIANCE)


def test_user_likelihood_gaussian_subclass_uses_own_forward() -> None:
    ours = built(Exponential(), noise=0.3)
    expected = on_a_grid(lambda f: ours.forward(f).log_prob(REAL))
    torch.testing.assert_close(
        observation_model(ours).expected_log_prob(REAL, MEAN, VARIANCE), expected
    )
    seen = observation_model(ours).predict(MEAN, VARIANCE).mean
    torch.testing.assert_close(seen, (MEAN + VARIANCE / 2).exp())


def test_copy_likelihood_user_softmax_raises() -> None:
    class Tempered(SoftmaxLikelihood):
        def forward(self, function_samples: Tensor, *params: Any, **kwargs: Any):
            return torch.distributions.Categorical(logits=2 * function_samples)

    with pytest.raises(InputError, match=r"SoftmaxLikelihood itself.*got Tempered"):
        copy_likelihood(Tempered(num_classes=3, mixing_weights=False))


@pytest.mark.parametrize(
    "kind", [GaussianLikelihood, StudentTLikelihood, LaplaceLikelihood, BetaLikelihood]
)
def test_copy_likelihood_batch_shape_raises(kind: Any) -> None:
    with pytest.raises(InputError, match=f"must not have a batch shape; got {kind.__name__}.*2, 1"):
        copy_likelihood(kind(batch_shape=torch.Size([2])))
