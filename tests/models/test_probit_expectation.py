"""E log Φ(s f) by hand: the sum over nodes, its derivatives, and the integral."""

import numpy as np
import pytest
import torch
from scipy.special import log_ndtr
from torch import Tensor

from winnowgp.models.quadrature import probit_expectation


def problem() -> tuple[Tensor, Tensor, Tensor]:
    """Signs, means and variances; some far out, where Φ underflows."""
    sign = torch.tensor([1.0, -1, 1, -1, 1, -1], dtype=torch.float64)
    mean = torch.tensor([0.3, 0.3, -2.0, 1.5, -60.0, -60.0], dtype=torch.float64)
    variance = torch.tensor([0.5, 2.0, 0.1, 4.0, 1.0, 9.0], dtype=torch.float64)
    return sign, mean, variance


def rule(T: int) -> dict[str, Tensor]:
    """Nodes and weights of N(0, 1)."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(T)
    return {
        "nodes": torch.from_numpy(nodes),
        "weights": torch.from_numpy(weights / weights.sum()),
    }


def test_value_and_derivatives_are_those_of_the_sum_over_nodes() -> None:
    sign, mean, variance = problem()
    how = rule(20)
    ours_at = mean.clone().requires_grad_(), variance.clone().requires_grad_()
    ours = probit_expectation(sign, *ours_at, **how)
    at = mean.clone().requires_grad_(), variance.clone().requires_grad_()
    f = at[0] + at[1].sqrt() * how["nodes"][:, None]
    expected = (how["weights"][:, None] * torch.special.log_ndtr(sign * f)).sum(0)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    scale = torch.arange(1.0, 7.0, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad(ours @ scale, ours_at),
        torch.autograd.grad(expected @ scale, at),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_value_and_derivatives_are_those_of_the_integral() -> None:
    """A fine grid, and its central differences."""
    sign, mean, variance = problem()
    z = np.linspace(-12, 12, 20_001)
    weight = np.exp(-0.5 * z**2)
    weight /= weight.sum()

    def integral(m: Tensor, v: Tensor) -> Tensor:
        f = m.numpy() + np.sqrt(v.numpy()) * z[:, None]
        return torch.from_numpy((weight[:, None] * log_ndtr(sign.numpy() * f)).sum(0))

    at = mean.clone().requires_grad_(), variance.clone().requires_grad_()
    ours = probit_expectation(sign, *at, **rule(40))
    slopes = torch.autograd.grad(ours.sum(), at)
    torch.testing.assert_close(ours.detach(), integral(mean, variance), rtol=1e-6, atol=1e-6)
    h = 1e-4
    by_mean = (integral(mean + h, variance) - integral(mean - h, variance)) / (2 * h)
    by_variance = (integral(mean, variance + h) - integral(mean, variance - h)) / (2 * h)
    torch.testing.assert_close(slopes[0], by_mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(slopes[1], by_variance, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_certain_latent_has_finite_slopes(dtype: torch.dtype) -> None:
    sign, mean, variance = (part.to(dtype) for part in problem())
    at = mean.requires_grad_(), (0 * variance).requires_grad_()
    nats = probit_expectation(sign, *at, **{k: v.to(dtype) for k, v in rule(20).items()})
    torch.testing.assert_close(nats, torch.special.log_ndtr(sign * mean))
    slopes = torch.autograd.grad(nats.sum(), at)
    assert all(slope.isfinite().all() for slope in slopes)
    assert (slopes[1] == 0).all()


@pytest.mark.parametrize("mean", [-1e3, -1e5, -1e8])
def test_slopes_keep_their_digits_far_out(mean: float) -> None:
    """h(z) = −z − 1/z + 2/z³ − …, and E h = h of the mean where f is all but certain."""
    at = torch.tensor([mean], dtype=torch.float64, requires_grad=True)
    certain = torch.tensor([1e-20], dtype=torch.float64)
    nats = probit_expectation(torch.ones_like(certain), at, certain, **rule(20))
    (slope,) = torch.autograd.grad(nats.sum(), at)
    assert slope.item() == pytest.approx(-mean - 1 / mean + 2 / mean**3, rel=1e-12)
