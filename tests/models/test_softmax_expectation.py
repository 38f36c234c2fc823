"""E log softmax by hand: the sum over nodes, its first and second derivatives, and the integral."""

import numpy as np
import pytest
import torch
from torch import Tensor

import winnowgp.models.quadrature as softmax_expectation_module
from winnowgp.models.quadrature import (
    SOFTMAX_NODES,
    normal_nodes,
    softmax_coupling,
    softmax_expectation,
)


def problem(N: int = 7, C: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Classes, means and variances; the first row far out."""
    g = torch.Generator().manual_seed(0)
    mean = 2 * torch.randn(N, C, generator=g, dtype=torch.float64)
    mean[0] *= 300
    variance = 0.05 + 3 * torch.rand(N, C, generator=g, dtype=torch.float64)
    return torch.randint(C, (N,), generator=g), mean, variance


def slow(classes: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """The sum over the same nodes, left to automatic differentiation."""
    nodes = normal_nodes(SOFTMAX_NODES, mean.shape[1])
    f = mean + variance.sqrt() * nodes[:, None]
    chosen = f.log_softmax(-1).gather(-1, classes.expand(len(nodes), -1)[..., None])
    return chosen[..., 0].mean(0)


@pytest.mark.parametrize("rows", [3, 512])
@pytest.mark.parametrize("C", [2, 3, 10])
def test_value_and_derivatives_are_those_of_the_sum_over_nodes(
    C: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(softmax_expectation_module, "_ROWS", rows)
    classes, mean, variance = problem(C=C)
    ours_at = mean.clone().requires_grad_(), variance.clone().requires_grad_()
    at = mean.clone().requires_grad_(), variance.clone().requires_grad_()
    ours, expected = softmax_expectation(classes, *ours_at), slow(classes, *at)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    scale = torch.arange(1.0, 8.0, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad(ours @ scale, ours_at),
        torch.autograd.grad(expected @ scale, at),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    with torch.no_grad():
        torch.testing.assert_close(softmax_expectation(classes, mean, variance), ours.detach())


def test_derivatives_of_two_classes_are_those_of_a_fine_grid() -> None:
    """Only the difference of two latents counts: one integral, and its central differences."""
    classes, mean, variance = problem(C=2)
    keep = slice(1, None)
    classes, mean, variance = classes[keep], 0.5 * mean[keep], 0.3 * variance[keep]
    z = np.linspace(-12, 12, 20_001)
    weight = np.exp(-0.5 * z**2)
    weight /= weight.sum()

    def integral(m: Tensor, v: Tensor) -> Tensor:
        sign = 1.0 - 2.0 * classes.numpy()
        gap = sign * (m[:, 0] - m[:, 1]).numpy() + np.sqrt(v.sum(1).numpy()) * z[:, None]
        return torch.from_numpy(-(weight[:, None] * np.logaddexp(0, -gap)).sum(0))

    at = mean.clone().requires_grad_(), variance.clone().requires_grad_()
    slopes = torch.autograd.grad(softmax_expectation(classes, *at).sum(), at)
    h = 1e-4
    for c in range(2):
        step = torch.zeros_like(mean)
        step[:, c] = h
        by_mean = (integral(mean + step, variance) - integral(mean - step, variance)) / (2 * h)
        by_variance = (integral(mean, variance + step) - integral(mean, variance - step)) / (2 * h)
        # 128 nodes in two dimensions: three digits.
        torch.testing.assert_close(slopes[0][:, c], by_mean, rtol=0, atol=3e-3)
        torch.testing.assert_close(slopes[1][:, c], by_variance, rtol=0, atol=5e-3)


@pytest.mark.parametrize("rows", [3, 512])
def test_the_coupling_is_the_negative_second_derivative(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(softmax_expectation_module, "_ROWS", rows)
    classes, mean, variance = problem()
    ours = softmax_coupling(mean, variance)
    for i in range(len(mean)):
        row = slice(i, i + 1)
        expected = -torch.autograd.functional.hessian(
            lambda m, row=row: slow(classes[row], m[None], variance[row]).sum(), mean[i]
        )
        torch.testing.assert_close(ours[i], expected, rtol=1e-9, atol=1e-11)


def test_a_certain_latent_has_finite_slopes() -> None:
    classes, mean, variance = problem()
    at = mean.clone().requires_grad_(), (0 * variance).requires_grad_()
    nats = softmax_expectation(classes, *at)
    chosen = mean.log_softmax(1).gather(1, classes[:, None])[:, 0]
    torch.testing.assert_close(nats.detach(), chosen)
    slopes = torch.autograd.grad(nats.sum(), at)
    assert all(slope.isfinite().all() for slope in slopes)
    assert (slopes[1] == 0).all()
