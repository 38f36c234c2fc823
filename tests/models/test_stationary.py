"""RBF and Matérn blocks against formulas on pairwise differences."""

from collections.abc import Callable
from math import sqrt
from typing import Any

import pytest
import torch
from gpytorch.kernels import LinearKernel, MaternKernel, RBFKernel, ScaleKernel
from torch import Tensor

from winnowgp.bounds.row_blocks import RowBlock, RowBlocks
from winnowgp.data import Dataset
from winnowgp.models.kernels import covariance
from winnowgp.models.stationary import (
    Matern12Profile,
    Matern32Profile,
    Matern52Profile,
    RadialProfile,
    RBFProfile,
    StationaryChunks,
    stationary_form,
)

PROFILES: dict[str, RadialProfile] = {
    "rbf": RBFProfile(),
    "matern12": Matern12Profile(),
    "matern32": Matern32Profile(),
    "matern52": Matern52Profile(),
}
ORACLES: dict[str, Callable[[Tensor], Tensor]] = {
    "rbf": lambda r: torch.exp(-0.5 * r**2),
    "matern12": lambda r: torch.exp(-r),
    "matern32": lambda r: (1 + sqrt(3) * r) * torch.exp(-sqrt(3) * r),
    "matern52": lambda r: (1 + sqrt(5) * r + 5 / 3 * r**2) * torch.exp(-sqrt(5) * r),
}
names = pytest.mark.parametrize("name", PROFILES)


def rows(N: int = 40, D: int = 3, *, offset: float = 0.0) -> Dataset:
    g = torch.Generator().manual_seed(0)
    X = offset + 3 * torch.rand(N, D, generator=g, dtype=torch.float64)
    return Dataset.of(X, X[:, 0])


def chunks(
    name: str, Z: Tensor, lengthscale: float = 0.8, *, dtype: torch.dtype | None = None
) -> StationaryChunks:
    return StationaryChunks(
        PROFILES[name],
        Z=Z,
        variance=torch.tensor(1.7, dtype=torch.float64),
        lengthscales=lengthscale * (1 + 0.3 * torch.arange(Z.shape[1], dtype=torch.float64)),
        dtype=dtype,
    )


def dense(name: str, A: Tensor, B: Tensor, lengthscale: float = 0.8) -> Tensor:
    lengthscales = lengthscale * (1 + 0.3 * torch.arange(A.shape[1], dtype=torch.float64))
    return 1.7 * ORACLES[name](((A[:, None] - B) / lengthscales).norm(dim=-1))


def only(blocks: RowBlocks) -> RowBlock:
    (block,) = blocks
    return block


@names
@pytest.mark.parametrize("D", [1, 3, 20])
def test_stationary_blocks_equal_formula_on_differences(name: str, D: int) -> None:
    # Rounding of r² counts relative to the distances from the centre, wherever the rows are.
    data = rows(D=D, offset=100.0)
    Z = data.X[:9] + 0.1
    blocks = RowBlocks.of(data)
    kernel, block = chunks(name, Z - blocks.centre), only(blocks)
    torch.testing.assert_close(kernel.uf(block), dense(name, Z, data.X), rtol=1e-11, atol=0)
    torch.testing.assert_close(kernel.uu(), dense(name, Z, Z), rtol=1e-11, atol=0)
    assert kernel.ff(block).tolist() == [1.7] * data.N


@names
def test_stationary_coincident_rows_have_the_variance_to_rounding(name: str) -> None:
    """An error ε of r² is one of √ε in r, and of ε in a covariance whose slope in r² is finite."""
    data = rows(200)
    blocks = RowBlocks.of(data)
    Z = data.X[:50].repeat(2, 1)
    kernel = chunks(name, Z - blocks.centre, lengthscale=0.1)
    exact = dense(name, Z, data.X, 0.1)
    Kuf, Kuu = kernel.uf(only(blocks)), kernel.uu()
    torch.testing.assert_close(Kuf, exact, rtol=0, atol=5e-12)
    assert Kuf[exact == 1.7].numel() == 100
    assert torch.equal(Kuu, Kuu.mT)
    assert Kuu.diagonal().tolist() == [1.7] * 100
    assert float(torch.linalg.eigvalsh(Kuu)[0]) > -1e-11


