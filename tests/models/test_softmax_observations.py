"""Classes through a softmax, against products of quadratures and random draws."""

import numpy as np
import pytest
import torch
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    SoftmaxLikelihood,
)
from torch import Tensor

from helpers.observation_problems import latents, softmax
from winnowgp.models import likelihoods as observations
from winnowgp.models import quadrature as softmax_expectation
from winnowgp.models.likelihoods import observation_model


def log_shares(likelihood: SoftmaxLikelihood, mean: Tensor, variance: Tensor, t: int = 30):
    """log p(class | f) `[T N C]` on a product of Gauss-Hermite nodes, and their weights `[T]`."""
    x, w = np.polynomial.hermite_e.hermegauss(t)
    axis, weight = torch.from_numpy(x), torch.from_numpy(w / w.sum())
    nodes = torch.cartesian_prod(axis, axis, axis)
    f = mean + variance.sqrt() * nodes[:, None]
    if likelihood.mixing_weights is not None:
        f = torch.einsum("cf,tnf->tnc", likelihood.mixing_weights, f)
    return f.log_softmax(-1), torch.cartesian_prod(weight, weight, weight).prod(1)


# 4 rows, and as many rows as there are classes or latents, which GPyTorch takes for a transpose.
@pytest.mark.parametrize("N", [3, 4, 5])
@pytest.mark.parametrize("mixing", [False, True])
def test_softmax_agrees_with_a_product_of_quadratures(mixing: bool, N: int) -> None:
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
def test_the_classes_of_softmax_share_all_probability(mixing: bool) -> None:
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
def test_softmax_takes_batches_and_certain_latents(mixing: bool) -> None:
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
def test_the_coupling_of_latents_is_the_negative_second_derivative(mixing: bool) -> None:
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


def test_a_class_far_out_of_reach_still_has_a_density() -> None:
    mean = torch.tensor([[800.0, 0.0, 0.0]], dtype=torch.float64)
    Y = torch.tensor([[2.0]], dtype=torch.float64)
    # log E e^(f₂ − f₀) = −800 + ½ (0.1 + 0.1)
    ours = observation_model(softmax(False)).log_density(Y, mean, torch.full_like(mean, 0.1))
    torch.testing.assert_close(ours, torch.full_like(Y, -799.9), rtol=0, atol=0.01)


def test_classes_a_part_at_a_time_are_the_same_as_all_at_once(monkeypatch) -> None:
    likelihood, (mean, variance, Y) = softmax(True), latents(7)
    whole = observation_model(likelihood).predict(mean, variance).mean
    expected = observation_model(softmax(False)).expected_log_prob(Y, mean, variance)
    coupling = observation_model(softmax(False)).coupling(mean, variance)
    monkeypatch.setattr(observations, "_SOFTMAX_NUMBERS", 2 * 4 * 1024)
    monkeypatch.setattr(softmax_expectation, "_NUMBERS", 1)
    torch.testing.assert_close(observation_model(likelihood).predict(mean, variance).mean, whole)
    torch.testing.assert_close(
        observation_model(softmax(False)).expected_log_prob(Y, mean, variance), expected
    )
    torch.testing.assert_close(observation_model(softmax(False)).coupling(mean, variance), coupling)
