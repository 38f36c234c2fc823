"""Whitened chunks against the dense blocks."""

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from torch import Tensor

from winnowgp.bounds.row_blocks import (
    JITTER,
    ChunkedKernel,
    RowBlock,
    RowBlocks,
    WhitenedChunks,
)
from winnowgp.data import Dataset
from winnowgp.linalg import cholesky
from winnowgp.models.kernels import KernelBlocks, kernel_blocks

WIDTHS = [1, 5, 100, 200]
"""Numbers of inducing points: one panel, and several."""


class Counted(ChunkedKernel):
    """Precomputed kernel blocks, with a record of the rows that were evaluated."""

    def __init__(self, blocks: KernelBlocks) -> None:
        self._blocks = blocks
        self.evaluated: list[slice] = []

    def fork(self) -> "Counted":
        raise NotImplementedError

    def uu(self) -> Tensor:
        return self._blocks.Kuu.clone()

    def uf(self, block: RowBlock) -> Tensor:
        self.evaluated.append(block.rows)
        return self._blocks.Kuf[:, block.rows]

    def ff(self, block: RowBlock) -> Tensor:
        return self._blocks.kff[block.rows]

    def pull_uf(self, block: RowBlock, cotangent: Tensor, Kuf: Tensor) -> None:
        raise NotImplementedError

    def pull_ff(self, block: RowBlock, cotangent: Tensor) -> None:
        raise NotImplementedError

    def pulled(self) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def gradient(self, pulled: tuple[Tensor, ...], uu: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError


def rows_of(N: int, chunk: int | None = None) -> RowBlocks:
    """N rows of zeros in blocks."""
    return RowBlocks.of(Dataset(torch.zeros(N, 1), torch.zeros(N, 1)), size=chunk)


@torch.no_grad()
def blocks(M: int, N: int = 23) -> KernelBlocks:
    g = torch.Generator().manual_seed(M)
    X = torch.rand(N, 3, generator=g, dtype=torch.float64)
    Z = torch.rand(M, 3, generator=g, dtype=torch.float64)
    kernel = ScaleKernel(RBFKernel()).double()
    kernel.base_kernel.initialize(lengthscale=0.2)
    kernel.initialize(outputscale=1.7)
    return kernel_blocks(kernel, Z, X)


def whole(chunks: WhitenedChunks) -> tuple[Tensor, Tensor, Tensor]:
    """K_uf, V and t of all rows."""
    parts = list(chunks)
    return (
        torch.cat([part.Kuf for part in parts], 1),
        torch.cat([part.V for part in parts], 1),
        torch.cat([part.t for part in parts]),
    )


@pytest.mark.parametrize("keep", [0, 10**9])
@pytest.mark.parametrize("chunk", [1, 7, 23, 50])
@pytest.mark.parametrize("M", WIDTHS)
def test_whitened_chunks_equal_dense_blocks(M: int, chunk: int, keep: int) -> None:
    b = blocks(M)
    shift = JITTER * b.Kuu.diagonal().mean() * torch.eye(M, dtype=b.Kuu.dtype)
    exact = cholesky(b.Kuu).L
    for made, L in [
        (WhitenedChunks.for_gradients, torch.linalg.cholesky(b.Kuu + shift)),
        (WhitenedChunks.for_values, exact),
    ]:
        chunks = made(Counted(b), rows_of(23, chunk), keep=keep)
        torch.testing.assert_close(chunks.L, L, rtol=1e-12, atol=1e-12)
        V = torch.linalg.solve(L, b.Kuf)
        for _ in range(2):
            Kuf, ours, t = whole(chunks)
            assert torch.equal(Kuf, b.Kuf)
            torch.testing.assert_close(ours, V, rtol=1e-8, atol=1e-8)
            torch.testing.assert_close(t, b.kff - (V * V).sum(0), rtol=1e-8, atol=1e-8)


def test_whitened_chunks_cover_each_row_once() -> None:
    for made in (WhitenedChunks.for_gradients, WhitenedChunks.for_values):
        rows = [part.rows for part in made(Counted(blocks(4)), rows_of(23, 10))]
        assert rows == [slice(0, 10), slice(10, 20), slice(20, 23)]


@pytest.mark.parametrize(("spare", "passes"), [(0, 1), (-1, 3)])
def test_whitened_chunks_kept_evaluate_kernel_once(spare: int, passes: int) -> None:
    """`keep` counts elements: V and K_uf have N M each."""
    kernel = Counted(blocks(4))
    chunks = WhitenedChunks.for_values(kernel, rows_of(23, 10), keep=2 * 23 * 4 + spare)
    for _ in range(3):
        list(chunks)
    assert len(kernel.evaluated) == 3 * passes


def test_whitened_chunks_interrupted_pass_keeps_nothing() -> None:
    kernel = Counted(blocks(4))
    chunks = WhitenedChunks.for_values(kernel, rows_of(23, 10))
    next(iter(chunks))
    assert [part.rows.start for part in chunks] == [0, 10, 20]


def test_whitened_chunks_unexplained_variance_is_not_negative() -> None:
    """The unexplained variance of rows at inducing points is zero, not a rounding error below."""
    Kuu = blocks(5).Kuu
    kernel = Counted(KernelBlocks(Kuu, Kuu, Kuu.diagonal() * (1 - 1e-6)))
    for made in (WhitenedChunks.for_gradients, WhitenedChunks.for_values):
        assert torch.equal(whole(made(kernel, rows_of(5)))[2], torch.zeros(5, dtype=Kuu.dtype))


def test_whitened_chunks_without_points_leave_all_variance() -> None:
    b = blocks(0)
    for made in (WhitenedChunks.for_gradients, WhitenedChunks.for_values):
        _, V, t = whole(made(Counted(b), rows_of(23, 10)))
        assert V.shape == (0, 23)
        torch.testing.assert_close(t, b.kff)
