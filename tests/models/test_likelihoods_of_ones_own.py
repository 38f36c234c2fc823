"""What a user may bring: likelihoods that say their own expectation, and which are refused."""

from typing import Any

import pytest
import torch
from gpytorch.likelihoods import (
    BetaLikelihood,
    GaussianLikelihood,
    LaplaceLikelihood,
    Likelihood,
    SoftmaxLikelihood,
    StudentTLikelihood,
)
from torch import Tensor
from torch.distributions import Normal

from helpers.observation_problems import MEAN, REAL, VARIANCE, built, on_a_grid
from winnowgp.errors import InputError
from winnowgp.models.likelihoods import copy_likelihood, observation_model


class Told(Likelihood):
    """A user's own that knows its integrals: Gaussian noise of variance 0.25."""

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any):
        raise NotImplementedError

    def expected_log_prob(self, observations: Tensor, function_dist: Any, *args: Any, **_: Any):
        nats = Normal(function_dist.mean, 0.5).log_prob(observations)
        return nats - 2 * function_dist.variance


class ToldAll(Told):
    """And its predictions."""

    def log_marginal(self, observations: Tensor, function_dist: Any, *args: Any, **_: Any):
        return self.marginal(function_dist).log_prob(observations)

    def marginal(self, function_dist: Any, *args: Any, **_: Any):
        return Normal(function_dist.mean, (function_dist.variance + 0.25).sqrt())


class ToldBell(Told):
    """Predictions by quadrature of what it says of f."""

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any):
        return Normal(function_samples, 0.5)


class Exponential(GaussianLikelihood):
    """Gaussian noise around another function of f."""

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any):
        return Normal(function_samples.exp(), self.noise.sqrt())


@pytest.mark.parametrize("kind", [ToldAll, ToldBell])
def test_a_likelihood_that_defines_its_expectation_is_believed(kind: type[Likelihood]) -> None:
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


def test_what_such_a_likelihood_does_not_say_is_named() -> None:
    ours = built(Told())
    with pytest.raises(InputError, match=r"must define `forward`.*or `log_marginal`; Told has"):
        observation_model(ours).log_density(REAL, MEAN, VARIANCE)
    with pytest.raises(InputError, match=r"must define `forward`.*or `marginal`; Told has"):
        observation_model(ours).predict(MEAN, VARIANCE)


def test_an_expectation_of_another_shape_is_refused() -> None:
    class Summed(Told):
        def expected_log_prob(self, observations: Tensor, function_dist: Any, *args: Any, **_: Any):
            return function_dist.mean.sum(-1)

    with pytest.raises(InputError, match=r"`expected_log_prob` of Summed.*\[3, 2\]; got \[3\]"):
        observation_model(built(Summed())).expected_log_prob(REAL, MEAN, VARIANCE)


def test_a_subclass_of_gaussian_noise_is_not_taken_for_its_parent() -> None:
    ours = built(Exponential(), noise=0.3)
    expected = on_a_grid(lambda f: ours.forward(f).log_prob(REAL))
    torch.testing.assert_close(
        observation_model(ours).expected_log_prob(REAL, MEAN, VARIANCE), expected
    )
    seen = observation_model(ours).predict(MEAN, VARIANCE).mean
    torch.testing.assert_close(seen, (MEAN + VARIANCE / 2).exp())


def test_a_softmax_of_ones_own_is_refused() -> None:
    class Tempered(SoftmaxLikelihood):
        def forward(self, function_samples: Tensor, *params: Any, **kwargs: Any):
            return torch.distributions.Categorical(logits=2 * function_samples)

    with pytest.raises(InputError, match=r"SoftmaxLikelihood itself.*got Tempered"):
        copy_likelihood(Tempered(num_classes=3, mixing_weights=False))


@pytest.mark.parametrize(
    "kind", [GaussianLikelihood, StudentTLikelihood, LaplaceLikelihood, BetaLikelihood]
)
def test_batches_of_likelihoods_are_refused(kind: Any) -> None:
    with pytest.raises(InputError, match=f"must not have a batch shape; got {kind.__name__}.*2, 1"):
        copy_likelihood(kind(batch_shape=torch.Size([2])))
