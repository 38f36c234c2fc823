"""SparseGP, its chunked bound and mixed precision against dense references."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpytorch.kernels import (
    Kernel,
    LinearKernel,
    MaternKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)
from gpytorch.means import ConstantMean, ZeroMean
from torch import Tensor

from helpers.short_fits import shortest_fits
from winnowgp.bounds import collapsed_bound, exact_log_marginal, row_blocks
from winnowgp.bounds.row_blocks import RowBlocks
from winnowgp.bounds.two_pass import two_pass_bound
from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.gradients import all_masks
from winnowgp.models import SparseGP
from winnowgp.models.chunked_kernels import AutogradMean, chunked_kernel
from winnowgp.models.kernels import kernel_blocks, prior_mean
from winnowgp.models.stationary import RBFProfile, StationaryChunks
from winnowgp.training import FastSchedule, MaxPoints, fit


def data(N: int = 20, P: int = 1, seed: int = 0) -> Dataset:
    g = torch.Generator().manual_seed(seed)
    X = 5 * torch.rand(N, 2, generator=g, dtype=torch.float64)
    Y = torch.sin(X[:, :1] + torch.arange(P)) + 0.1 * torch.randn(
        N, P, generator=g, dtype=torch.float64
    )
    return Dataset.of(X, Y)


def model(candidates: Tensor, **arguments) -> SparseGP:
    return SparseGP(ScaleKernel(RBFKernel(ard_num_dims=2)), candidates, noise=0.2, **arguments)


@pytest.mark.parametrize("P", [1, 3])
def test_collapsed_objective_subset_equals_pruned_bound(P: int) -> None:
    rows = data(P=P)
    gp, masks = model(rows.X[:5]), all_masks(5)
    values = gp.subset_objective(rows).value(masks)
    pruned = torch.stack([gp.prune(mask).bound(rows) for mask in masks])
    torch.testing.assert_close(values, pruned, rtol=1e-10, atol=1e-10)
    weights = gp.subset_objective(rows).relaxed_value(masks.double())
    torch.testing.assert_close(weights, pruned, rtol=1e-10, atol=1e-10)


def test_collapsed_objective_all_ones_is_ordinary_bound() -> None:
    rows = data()
    gp = model(rows.X[:7])
    everything = gp.subset_objective(rows).value(torch.ones(1, 7, dtype=torch.bool))
    torch.testing.assert_close(everything[0], gp.bound(rows))


def test_collapsed_objective_is_differentiable() -> None:
    rows = data()
    gp = model(rows.X[:4], mean=ConstantMean())
    masks = torch.tensor([[True, False, True, True], [False, True, False, False]])
    gp.subset_objective(rows).value(masks).sum().backward()
    for name, parameter in gp.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_sparse_gp_bounds_enclose_evidence() -> None:
    rows = data()
    few, all_rows = model(rows.X[:6]), model(rows.X)
    kernel = few.kernel(rows.X).to_dense()
    evidence = exact_log_marginal(kernel, Y=rows.Y, noise=few.noise)
    assert few.bound(rows) < evidence < few.upper_bound(rows)
    torch.testing.assert_close(all_rows.bound(rows), evidence, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "kernel",
    [RBFKernel(), MaternKernel(nu=1.5), LinearKernel(), RBFKernel() + LinearKernel()],
    ids=["rbf", "matern", "linear", "sum"],
)
def test_sparse_gp_accepts_any_kernel(kernel) -> None:
    rows = data()
    gp = SparseGP(kernel, rows.X[:5])
    assert torch.isfinite(gp.bound(rows))
    assert torch.isfinite(gp.posterior(rows).predict(rows.X).variance).all()


def test_sparse_gp_prune_leaves_original() -> None:
    rows = data()
    gp = model(rows.X[:4])
    pruned = gp.prune(torch.tensor([True, False, False, True]))
    with torch.no_grad():
        pruned.candidates.add_(1.0)
        pruned.likelihood.noise = torch.tensor(3.0)
    torch.testing.assert_close(gp.candidates.detach(), rows.X[:4])
    assert gp.noise.item() == pytest.approx(0.2)
    assert pruned.K == 2


def test_sparse_gp_duplicate_candidates_are_legal() -> None:
    rows = data()
    once, twice = model(rows.X[:5]), model(rows.X[:5].repeat(2, 1))
    torch.testing.assert_close(once.bound(rows), twice.bound(rows), rtol=1e-8, atol=0)
    assert torch.isfinite(twice.posterior(rows).predict(rows.X).mean).all()


def test_sparse_gp_invalid_arguments_raise() -> None:
    good = torch.zeros(3, 2, dtype=torch.float64)
    with pytest.raises(InputError, match="`candidates`"):
        model(good * float("nan"))
    with pytest.raises(InputError, match="batch shape"):
        SparseGP(RBFKernel(batch_shape=torch.Size([2])), good)
    with pytest.raises(InputError, match="`noise`"):
        SparseGP(RBFKernel(), good, noise=-1.0)


def test_sparse_gp_copies_kernel_and_mean() -> None:
    kernel, mean = ScaleKernel(RBFKernel()), ConstantMean()
    gp = SparseGP(kernel, torch.zeros(2, 1, dtype=torch.float64), mean=mean)
    assert kernel.raw_outputscale.dtype == torch.float32
    assert mean.raw_constant.dtype == torch.float32
    assert gp.kernel is not kernel


KERNELS = {
    "rbf": lambda: ScaleKernel(RBFKernel()),
    "ard": lambda: ScaleKernel(RBFKernel(ard_num_dims=2)),
    "matern": lambda: ScaleKernel(MaternKernel(nu=2.5, ard_num_dims=2)),
    "sum": lambda: ScaleKernel(RBFKernel(active_dims=(0,))) + LinearKernel(),
}


def data_chunked_bound(P: int = 2) -> Dataset:
    g = torch.Generator().manual_seed(0)
    X = 4 * torch.rand(37, 2, generator=g, dtype=torch.float64)
    return Dataset.of(X, torch.sin(X @ torch.randn(2, P, generator=g, dtype=torch.float64)))


def model_chunked_bound(kernel: Kernel, rows: Dataset, M: int = 7) -> SparseGP:
    return SparseGP(kernel, rows.X[:M] + 0.1, mean=ConstantMean(), noise=0.3)


def gradients(value: Tensor, gp: SparseGP) -> dict[str, Tensor]:
    names, parameters = zip(*gp.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(value, parameters), strict=True))


def direct(gp: SparseGP, rows: Dataset) -> Tensor:
    """The ordinary bound with the optimiser's jitter put into K_uu."""
    blocks = kernel_blocks(gp.kernel, gp.candidates, rows.X)
    jitter = row_blocks.JITTER * blocks.Kuu.diagonal().mean() * torch.eye(gp.K, dtype=rows.X.dtype)
    Y = rows.Y - prior_mean(gp.mean, rows.X)
    return collapsed_bound(blocks.Kuu + jitter, blocks.Kuf, kff=blocks.kff, Y=Y, noise=gp.noise)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
