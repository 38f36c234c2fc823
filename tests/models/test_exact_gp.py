"""Exact Gaussian process regression: rows that are left out in closed form."""

import pytest
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.means import ConstantMean

from winnowgp.data import Dataset
from winnowgp.models import SparseGP
from winnowgp.models.exact_gp import exact_log_density, leave_one_out_density

N = 12


def rows(*, weighted: bool, known_noise: bool, P: int) -> Dataset:
    g = torch.Generator().manual_seed(0)
    X, Y = (torch.randn(N, size, generator=g, dtype=torch.float64) for size in (2, P))
    weights, noise = (
        torch.rand(N, size, generator=g, dtype=torch.float64) + 0.5 for size in (1, P)
    )
    return Dataset(X, Y, weights[:, 0] if weighted else None, noise if known_noise else None)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("known_noise", [False, True])
@pytest.mark.parametrize("each", [False, True], ids=["one noise", "noise of each target"])
def test_leave_one_out_density_equals_that_without_the_row(
    weighted: bool, known_noise: bool, each: bool
) -> None:
    data = rows(weighted=weighted, known_noise=known_noise, P=2)
    kernel = ScaleKernel(MaternKernel(nu=1.5, ard_num_dims=2))
    gp = SparseGP(kernel, data.X[:0], mean=ConstantMean())
    gp.mean.initialize(constant=0.3)
    noise = torch.tensor([0.2, 0.7] if each else 0.2, dtype=torch.float64)
    found = leave_one_out_density(gp.kernel, data=data, mean=gp.mean, noise=noise)
    numbers = torch.arange(N)
    expected = [
        exact_log_density(
            gp.kernel,
            data=data.part(numbers[numbers != i]),
            mean=gp.mean,
            noise=noise,
            rows=data.part(numbers[numbers == i]),
        )
        for i in range(N)
    ]
    torch.testing.assert_close(found, torch.cat(expected))
