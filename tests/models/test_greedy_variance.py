"""Greedy conditional variance against dense conditioning, whole and in blocks."""

from typing import Any

import pytest
import torch
from gpytorch.kernels import Kernel, LinearKernel, MaternKernel, RBFKernel, ScaleKernel
from torch import Tensor

from winnowgp.models import greedy, greedy_variance
from winnowgp.models.greedy import chunked_greedy_variance, pivoted_cholesky

KERNELS = {
    "matern": lambda: MaternKernel(nu=1.5),
    "scaled": lambda: ScaleKernel(RBFKernel()),
    "sum": lambda: MaternKernel(nu=0.5) + LinearKernel(),
}
kernels = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())


@pytest.fixture(autouse=True, params=[0, 256], ids=["in blocks", "at once"])
def _few_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Select among the rows of a test in blocks, and at once."""
    monkeypatch.setattr(greedy, "_FEW_ROWS", request.param)


def rows(N: int = 30, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return 6 * torch.rand(N, 2, generator=g, dtype=torch.float64)


def left(kernel: Kernel, X: Tensor, S: Tensor) -> Tensor:
    """Return the conditional variance of each row given f(S), relative to its prior variance."""
    with torch.no_grad():
        prior = kernel(X).to_dense().diagonal()
        if len(S) == 0:
            return torch.ones_like(prior)
        cross = kernel(S, X).to_dense()
        known = (cross * torch.linalg.solve(kernel(S).to_dense(), cross)).sum(0)
    return (prior - known) / prior


@kernels
@pytest.mark.parametrize("M", [0, 4])
@pytest.mark.parametrize("seed", range(3))
def test_greedy_variance_selects_largest_conditional_variance(kernel, M: int, seed: int) -> None:
    k, X, given = kernel().double(), rows(seed=seed), rows(M, seed=seed + 10)
    chosen = greedy_variance(k, X, 10, given=given)
    assert len(chosen) == 10
    for step, row in enumerate(chosen):
        share = left(k, X, torch.cat([given, X[chosen[:step]]]))
        assert share[row] > share.max() - 1e-9, step


@kernels
@pytest.mark.parametrize("M", [0, 4])
def test_pivoted_cholesky_many_rows_matches_one_at_a_time(kernel, M: int) -> None:
    """More rows than contenders, and all of them selected."""
    k, X, given = kernel().double(), 4 * rows(150), rows(M, seed=1)
    result = pivoted_cholesky(k, X, 150, given=given)
    assert sorted(result.indices.tolist()) == list(range(150))
    with torch.no_grad():
        K = k(torch.cat([given, X])).to_dense()
    for j in range(M):
        K = K - torch.outer(K[j], K[j]) / K[j, j]
    K, prior = K[M:, M:], k(X).to_dense().diagonal().detach()
    torch.testing.assert_close(result.prior, prior.sum())
    for row, trace in zip(result.indices.tolist(), result.traces, strict=True):
        share = K.diagonal() / prior
        assert share[row] > share.max() - 1e-8
        K = K - torch.outer(K[row], K[row]) / K[row, row]
        torch.testing.assert_close(trace, K.diagonal().sum(), rtol=1e-6, atol=1e-8)


def test_greedy_variance_selects_first_of_equal_rows() -> None:
    X = 1e3 * torch.arange(100, dtype=torch.float64)[:, None]
    chosen = greedy_variance(RBFKernel().double(), X, 100, given=X[:0])
    assert chosen.tolist() == list(range(100))


def test_pivoted_cholesky_stops_at_trace() -> None:
    X, kernel = rows(200), MaternKernel(nu=0.5).double()
    whole = pivoted_cholesky(kernel, X, 200, given=X[:0])
    for count in (1, 2, 57, 150):
        stop = whole.traces[count - 1].item() * (1 + 1e-9)
        part = pivoted_cholesky(kernel, X, 200, given=X[:0], stop=stop)
        assert torch.equal(part.indices, whole.indices[:count])
        assert torch.equal(part.traces, whole.traces[:count])
    assert len(pivoted_cholesky(kernel, X, 200, given=X[:0], stop=200.5).indices) == 0


@kernels
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_greedy_variance_selects_duplicates_once(kernel, dtype: torch.dtype) -> None:
    X = rows(20).to(dtype).repeat(3, 1)
    chosen = greedy_variance(kernel().to(dtype), X, 60, given=X[:0])
    assert len(X[chosen].unique(dim=0)) == len(chosen) == 20


@kernels
def test_greedy_variance_skips_given_points(kernel) -> None:
    X = rows(12)
    chosen = greedy_variance(kernel().double(), X, 12, given=X[:5])
    assert sorted(chosen.tolist()) == list(range(5, 12))


def test_greedy_variance_accepts_duplicate_given_points() -> None:
    X = rows(12)
    kernel = MaternKernel(nu=0.5).double()
    once = greedy_variance(kernel, X, 4, given=X[:3])
    twice = greedy_variance(kernel, X, 4, given=X[:3].repeat(2, 1))
    assert torch.equal(once, twice)


@pytest.mark.parametrize("K", [0, 1, 9, 10, 50])
def test_greedy_variance_returns_at_most_k_rows(K: int) -> None:
    X = rows(10)
    chosen = greedy_variance(MaternKernel(nu=0.5).double(), X, K, given=X[:0])
    assert len(set(chosen.tolist())) == len(chosen) == min(K, 10)


def test_greedy_variance_low_rank_kernel_stops_early() -> None:
    """A linear function of two inputs is known from two rows."""
    X = rows(20)
    assert len(greedy_variance(LinearKernel().double(), X, 20, given=X[:0])) == 2


def test_greedy_variance_takes_no_gradient() -> None:
    X = rows(5).requires_grad_()
    assert not greedy_variance(ScaleKernel(RBFKernel()).double(), X, 3, given=X[:1]).requires_grad


def test_greedy_variance_skips_rows_without_variance() -> None:
    """A linear function has no variance at zero."""
    X = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None]
    assert len(greedy_variance(LinearKernel().double(), X, 3, given=X[:0])) == 1


@pytest.mark.parametrize("kernel", [RBFKernel, lambda: ScaleKernel(RBFKernel())], ids=["1", "s"])
@pytest.mark.parametrize("M", [0, 3])
def test_greedy_variance_accepts_mixed_precision(kernel, M: int) -> None:
    X = rows(12)
    expected = greedy_variance(kernel().double(), X, 6, given=X[:M])
    for k, A in ((kernel().double(), X.float()), (kernel(), X)):
        assert torch.equal(greedy_variance(k, A, 6, given=A[:M]), expected)


@pytest.mark.slow
def test_greedy_variance_float32_handles_large_indices() -> None:
    """Of seventeen million rows only the last has conditional variance."""
    X = torch.zeros(2**24 + 2, 1)
    X[-1] = 3
    assert greedy_variance(RBFKernel(), X, 1, given=X[:1]).tolist() == [2**24 + 1]


def rows_streamed_variance(N: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return 6 * torch.rand(N, 2, generator=g, dtype=torch.float64)


class Watched(Kernel):
    """A Matérn kernel that records the largest block it evaluates."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MaternKernel(nu=1.5).double()
        self.largest = 0

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, *rest: Any, **params: Any) -> Any:
        if not diag:
            self.largest = max(self.largest, x1.shape[-2] * x2.shape[-2])
        return self.inner.forward(x1, x2, diag=diag, **params)