def test_chunked_bound_equals_ordinary_bound_and_gradients(kernel) -> None:
    rows = data_chunked_bound()
    gp = model_chunked_bound(kernel(), rows)
    value, expected = gp.chunked_bound(rows)(), direct(gp, rows)
    torch.testing.assert_close(value, expected, rtol=1e-8, atol=0)
    with torch.no_grad():
        assert torch.equal(gp.chunked_bound(rows)(), value)
    ours, theirs = gradients(value, gp), gradients(expected, gp)
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-6, msg=name)


def test_chunked_bound_without_gradient_has_the_same_value() -> None:
    rows = data_chunked_bound()
    gp = model_chunked_bound(ScaleKernel(RBFKernel()), rows)
    bound = gp.chunked_bound(rows)
    expected = bound()
    with torch.no_grad():
        value = bound()
    assert expected.requires_grad
    assert not value.requires_grad
    torch.testing.assert_close(value, expected.detach(), rtol=1e-13, atol=0)


@pytest.mark.parametrize(("chunk", "keep"), [(5, 0), (5, 10**9), (100, 0)])
def test_chunked_bound_ignores_chunk_and_cache_sizes(chunk: int, keep: int) -> None:
    rows = data_chunked_bound()
    results = []
    for c, k in ((chunk, keep), (1_000, 10**9)):
        blocks = RowBlocks.of(rows, size=c)
        chunks = StationaryChunks(
            RBFProfile(),
            Z=rows.X[:7] - blocks.centre,
            variance=torch.tensor(1.3, dtype=torch.float64),
            lengthscales=torch.tensor([0.7, 1.1], dtype=torch.float64),
        )
        noise = torch.tensor(0.2, dtype=torch.float64)
        mean = AutogradMean(ZeroMean(), parameters=[])
        results.append(two_pass_bound(chunks, blocks, mean=mean, noise=noise, keep=k))
    first, second = results
    torch.testing.assert_close(first.value, second.value, rtol=1e-11, atol=0)
    torch.testing.assert_close(first.noise, second.noise, rtol=1e-9, atol=1e-9)
    for a, b in zip(first.kernel, second.kernel, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


def test_chunked_bound_frozen_locations_get_no_gradient() -> None:
    rows = data_chunked_bound()
    for kernel in KERNELS.values():
        gp = model_chunked_bound(kernel(), rows)
        gp.candidates.requires_grad_(False)
        gp.chunked_bound(rows)().backward()
        assert gp.candidates.grad is None
        assert gp.likelihood.raw_noise.grad is not None


def test_chunked_bound_without_points_is_finite() -> None:
    rows = data_chunked_bound()
    gp = model_chunked_bound(ScaleKernel(RBFKernel()), rows, M=0)
    torch.testing.assert_close(gp.chunked_bound(rows)(), gp.bound(rows))


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
def test_evidence_value_and_gradients_are_exact(kernel) -> None:
    rows = data_chunked_bound()
    gp = model_chunked_bound(kernel(), rows, M=0)
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
def test_chunked_rbf_tiny_lengthscales_stay_below_variance(lengthscale: float) -> None:
    rows = data_chunked_bound(1)
    kernel = ScaleKernel(RBFKernel()).double()
    kernel.initialize(**{"outputscale": 1.3, "base_kernel.lengthscale": lengthscale})
    gp = SparseGP(kernel, rows.X[:20], noise=0.3)
    exact = gp.bound(rows).item()
    # Rounding of the exponents never increases a covariance.
    assert -1e4 < gp.fixed_bound(rows) < exact + 1e-3
    block = next(iter(RowBlocks.of(rows)))
    blocks = StationaryChunks(
        RBFProfile(),
        Z=rows.X[:20] - rows.X.mean(0),
        variance=torch.tensor(1.3, dtype=torch.float64),
        lengthscales=torch.full((2,), lengthscale, dtype=torch.float64),
    )
    assert float(blocks.uf(block).max()) <= 1.3 * (1 + 1e-12)
    assert float(blocks.uu().max()) <= 1.3 * (1 + 1e-12)


KERNELS_MIXED_PRECISION: dict[str, Callable[[], Kernel]] = {
    "rbf": lambda: ScaleKernel(RBFKernel(ard_num_dims=2)),
    "matern": lambda: ScaleKernel(MaternKernel(nu=2.5, ard_num_dims=2)),
    "sum": lambda: ScaleKernel(RBFKernel(active_dims=(0,))) + ScaleKernel(MaternKernel(nu=1.5)),
}
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
        ],
    ),
]
# Of the bound, and of the norm of each gradient, where K_uu has a condition below 1e5 or so. Rows
# are good to 6e-8, their errors average, and whitening multiplies them by the condition's root.
VALUE, GRADIENT = 5e-7, 2e-5


