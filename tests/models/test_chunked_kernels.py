"""Kernels in blocks of rows: closed forms against autograd through GPyTorch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpytorch.kernels import (
    AdditiveKernel,
    Kernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    ProductKernel,
    RBFKernel,
    ScaleKernel,
)
from torch import Tensor

from winnowgp.bounds.row_blocks import ChunkedKernel, RowBlocks
from winnowgp.data import Dataset
from winnowgp.models.chunked_kernels import (
    AutogradChunks,
    LinearChunks,
    ProductChunks,
    SummedChunks,
    chunked_kernel,
)
from winnowgp.models.kernels import covariance
from winnowgp.models.stationary import StationaryChunks


def matern(nu: float, **arguments: Any) -> Kernel:
    return ScaleKernel(MaternKernel(nu=nu, **arguments))


def rbf(**arguments: Any) -> Kernel:
    return ScaleKernel(RBFKernel(**arguments))


KERNELS: dict[str, Callable[[], Kernel]] = {
    "rbf": lambda: rbf(ard_num_dims=4),
    "rbf on columns": lambda: rbf(ard_num_dims=2, active_dims=(3, 1)),
    "matern32": lambda: matern(1.5, ard_num_dims=4),
    "matern52": lambda: matern(2.5, ard_num_dims=4),
    "matern32 shared": lambda: matern(1.5),
    "matern52 shared": lambda: matern(2.5),
    "matern32 on columns": lambda: matern(1.5, ard_num_dims=2, active_dims=(3, 1)),
    "matern52 on column, shared": lambda: matern(2.5, active_dims=(2,)),
    "linear": lambda: LinearKernel(ard_num_dims=4),
    "linear shared": LinearKernel,
    "linear on columns": lambda: LinearKernel(ard_num_dims=2, active_dims=(3, 1)),
    "matern + linear": lambda: matern(1.5, ard_num_dims=4) + LinearKernel(ard_num_dims=4),
    "three terms": lambda: AdditiveKernel(
        rbf(active_dims=(0, 1)), LinearKernel(active_dims=(2,)), matern(2.5, ard_num_dims=4)
    ),
    "nested sum": lambda: AdditiveKernel(AdditiveKernel(matern(1.5), matern(2.5)), rbf()),
    "rbf without scale": lambda: RBFKernel(ard_num_dims=4),
    "product": lambda: RBFKernel(active_dims=(0, 1)) * matern(1.5, ard_num_dims=4),
    "three factors": lambda: ProductKernel(
        RBFKernel(ard_num_dims=4), LinearKernel(active_dims=(2,)), MaternKernel(nu=2.5)
    ),
    "scaled product": lambda: ScaleKernel(
        RBFKernel(active_dims=(0,)) * MaternKernel(nu=1.5, active_dims=(1,))
    ),
    "scaled sum": lambda: ScaleKernel(rbf() + LinearKernel(ard_num_dims=4)),
    "sum of products": lambda: AdditiveKernel(
        ScaleKernel(RBFKernel() * ScaleKernel(rbf() + matern(2.5))), LinearKernel()
    ),
    "sum with a term for autograd": lambda: matern(1.5) + ScaleKernel(PeriodicKernel()),
    "product with a factor for autograd": lambda: ScaleKernel(
        PeriodicKernel(active_dims=(1,)) * RBFKernel(ard_num_dims=4)
    ),
}
# Not differentiable in r² at r = 0, and accurate to half of the digits there.
ROUGH: dict[str, Callable[[], Kernel]] = {
    "matern12": lambda: matern(0.5, ard_num_dims=4),
    "matern12 on columns": lambda: matern(0.5, ard_num_dims=2, active_dims=(3, 1)),
    "matern12 times rbf": lambda: matern(0.5) * RBFKernel(),
}
kernels = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
all_kernels = pytest.mark.parametrize(
    "kernel", [*KERNELS.values(), *ROUGH.values()], ids=[*KERNELS, *ROUGH]
)
rough_kernels = pytest.mark.parametrize("kernel", ROUGH.values(), ids=ROUGH)


def rows(N: int = 60, *, repeated: bool = False) -> Dataset:
    g = torch.Generator().manual_seed(0)
    X = 5.0 + 3 * torch.rand(N, 4, generator=g, dtype=torch.float64)
    if repeated:
        X[1::2] = X[::2]
    return Dataset.of(X, X[:, 0])


def drawn(kernel: Kernel) -> Kernel:
    """Return the kernel in double precision with different values of all parameters."""
    g = torch.Generator().manual_seed(1)
    kernel = kernel.double()
    with torch.no_grad():
        for parameter in kernel.parameters():
            parameter += 0.5 * torch.randn(parameter.shape, generator=g, dtype=torch.float64)
    return kernel


def evaluated(
    kernel: ChunkedKernel, blocks: RowBlocks, inputs: list[Tensor], targets: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the blocks of a kernel, and the gradient of their product with random cotangents."""
    g = torch.Generator().manual_seed(2)

    def random(like: Tensor) -> Tensor:
        values = torch.randn(like.shape, generator=g, dtype=torch.float64)
        return values.to(like)

    values = [kernel.uu()]
    uu = random(values[0])
    for block in blocks:
        Kuf, kff = kernel.uf(block), kernel.ff(block)
        values += [Kuf.clone(), kff.clone()]
        kernel.pull_uf(block, random(Kuf), Kuf)
        kernel.pull_ff(block, random(kff))
    # The sums of two shards are added, and the first leaves nothing behind.
    pulled = [kernel.pulled(), kernel.pulled()]
    sums = tuple(a + b for a, b in zip(*pulled, strict=True))
    gradient = kernel.gradient(sums, uu + uu.mT)
    assert [part.shape for part in gradient] == [part.shape for part in inputs]
    # The variance of a kernel without scale is a constant.
    learnt = [(part, own) for part, own in zip(inputs, gradient, strict=True) if part.requires_grad]
    parts, gradients = zip(*learnt, strict=True)
    return values, list(torch.autograd.grad(parts, targets, gradients, allow_unused=True))


