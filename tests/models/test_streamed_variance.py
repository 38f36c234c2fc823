"""A greedy choice among greedy choices: what it keeps, and that it never sees all rows at once."""

from typing import Any

import pytest
import torch
from gpytorch.kernels import Kernel, MaternKernel
from torch import Tensor

from winnowgp.models import greedy_variance
from winnowgp.models.candidates import chunked_greedy_variance


def rows(N: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return 6 * torch.rand(N, 2, generator=g, dtype=torch.float64)


class Watched(Kernel):
    """A Matérn kernel that remembers the largest block asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MaternKernel(nu=1.5).double()
        self.largest = 0

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, *rest: Any, **params: Any) -> Any:
        if not diag:
            self.largest = max(self.largest, x1.shape[-2] * x2.shape[-2])
        return self.inner.forward(x1, x2, diag=diag, **params)


def test_with_few_rows_it_is_the_greedy_choice() -> None:
    X, kernel = rows(60), MaternKernel(nu=1.5).double()
    assert torch.equal(
        chunked_greedy_variance(kernel, X, 12, rows=60), greedy_variance(kernel, X, 12, given=X[:0])
    )


@pytest.mark.parametrize("seed", range(3))
def test_in_parts_it_leaves_little_more_variance_than_all_rows_at_once(seed: int) -> None:
    X, kernel = rows(300, seed), MaternKernel(nu=1.5).double()
    X = X[X[:, 0].argsort()]

    def left(chosen: Tensor) -> float:
        with torch.no_grad():
            cross, inner = kernel(X[chosen], X).to_dense(), kernel(X[chosen]).to_dense()
        return (len(X) - (cross * torch.linalg.solve(inner, cross)).sum()).item()

    parts = chunked_greedy_variance(kernel, X, 25, rows=40)
    assert len(set(parts.tolist())) == 25
    at_once = left(greedy_variance(kernel, X, 25, given=X[:0]))
    assert left(parts) < 1.15 * at_once
    # A part alone would be far off.
    assert left(greedy_variance(kernel, X[:40], 25, given=X[:0])) > 1.3 * at_once


def test_rows_of_every_part_can_be_kept() -> None:
    """A far cluster in the last part must not be missed, nor one in the first be forgotten."""
    X = torch.cat([rows(20) + 100, rows(60), rows(20) - 100])
    chosen = chunked_greedy_variance(MaternKernel(nu=1.5).double(), X, 15, rows=20)
    assert bool((chosen < 20).any())
    assert bool((chosen >= 80).any())


def test_duplicates_across_parts_are_kept_once() -> None:
    X = rows(8).repeat(4, 1)
    chosen = chunked_greedy_variance(MaternKernel(nu=1.5).double(), X, 30, rows=8)
    assert len(X[chosen].unique(dim=0)) == len(chosen) == 8


def test_no_block_is_larger_than_a_part_with_what_is_kept() -> None:
    kernel = Watched()
    chunked_greedy_variance(kernel, rows(2000), 10, rows=50)
    assert 0 < kernel.largest <= 10 + 50
