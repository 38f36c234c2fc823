"""Averages over boxes against closed forms and fine sums."""

from math import factorial, pi, sqrt

import pytest
import torch
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, ScaleKernel
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.models import BoxKernel, MultiOutputGP, SparseGP


def boxes(*pairs: tuple[float, float]) -> Tensor:
    return torch.tensor(pairs, dtype=torch.float64)


def rbf_average(a: Tensor, b: Tensor, lengthscale: float) -> float:
    """Return the exact average covariance of an RBF kernel over two intervals (centre, width)."""

    def integral(z: float) -> float:
        s = torch.tensor(z / (sqrt(2) * lengthscale)).double()
        return (
            lengthscale**2 * (-s.square()).exp() + z * lengthscale * sqrt(pi / 2) * s.erf()
        ).item()

    (l1, u1), (l2, u2) = ((c - w / 2, c + w / 2) for c, w in (a.tolist(), b.tolist()))
    total = integral(u1 - l2) - integral(l1 - l2) - integral(u1 - u2) + integral(l1 - u2)
    return total / ((u1 - l1) * (u2 - l2))


@pytest.mark.parametrize("nodes", [3, 5])
def test_rbf_averages_are_within_the_stated_error(nodes: int) -> None:
    rows = boxes((0.0, 1.0), (0.3, 2.0), (2.5, 0.4), (-1.0, 1.5))
    base = RBFKernel().double()
    base.initialize(lengthscale=1.0)
    K = BoxKernel(base, widths=[1], nodes=nodes)(rows).to_dense()
    exact = torch.tensor([[rbf_average(a, b, 1.0) for b in rows] for a in rows]).double()
    G = nodes
    error = 2.0 ** (2 * G) * factorial(G) ** 3 / ((2 * G + 1) * 2**G * factorial(2 * G) ** 2)
    # Both arguments are averaged.
    assert (K - exact).abs().max() < 2 * error
    torch.testing.assert_close(BoxKernel(base, widths=[1], nodes=G)(rows, diag=True), K.diagonal())


@pytest.mark.parametrize(("nu", "error"), [(0.5, 0.03), (1.5, 2e-3), (2.5, 3e-4)])
def test_matern_averages_are_within_the_stated_error(nu: float, error: float) -> None:
    rows = boxes((0.0, 2.0), (0.7, 2.0), (0.0, 0.0), (0.5, 1.0))
    base = MaternKernel(nu).double()
    base.initialize(lengthscale=1.0)
    # Midpoints of a thousand parts of each box.
    parts = (torch.arange(1000).double() + 0.5) / 1000 - 0.5
    fine = rows[:, :1] + rows[:, 1:] * parts
    dense = [[base(a[:, None], b[:, None]).to_dense().mean().item() for b in fine] for a in fine]
    difference = BoxKernel(base, widths=[1])(rows).to_dense() - torch.tensor(dense).double()
    assert difference.abs().max() < error
    assert difference.abs().max() > error / 2


def test_boxes_without_extent_are_points() -> None:
    g = torch.Generator().manual_seed(0)
    X = torch.rand(9, 2, generator=g, dtype=torch.float64)
    flat = torch.cat([X[:, :1], torch.zeros(9, 2).double(), X[:, 1:]], 1)
    base: Kernel = ScaleKernel(RBFKernel(ard_num_dims=2)).double()
    kernel = BoxKernel(base, widths=[1, 2], nodes=2)
    torch.testing.assert_close(kernel(flat).to_dense(), base(X).to_dense())
    y = X.sum(1).sin()
    one = SparseGP(base, X[:4], noise=0.1)
    other = SparseGP(kernel, flat[:4], noise=0.1)
    torch.testing.assert_close(
        other.bound(Dataset.of(flat, y)), one.bound(Dataset.of(X, y)), rtol=1e-9, atol=1e-9
    )
    mixed = MultiOutputGP(
        [kernel], [flat[:4]], mixing=torch.ones(1, 1).double(), noise=torch.full((1,), 0.1).double()
    )
    torch.testing.assert_close(mixed.bound(Dataset.of(flat, y)), one.bound(Dataset.of(X, y)))


def test_posterior_of_averages_is_dense_conditional() -> None:
    """Points given averages, with a covariance matrix from a fine grid."""
    base = RBFKernel().double()
    base.initialize(lengthscale=0.5)
    rows = boxes((0.5, 1.0), (1.5, 1.0), (2.5, 1.0), (0.2, 0.0))
    grid = torch.linspace(0.0005, 2.9995, 3000).double()[:, None]
    average = torch.stack([((grid - c).abs() <= w / 2).double()[:, 0] for c, w in rows.tolist()])
    average[3] = 0
    average[3, int(0.2 * 1000)] = 1
    average = average / average.sum(1, keepdim=True)
    at = boxes((0.7, 0.0), (2.0, 0.0))
    prior = base(grid, at[:, :1]).to_dense()
    K = average @ base(grid).to_dense() @ average.mT + 0.01 * torch.eye(4)
    y = torch.tensor([0.3, -0.4, 0.8, 1.0]).double()
    expected = (average @ prior).mT @ torch.linalg.solve(K, y)
    model = MultiOutputGP(
        [BoxKernel(base, widths=[1], nodes=8)],
        [rows],
        mixing=torch.ones(1, 1).double(),
        noise=torch.full((1,), 0.01).double(),
    )
    mean = model.posterior(Dataset.of(rows, y)).predict_mean(at)
    torch.testing.assert_close(mean[:, 0], expected, rtol=2e-3, atol=2e-3)


def test_wrong_widths_are_refused() -> None:
    for widths in ([], [-1], [0, 0]):
        with pytest.raises(InputError, match="`widths` distinct column numbers"):
            BoxKernel(RBFKernel(), widths=widths)
    with pytest.raises(InputError, match="cannot be evaluated on 3 columns"):
        SparseGP(BoxKernel(RBFKernel(), widths=[1]), torch.zeros(0, 3))