def both(
    kernel: Kernel, data: Dataset, Z: Tensor, *, dtype: torch.dtype | None = None
) -> tuple[tuple[list[Tensor], list[Tensor]], tuple[list[Tensor], list[Tensor]]]:
    """Return values and gradients of the closed form and of autograd."""
    blocks = RowBlocks.of(data, size=25)
    targets = [*kernel.parameters(), Z]
    closed, inputs = chunked_kernel(kernel, Z, blocks, dtype)
    assert not isinstance(closed, AutogradChunks)
    oracle = AutogradChunks(kernel, Z=Z, parameters=targets)
    return evaluated(closed, blocks, inputs, targets), evaluated(oracle, blocks, targets, targets)


def exact_distance(_: Kernel, A: Tensor, B: Tensor, *, diag: bool = False, **__: Any) -> Tensor:
    """Return distances from differences: zero between equal points, with the slope zero."""
    if diag:
        return (A - B).norm(dim=-1)
    return torch.cdist(A, B, compute_mode="donot_use_mm_for_euclid_dist")


@all_kernels
@pytest.mark.parametrize("M", [7, 1])
def test_chunked_kernel_closed_form_equals_autograd(
    kernel: Callable[[], Kernel], M: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GPyTorch's distance between equal points is about 3e-8, whose slope is not zero.
    monkeypatch.setattr(MaternKernel, "covar_dist", exact_distance)
    data = rows()
    Z = (data.X[:M] + 0.1).requires_grad_()
    (values, gradients), (expected, slopes) = both(drawn(kernel()), data, Z)
    for ours, theirs in zip(values, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    for ours, theirs in zip(gradients, slopes, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9 * float(theirs.abs().max()))


@pytest.mark.parametrize("nu", [0.5, 1.5, 2.5])
def test_chunked_kernel_one_column_equals_autograd(nu: float) -> None:
    data = Dataset.of(rows().X[:, :1], rows().X[:, 1])
    Z = (data.X[:5] + 0.1).requires_grad_()
    (values, gradients), (expected, slopes) = both(drawn(matern(nu)), data, Z)
    for ours, theirs in zip([*values, *gradients], [*expected, *slopes], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@kernels
def test_chunked_kernel_repeated_rows_equal_autograd(kernel: Callable[[], Kernel]) -> None:
    """Points lie on pairs of equal rows; gradients of kernel parameters exist there."""
    data = rows(repeated=True)
    Z = data.X[:8].clone().requires_grad_()
    (values, gradients), (expected, slopes) = both(drawn(kernel()), data, Z)
    for ours, theirs in zip(values, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    for ours, theirs in zip(gradients[:-1], slopes[:-1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-7 * float(theirs.abs().max()))
    assert torch.isfinite(gradients[-1]).all()


@rough_kernels
def test_chunked_kernel_rough_at_rows_has_finite_gradient(kernel: Callable[[], Kernel]) -> None:
    """Points lie on rows; those rows add nothing to the gradient in Z."""
    data = rows(repeated=True)
    Z = data.X[:8].clone().requires_grad_()
    (values, gradients), (expected, slopes) = both(drawn(kernel()), data, Z)
    for ours, theirs in zip(values, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    for ours, theirs in zip(gradients[:-1], slopes[:-1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6 * float(theirs.abs().max()))
    away = (data.X[:8] + 1e-3).requires_grad_()
    (_, near), _ = both(drawn(kernel()), data, away)
    assert float(gradients[-1].norm()) < 10 * float(near[-1].norm())


@all_kernels
def test_chunked_kernel_float32_blocks_equal_autograd(kernel: Callable[[], Kernel]) -> None:
    data = rows()
    Z = (data.X[:7] + 0.1).requires_grad_()
    (values, gradients), (expected, slopes) = both(drawn(kernel()), data, Z, dtype=torch.float32)
    dtypes = [value.dtype for value in values]
    assert dtypes[0] == torch.float64
    assert dtypes[1::2] == [torch.float32] * 3
    for ours, theirs in zip(values, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-6, atol=4e-6)
    for ours, theirs in zip(gradients, slopes, strict=True):
        assert ours.dtype == torch.float64
        assert float((ours - theirs).norm()) < 2e-5 * max(float(theirs.norm()), 1)


def test_chunked_kernel_ignored_columns_have_no_gradient() -> None:
    data = rows()
    Z = (data.X[:5] + 0.1).requires_grad_()
    kernel = AdditiveKernel(matern(1.5, active_dims=(3,)), LinearKernel(active_dims=(1,)))
    (_, gradients), _ = both(drawn(kernel), data, Z)
    assert gradients[-1][:, [0, 2]].eq(0).all()
    assert gradients[-1][:, [1, 3]].ne(0).all()


def test_chunked_kernel_selects_the_implementation() -> None:
    data = rows(10)
    blocks = RowBlocks.of(data)

    def selected(kernel: Kernel) -> type[ChunkedKernel]:
        return type(chunked_kernel(kernel.double(), data.X[:3], blocks)[0])

    assert selected(rbf()) is selected(matern(1.5)) is selected(matern(2.5)) is StationaryChunks
    assert selected(LinearKernel()) is LinearChunks
    assert selected(RBFKernel()) is selected(matern(0.5)) is StationaryChunks
    assert selected(matern(1.5) + LinearKernel()) is SummedChunks
    assert selected(matern(1.5) + ScaleKernel(PeriodicKernel())) is SummedChunks
    assert selected(ScaleKernel(matern(1.5) + rbf())) is SummedChunks
    assert selected(ProductKernel(matern(1.5), rbf())) is ProductChunks
    others = [
        rbf(active_dims=(0, 0)),
        LinearKernel(active_dims=(0, 0)),
        ScaleKernel(PeriodicKernel()),
        PeriodicKernel() + ScaleKernel(PeriodicKernel()),
        ScaleKernel(rbf() + PeriodicKernel()),
    ]
    assert {selected(kernel) for kernel in others} == {AutogradChunks}


def test_covariance_of_far_points_has_no_tiny_numbers() -> None:
    kernel = ScaleKernel(RBFKernel()).double()
    X = torch.linspace(0, 60, 200).double()[:, None]
    chunks, _ = chunked_kernel(kernel, X, RowBlocks.of(Dataset.of(X, X[:, 0]), points=200))
    for K in (covariance(kernel, X, X), chunks.uu()):
        assert K[K > 0].min() > 1e-61
        assert (K == 0).any()