def rows(N: int = 700, *, weighted: bool = False) -> Dataset:
    g = torch.Generator().manual_seed(0)
    X = 4 * torch.rand(N, 2, generator=g, dtype=torch.float64)
    Y = torch.sin(X @ torch.randn(2, 2, generator=g, dtype=torch.float64))
    Y = Y + 0.3 * torch.randn(N, 2, generator=g, dtype=torch.float64)
    weights = 0.5 + 2 * torch.rand(N, generator=g, dtype=torch.float64) if weighted else None
    return Dataset.of(X, Y, weights=weights)


def pair(kernel: Kernel, data: Dataset, K: int = 12) -> tuple[SparseGP, SparseGP]:
    """Return the same model in double and in mixed precision."""

    def made(precision: str) -> SparseGP:
        Z = (data.X[:K] + 0.1).clone()
        return SparseGP(kernel, Z, mean=ConstantMean(), noise=0.2, precision=precision).to(Z)

    return made("double"), made("mixed")


def evaluated(model: SparseGP, data: Dataset) -> tuple[Tensor, dict[str, Tensor]]:
    value = model.chunked_bound(data)()
    names, parameters = zip(*model.named_parameters(), strict=True)
    return value, dict(zip(names, torch.autograd.grad(value, parameters), strict=True))