@names
@pytest.mark.parametrize("lengthscale", [1e-7, 1e-9, 1e-30])
@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
def test_stationary_tiny_lengthscales_stay_below_variance(
    name: str, lengthscale: float, dtype: torch.dtype | None
) -> None:
    data = rows(1000)
    blocks = RowBlocks.of(data)
    kernel = chunks(name, data.X[:20] - blocks.centre, lengthscale, dtype=dtype)
    block = only(blocks)
    Kuf = kernel.uf(block)
    for K in (Kuf, kernel.uu()):
        assert torch.isfinite(K).all()
        assert float(K.min()) >= 0
        assert float(K.max()) <= 1.7 * (1 + 1e-6)
    kernel.pull_uf(block, torch.ones_like(Kuf), Kuf)
    gradient = kernel.gradient(kernel.pulled(), torch.ones(20, 20, dtype=torch.float64))
    assert all(torch.isfinite(part).all() for part in gradient)


@names
@pytest.mark.parametrize("lengthscale", [2.0, 0.5, 0.3, 0.1, 0.01])
def test_stationary_float32_blocks_are_accurate(name: str, lengthscale: float) -> None:
    """Of close neighbours far from the centre, distances in float32 would be off by 1e-3."""
    data = rows(300)
    blocks = RowBlocks.of(data)
    Z = data.X[:20] + 0.01 * lengthscale
    found = chunks(name, Z - blocks.centre, lengthscale, dtype=torch.float32).uf(only(blocks))
    assert found.dtype == torch.float32
    exact = dense(name, Z, data.X, lengthscale)
    assert float(exact.max()) > 1.6
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=8e-6)


@names
def test_stationary_gradient_of_coincident_points_is_exact(name: str) -> None:
    """The slope in r² is finite at r = 0, where autograd through r would return nan."""
    data = rows(30)
    blocks = RowBlocks.of(data)
    block = only(blocks)
    g = torch.Generator().manual_seed(1)
    Z = data.X[:6].repeat(2, 1)
    uf = torch.randn(12, 30, generator=g, dtype=torch.float64)
    uu = torch.randn(12, 12, generator=g, dtype=torch.float64)
    uu = uu + uu.mT

    def value(Z: Tensor) -> Tensor:
        return (uf * dense(name, Z, data.X)).sum() + (uu * dense(name, Z, Z)).sum()

    kernel = chunks(name, Z - blocks.centre)
    kernel.pull_uf(block, uf.clone(), kernel.uf(block))
    *_, found = kernel.gradient(kernel.pulled(), uu.clone())
    step = 1e-5
    for i, d in ((0, 0), (7, 2), (11, 1)):
        moved = torch.zeros_like(Z)
        moved[i, d] = step
        slope = (value(Z + moved) - value(Z - moved)) / (2 * step)
        assert float(found[i, d]) == pytest.approx(float(slope), rel=1e-7, abs=1e-7)


def test_stationary_form_recognises_kernels() -> None:
    kinds = {
        RBFProfile: ScaleKernel(RBFKernel(ard_num_dims=3)),
        Matern12Profile: MaternKernel(nu=0.5, ard_num_dims=3),
        Matern32Profile: ScaleKernel(MaternKernel(nu=1.5)),
        Matern52Profile: ScaleKernel(MaternKernel(nu=2.5, active_dims=(2, 0))),
    }
    for profile, kernel in kinds.items():
        form = stationary_form(kernel, 3)
        assert form is not None
        assert type(form.profile) is profile
        assert form.lengthscales.shape == (3,)
    others = [
        ScaleKernel(RBFKernel(active_dims=(1, 1))),
        ScaleKernel(ScaleKernel(RBFKernel())),
        ScaleKernel(LinearKernel()),
        ScaleKernel(RBFKernel()) + ScaleKernel(RBFKernel()),
    ]
    assert all(stationary_form(kernel, 3) is None for kernel in others)


@pytest.mark.parametrize("outer", [False, True], ids=["base", "scale"])
def test_stationary_form_selects_the_columns_of_the_kernel(outer: bool) -> None:
    """Columns may be those of the base kernel or of the ScaleKernel, in any order."""
    columns: dict[str, Any] = {"active_dims": torch.tensor([2, 0])}
    base = MaternKernel(nu=1.5, ard_num_dims=2, **({} if outer else columns))
    kernel = ScaleKernel(base, **(columns if outer else {})).double()
    base.lengthscale = torch.tensor([0.5, 2.0], dtype=torch.float64)
    form = stationary_form(kernel, 3)
    assert form is not None
    torch.testing.assert_close(
        form.lengthscales.detach(), torch.tensor([2.0, torch.inf, 0.5], dtype=torch.float64)
    )
    data = rows(10)
    found = StationaryChunks(
        form.profile,
        Z=data.X - data.X.mean(0),
        variance=form.variance.detach(),
        lengthscales=form.lengthscales.detach(),
    ).uu()
    torch.testing.assert_close(found, covariance(kernel, data.X, data.X).detach())