def test_chunked_greedy_few_rows_equals_greedy() -> None:
    X, kernel = rows_streamed_variance(60), MaternKernel(nu=1.5).double()
    assert torch.equal(
        chunked_greedy_variance(kernel, X, 12, rows=60), greedy_variance(kernel, X, 12, given=X[:0])
    )


@pytest.mark.parametrize("seed", range(3))
def test_chunked_greedy_blocks_leave_little_more_variance(seed: int) -> None:
    X, kernel = rows_streamed_variance(300, seed), MaternKernel(nu=1.5).double()
    X = X[X[:, 0].argsort()]

    def left(chosen: Tensor) -> float:
        with torch.no_grad():
            cross, inner = kernel(X[chosen], X).to_dense(), kernel(X[chosen]).to_dense()
        return (len(X) - (cross * torch.linalg.solve(inner, cross)).sum()).item()

    parts = chunked_greedy_variance(kernel, X, 25, rows=40)
    assert len(set(parts.tolist())) == 25
    at_once = left(greedy_variance(kernel, X, 25, given=X[:0]))
    assert left(parts) < 1.15 * at_once
    # One block alone would be far off.
    assert left(greedy_variance(kernel, X[:40], 25, given=X[:0])) > 1.3 * at_once


def test_chunked_greedy_selects_rows_of_every_block() -> None:
    """Far clusters in the first and the last block are both selected."""
    X = torch.cat(
        [
            rows_streamed_variance(20) + 100,
            rows_streamed_variance(60),
            rows_streamed_variance(20) - 100,
        ]
    )
    chosen = chunked_greedy_variance(MaternKernel(nu=1.5).double(), X, 15, rows=20)
    assert bool((chosen < 20).any())
    assert bool((chosen >= 80).any())


def test_chunked_greedy_selects_duplicates_across_blocks_once() -> None:
    X = rows_streamed_variance(8).repeat(4, 1)
    chosen = chunked_greedy_variance(MaternKernel(nu=1.5).double(), X, 30, rows=8)
    assert len(X[chosen].unique(dim=0)) == len(chosen) == 8


def test_chunked_greedy_evaluates_no_larger_blocks() -> None:
    kernel = Watched()
    chunked_greedy_variance(kernel, rows_streamed_variance(2000), 10, rows=50)
    assert 0 < kernel.largest <= 10 + 50