def worst(found: dict[str, Tensor], gradients: dict[str, Tensor], N: int) -> float:
    """Return the largest error of a gradient, relative to its norm."""
    return max(
        float((found[name] - gradient).norm()) / max(float(gradient.norm()), 1e-2 * N)
        for name, gradient in gradients.items()
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("weighted", [False, True], ids=["once", "weighted"])
@pytest.mark.parametrize("kernel", KERNELS_MIXED_PRECISION.values(), ids=KERNELS_MIXED_PRECISION)
def test_mixed_precision_bound_and_gradient_equal_double(
    kernel: Callable[[], Kernel],
    weighted: bool,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("winnowgp.bounds.row_blocks.CHUNK", 100)
    data = rows(weighted=weighted).to(torch.device(device))
    double, mixed = pair(kernel(), data, K=5)
    expected, gradients = evaluated(double, data)
    value, found = evaluated(mixed, data)
    assert value.dtype == torch.float64
    # The numbers differ, so that some part was computed in float32.
    assert value.item() != expected.item()
    torch.testing.assert_close(value, expected, rtol=VALUE, atol=0)
    assert all(gradient.dtype == torch.float64 for gradient in found.values())
    assert worst(found, gradients, data.N) < GRADIENT


def test_mixed_precision_coincident_points_keep_direction() -> None:
    """K_uu is singular but for a jitter of 1e-8."""
    data = rows()
    double, mixed = pair(KERNELS_MIXED_PRECISION["rbf"](), data, K=40)
    with torch.no_grad():
        for model in (double, mixed):
            model.candidates[20:] = model.candidates[:20] + 1e-4
    expected, gradients = evaluated(double, data)
    value, found = evaluated(mixed, data)
    torch.testing.assert_close(value, expected, rtol=2e-4, atol=0)
    for name, gradient in gradients.items():
        cosine = torch.cosine_similarity(found[name].flatten(), gradient.flatten(), 0)
        assert float(cosine) > 0.98, name


def test_mixed_precision_errors_do_not_grow_with_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over blocks are in float64: in float32 gradients would be off by 5e-6."""
    monkeypatch.setattr("winnowgp.bounds.row_blocks.CHUNK", 20)
    data = rows(40_000)
    double, mixed = pair(KERNELS_MIXED_PRECISION["rbf"](), data, K=5)
    expected, gradients = evaluated(double, data)
    value, found = evaluated(mixed, data)
    torch.testing.assert_close(value, expected, rtol=1e-7, atol=0)
    # 4e-8 on one processor, 8e-7 on another.
    assert worst(found, gradients, data.N) < 2e-6


def test_mixed_precision_row_blocks_are_float32() -> None:
    """Blocks that the kernel returns and receives are in single precision."""
    data = rows(50)
    _, mixed = pair(KERNELS_MIXED_PRECISION["rbf"](), data)
    blocks = RowBlocks.of(data)
    kernel, _ = chunked_kernel(mixed.kernel, mixed.candidates, blocks)
    seen: list[torch.dtype] = []
    pull = kernel.pull_uf

    def watched(block: Any, cotangent: Tensor, Kuf: Tensor) -> None:
        seen.extend([cotangent.dtype, Kuf.dtype])
        pull(block, cotangent, Kuf)

    kernel.pull_uf = watched
    mean = AutogradMean(mixed.mean, parameters=[])
    found = two_pass_bound(
        kernel, blocks, mean=mean, noise=mixed.noise.detach(), dtype=torch.float32
    )
    assert seen == [torch.float32, torch.float32]
    assert {part.dtype for part in (found.value, found.noise, *found.kernel)} == {torch.float64}


@pytest.mark.parametrize("lengthscale", [1.0, 0.5, 0.1, 0.01])
def test_mixed_precision_covariances_are_accurate(
    lengthscale: float,
) -> None:
    """Of close neighbours far from the centre, exponents in float32 would be off by 1e-3."""
    data = rows(200)
    Z = data.X[:20] + 0.3 * lengthscale
    kernel = KERNELS_MIXED_PRECISION["rbf"]().double()
    kernel.initialize(**{"base_kernel.lengthscale": lengthscale, "outputscale": 1.7})
    blocks = RowBlocks.of(data)
    block = next(iter(blocks))
    exact, rounded = (
        chunked_kernel(kernel, Z, blocks, dtype)[0].uf(block) for dtype in (None, torch.float32)
    )
    assert rounded.dtype == torch.float32
    assert float(exact.max()) > 1
    torch.testing.assert_close(rounded.double(), exact, rtol=0, atol=4e-6)


def test_mixed_precision_reports_are_in_double() -> None:
    data = rows()
    double, mixed = pair(KERNELS_MIXED_PRECISION["rbf"](), data)
    assert mixed.fixed_bound(data) == double.fixed_bound(data)
    assert mixed.upper_bound(data) == double.upper_bound(data)
    mask = torch.arange(double.K) % 2 == 0
    marginal_gains = [
        model.subset_statistics(data).marginal_gains(mask) for model in (double, mixed)
    ]
    assert torch.equal(*marginal_gains)
    means = [model.posterior(data).predict(data.X[:9]).mean for model in (double, mixed)]
    assert torch.equal(*means)


@pytest.mark.unchecked
def test_mixed_precision_fit_reaches_same_bound() -> None:
    data = rows(60)
    models = pair(KERNELS_MIXED_PRECISION["rbf"](), data, K=0)
    # The number of points is fixed: within the tolerance, the fits may select different ones.
    schedule = FastSchedule(goal=MaxPoints(6))
    with shortest_fits():
        bounds = [fit(model, data, schedule=schedule).elbo for model in models]
    assert bounds[1] == pytest.approx(bounds[0], rel=1e-3)


def test_precision_is_copied_and_validated() -> None:
    data = rows(20)
    _, mixed = pair(KERNELS_MIXED_PRECISION["rbf"](), data)
    assert mixed.prune(torch.arange(12) < 3).precision == "mixed"
    assert mixed.with_candidates(data.X[:2]).precision == "mixed"
    with pytest.raises(InputError, match="`precision` must be 'double' or 'mixed'; got 'half'"):
        SparseGP(KERNELS_MIXED_PRECISION["rbf"](), data.X[:2], precision="half")


@pytest.mark.parametrize("form", ["rbf", "rbf + linear", "autograd"])
def test_chunked_bound_has_the_same_digits_on_any_number_of_threads(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_blocks, "CHUNK", 16)
    generator = torch.Generator().manual_seed(3)
    X = torch.randn(100, 2, dtype=torch.float64, generator=generator)
    rows = Dataset.of(X, X.prod(1))
    kernel: Kernel = ScaleKernel(RBFKernel(ard_num_dims=2))
    if form == "rbf + linear":
        kernel = kernel + LinearKernel(ard_num_dims=2)
    if form == "autograd":
        kernel = ScaleKernel(RQKernel(ard_num_dims=2))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            gp = SparseGP(kernel.double(), X[:7], noise=0.1)
            value = gp.chunked_bound(rows)()
            value.backward()
            gradients = [p.grad.clone() for p in gp.parameters() if p.grad is not None]
            gp.zero_grad()
            C = gp.moments(rows)[1][0].C
            found.append([value.detach(), *gradients, C.detach()])
    finally:
        torch.set_num_threads(before)
    assert len(found[0]) >= 6
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
