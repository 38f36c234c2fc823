"""The two-pass bound against autograd through the ordinary one, value and every gradient."""

import pytest
import torch
from gpytorch.kernels import Kernel, LinearKernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.means import ConstantMean, ZeroMean
from torch import Tensor

import winnowgp.bounds.two_pass as two_pass
from winnowgp.bounds import (
    RowBlocks,
    collapsed_bound,
    exact_log_marginal,
    tighter_bound,
    two_pass_bound,
)
from winnowgp.data import Dataset
from winnowgp.models import SparseGP
from winnowgp.models.kernels import (
    AutogradMean,
    ScaledRBFChunks,
    is_scaled_rbf,
    kernel_blocks,
    prior_mean,
)

KERNELS = {
    "rbf": lambda: ScaleKernel(RBFKernel()),
    "ard": lambda: ScaleKernel(RBFKernel(ard_num_dims=2)),
    "matern": lambda: ScaleKernel(MaternKernel(nu=2.5, ard_num_dims=2)),
    "sum": lambda: ScaleKernel(RBFKernel(active_dims=(0,))) + LinearKernel(),
}


def data(P: int = 2) -> Dataset:
    g = torch.Generator().manual_seed(0)
    X = 4 * torch.rand(37, 2, generator=g, dtype=torch.float64)
    return Dataset.of(X, torch.sin(X @ torch.randn(2, P, generator=g, dtype=torch.float64)))


def model(kernel: Kernel, rows: Dataset, M: int = 7) -> SparseGP:
    return SparseGP(kernel, rows.X[:M] + 0.1, mean=ConstantMean(), noise=0.3)


def gradients(value: Tensor, gp: SparseGP) -> dict[str, Tensor]:
    names, parameters = zip(*gp.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(value, parameters), strict=True))


def direct(gp: SparseGP, rows: Dataset, *, tighter: bool) -> Tensor:
    """The ordinary bound with the optimiser's jitter put into K_uu."""
    blocks = kernel_blocks(gp.kernel, gp.candidates, rows.X)
    jitter = two_pass.JITTER * blocks.Kuu.diagonal().mean() * torch.eye(gp.K, dtype=rows.X.dtype)
    bound = tighter_bound if tighter else collapsed_bound
    Y = rows.Y - prior_mean(gp.mean, rows.X)
    return bound(blocks.Kuu + jitter, blocks.Kuf, kff=blocks.kff, Y=Y, noise=gp.noise)


@pytest.mark.parametrize("tighter", [False, True], ids=["collapsed", "tighter"])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
def test_value_and_gradients_are_those_of_the_ordinary_bound(kernel, tighter: bool) -> None:
    rows = data()
    gp = model(kernel(), rows)
    value, expected = gp.chunked_bound(rows, tighter=tighter)(), direct(gp, rows, tighter=tighter)
    torch.testing.assert_close(value, expected, rtol=1e-8, atol=0)
    ours, theirs = gradients(value, gp), gradients(expected, gp)
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("tighter", [False, True])
@pytest.mark.parametrize(("chunk", "keep"), [(5, 0), (5, 10**9), (100, 0)])
def test_chunks_and_what_is_kept_change_nothing(chunk: int, keep: int, tighter: bool) -> None:
    rows = data()
    results = []
    for c, k in ((chunk, keep), (1_000, 10**9)):
        blocks = RowBlocks.of(rows, size=c)
        chunks = ScaledRBFChunks(
            Z=rows.X[:7] - blocks.centre,
            variance=torch.tensor(1.3, dtype=torch.float64),
            lengthscales=torch.tensor([0.7, 1.1], dtype=torch.float64),
        )
        noise = torch.tensor(0.2, dtype=torch.float64)
        mean = AutogradMean(ZeroMean(), parameters=[])
        results.append(
            two_pass_bound(chunks, blocks, mean=mean, noise=noise, tighter=tighter, keep=k)
        )
    first, second = results
    torch.testing.assert_close(first.value, second.value, rtol=1e-11, atol=0)
    torch.testing.assert_close(first.noise, second.noise, rtol=1e-9, atol=1e-9)
    for a, b in zip(first.kernel, second.kernel, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


def test_only_a_plain_scaled_rbf_takes_the_short_way() -> None:
    assert is_scaled_rbf(ScaleKernel(RBFKernel(ard_num_dims=3)))
    assert not is_scaled_rbf(RBFKernel())
    assert not is_scaled_rbf(ScaleKernel(RBFKernel(active_dims=(0,))))
    assert not is_scaled_rbf(ScaleKernel(MaternKernel()))


def test_frozen_locations_get_no_gradient() -> None:
    rows = data()
    for kernel in KERNELS.values():
        gp = model(kernel(), rows)
        gp.candidates.requires_grad_(False)
        gp.chunked_bound(rows)().backward()
        assert gp.candidates.grad is None
        assert gp.likelihood.raw_noise.grad is not None


def test_no_points_at_all() -> None:
    rows = data()
    gp = model(ScaleKernel(RBFKernel()), rows, M=0)
    torch.testing.assert_close(gp.chunked_bound(rows)(), gp.bound(rows))


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
def test_the_evidence_and_its_gradients_are_exact(kernel) -> None:
    rows = data()
    gp = model(kernel(), rows, M=0)
    Kff = kernel_blocks(gp.kernel, rows.X, rows.X).Kuf
    expected = exact_log_marginal(Kff, Y=rows.Y - prior_mean(gp.mean, rows.X), noise=gp.noise)
    value = gp.dense_bound(rows)()
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=0)
    gp.candidates.requires_grad_(False)
    parameters = [p for p in gp.parameters() if p.requires_grad]
    ours = torch.autograd.grad(value, parameters)
    theirs = torch.autograd.grad(expected, parameters)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("lengthscale", [1e-7, 1e-8, 1e-9])
def test_tiny_lengthscales_never_give_more_than_the_variance(lengthscale: float) -> None:
    rows = data(1)
    kernel = ScaleKernel(RBFKernel()).double()
    kernel.initialize(**{"outputscale": 1.3, "base_kernel.lengthscale": lengthscale})
    gp = SparseGP(kernel, rows.X[:20], noise=0.3)
    exact = gp.bound(rows).item()
    # Rounding of the exponents costs something, and never gains.
    assert -1e4 < gp.fixed_bound(rows) < exact + 1e-3
    block = next(iter(RowBlocks.of(rows)))
    blocks = ScaledRBFChunks(
        Z=rows.X[:20] - rows.X.mean(0),
        variance=torch.tensor(1.3, dtype=torch.float64),
        lengthscales=torch.full((2,), lengthscale, dtype=torch.float64),
    )
    assert float(blocks.uf(block).max()) <= 1.3 * (1 + 1e-12)
    assert float(blocks.uu().max()) <= 1.3 * (1 + 1e-12)
