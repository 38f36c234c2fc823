"""Starts of the search for hyper-parameters: the model as given, and scaled variants."""

import pytest
import torch
from gpytorch.kernels import Kernel, RBFKernel, ScaleKernel
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.models import SparseGP
from winnowgp.training.initialization import starting_points, trainable_lengthscales


def data(D: int, N: int = 50) -> Dataset:
    g = torch.Generator().manual_seed(0)
    X = 2 * torch.rand(N, D, generator=g, dtype=torch.float64) - 1
    return Dataset.of(X, torch.randn(N, generator=g, dtype=torch.float64))


def model(rows: Dataset, kernel: Kernel, noise: float = 1.0) -> SparseGP:
    return SparseGP(kernel, rows.X[:3], noise=noise)


def lengthscale(gp: SparseGP) -> Tensor:
    base = gp.kernel.get_submodule("base_kernel")
    assert isinstance(base, Kernel)
    return base.lengthscale.detach().flatten()


@pytest.mark.parametrize(
    ("D", "factors"), [(1, (1.0, 0.1)), (3, (3**0.5, 1.0, 0.1)), (4, (2.0, 1.0))]
)
def test_starts_include_model_and_scaled_variants(D: int, factors: tuple[float, ...]) -> None:
    rows = data(D=D)
    X = rows.X * torch.tensor([1.0, 10.0, 0.0, 2.0], dtype=torch.float64)[:D]
    rows = Dataset(X, 5 * rows.Y)
    gp = model(rows, ScaleKernel(RBFKernel(ard_num_dims=D)), noise=0.7)
    given, *others = starting_points(gp, rows)
    assert len(starting_points(gp, rows, 2)) == 2
    assert torch.equal(lengthscale(given), lengthscale(gp))
    assert given.noise.item() == pytest.approx(0.7)
    spread = X.std(0, correction=0)
    spread[2:3] = 1.0  # a constant column
    variance = rows.Y.square().mean().item()
    wanted = [(f, n) for f in factors for n in (0.1, 0.01)]
    for (factor, noise), start in zip(wanted, others, strict=True):
        torch.testing.assert_close(lengthscale(start), factor * spread, rtol=1e-9, atol=0)
        assert start.noise.item() == pytest.approx(noise * variance)
        assert start.K == 0


def test_shared_lengthscale_uses_mean_spread() -> None:
    rows = data(D=3)
    rows = Dataset(rows.X * torch.tensor([1.0, 4.0, 100.0], dtype=torch.float64), rows.Y)
    gp = model(rows, ScaleKernel(RBFKernel(active_dims=(0, 1))))
    spread = rows.X.std(0, correction=0)[:2].mean()
    torch.testing.assert_close(lengthscale(starting_points(gp, rows)[4])[0], spread)


def test_equal_terms_stay_apart() -> None:
    rows = data(D=2, N=20)
    first, second = RBFKernel(ard_num_dims=2), RBFKernel(ard_num_dims=2)
    second.lengthscale = 0.1 * first.lengthscale
    kernel = first + second
    starts = starting_points(model(rows, kernel), rows)
    for start in starts:
        long, short = (part.lengthscale for part in trainable_lengthscales(start.kernel))
        torch.testing.assert_close(short, 0.1 * long, rtol=1e-4, atol=0)
