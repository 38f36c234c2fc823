"""Blocks of rows in float32 against the same bound in float64 throughout."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.means import ConstantMean
from torch import Tensor

from winnowgp.bounds import RowBlocks, two_pass_bound
from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.models import SparseGP
from winnowgp.models.kernels import AutogradMean
from winnowgp.models.sgpr import chunked_kernel
from winnowgp.training import fit

KERNELS: dict[str, Callable[[], Kernel]] = {
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
    """The same model, double and mixed."""

    def made(precision: str) -> SparseGP:
        Z = (data.X[:K] + 0.1).clone()
        return SparseGP(kernel, Z, mean=ConstantMean(), noise=0.2, precision=precision).to(Z)

    return made("double"), made("mixed")


def evaluated(model: SparseGP, data: Dataset, **words: Any) -> tuple[Tensor, dict[str, Tensor]]:
    value = model.chunked_bound(data, **words)()
    names, parameters = zip(*model.named_parameters(), strict=True)
    return value, dict(zip(names, torch.autograd.grad(value, parameters), strict=True))


def worst(found: dict[str, Tensor], gradients: dict[str, Tensor], N: int) -> float:
    """Largest error of a gradient, of its norm; what rows add to one that cancels is no smaller."""
    return max(
        float((found[name] - gradient).norm()) / max(float(gradient.norm()), 1e-2 * N)
        for name, gradient in gradients.items()
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("weighted", [False, True], ids=["once", "weighted"])
@pytest.mark.parametrize("tighter", [False, True], ids=["collapsed", "tighter"])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_bound_and_gradient_are_those_of_double_precision(
    kernel: Callable[[], Kernel],
    tighter: bool,
    weighted: bool,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("winnowgp.bounds.row_blocks.CHUNK", 100)
    data = rows(weighted=weighted).to(torch.device(device))
    double, mixed = pair(kernel(), data, K=5)
    expected, gradients = evaluated(double, data, tighter=tighter)
    value, found = evaluated(mixed, data, tighter=tighter)
    assert value.dtype == torch.float64
    # It is another number: something was computed in float32.
    assert value.item() != expected.item()
    torch.testing.assert_close(value, expected, rtol=VALUE, atol=0)
    assert all(gradient.dtype == torch.float64 for gradient in found.values())
    assert worst(found, gradients, data.N) < GRADIENT


def test_points_that_nearly_coincide_cost_digits_and_not_the_direction() -> None:
    """K_uu is as good as singular, and 1e-8 of jitter is all that keeps it from being so."""
    data = rows()
    double, mixed = pair(KERNELS["rbf"](), data, K=40)
    with torch.no_grad():
        for model in (double, mixed):
            model.candidates[20:] = model.candidates[:20] + 1e-4
    expected, gradients = evaluated(double, data)
    value, found = evaluated(mixed, data)
    torch.testing.assert_close(value, expected, rtol=2e-4, atol=0)
    for name, gradient in gradients.items():
        cosine = torch.cosine_similarity(found[name].flatten(), gradient.flatten(), 0)
        assert float(cosine) > 0.98, name


def test_errors_do_not_grow_with_the_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over blocks are in float64: in float32 gradients would be off by 5e-6."""
    monkeypatch.setattr("winnowgp.bounds.row_blocks.CHUNK", 20)
    data = rows(40_000)
    double, mixed = pair(KERNELS["rbf"](), data, K=5)
    expected, gradients = evaluated(double, data)
    value, found = evaluated(mixed, data)
    torch.testing.assert_close(value, expected, rtol=1e-7, atol=0)
    # 4e-8 on one processor, 8e-7 on another.
    assert worst(found, gradients, data.N) < 2e-6


def test_what_has_as_many_columns_as_a_block_is_float32() -> None:
    """The point of it all: what the kernel hands back, and is handed, is in single precision."""
    data = rows(50)
    _, mixed = pair(KERNELS["rbf"](), data)
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
def test_covariances_are_known_to_the_digits_of_float32_at_any_lengthscale(
    lengthscale: float,
) -> None:
    """Of close neighbours far from the centre, exponents in float32 would be off by 1e-3."""
    data = rows(200)
    Z = data.X[:20] + 0.3 * lengthscale
    kernel = KERNELS["rbf"]().double()
    kernel.initialize(**{"base_kernel.lengthscale": lengthscale, "outputscale": 1.7})
    blocks = RowBlocks.of(data)
    block = next(iter(blocks))
    exact, rounded = (
        chunked_kernel(kernel, Z, blocks, dtype)[0].uf(block) for dtype in (None, torch.float32)
    )
    assert rounded.dtype == torch.float32
    assert float(exact.max()) > 1
    torch.testing.assert_close(rounded.double(), exact, rtol=0, atol=4e-6)


def test_what_is_reported_is_in_double_precision() -> None:
    data = rows()
    double, mixed = pair(KERNELS["rbf"](), data)
    assert mixed.fixed_bound(data) == double.fixed_bound(data)
    assert mixed.upper_bound(data) == double.upper_bound(data)
    mask = torch.arange(double.K) % 2 == 0
    marginal_gains = [
        model.subset_statistics(data).marginal_gains(mask) for model in (double, mixed)
    ]
    assert torch.equal(*marginal_gains)
    means = [model.posterior(data).predict(data.X[:9]).mean for model in (double, mixed)]
    assert torch.equal(*means)


def test_a_fit_ends_with_a_bound_as_good() -> None:
    data = rows(200)
    models = pair(KERNELS["rbf"](), data, K=0)
    bounds = [fit(model, data).elbo for model in models]
    assert bounds[1] == pytest.approx(bounds[0], rel=1e-3)


def test_copies_keep_the_precision_and_others_are_refused() -> None:
    data = rows(20)
    _, mixed = pair(KERNELS["rbf"](), data)
    assert mixed.prune(torch.arange(12) < 3).precision == "mixed"
    assert mixed.with_candidates(data.X[:2]).precision == "mixed"
    with pytest.raises(InputError, match=r'`precision` must be "double" or "mixed"; got \'half\''):
        SparseGP(KERNELS["rbf"](), data.X[:2], precision="half")
