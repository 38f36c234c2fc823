"""The bound of one block of rows, against a dense oracle and against several blocks."""

from dataclasses import replace

import pytest
import torch
from gpytorch.means import ZeroMean

from helpers import oracles
from winnowgp.bounds import row_blocks
from winnowgp.bounds.row_blocks import RowBlocks
from winnowgp.bounds.two_pass import OneBlockBound, one_block, two_pass_bound
from winnowgp.data import Dataset
from winnowgp.models.chunked_kernels import AutogradMean
from winnowgp.models.stationary import Matern32Profile, StationaryChunks

NOISE = torch.tensor(0.3, dtype=torch.float64)


def data(N: int = 40, P: int = 2) -> Dataset:
    g = torch.Generator().manual_seed(1)
    X = 3 * torch.rand(N, 2, generator=g, dtype=torch.float64)
    return Dataset.of(X, torch.randn(N, P, generator=g, dtype=torch.float64))


def kernel(rows: Dataset, blocks: RowBlocks, M: int) -> StationaryChunks:
    return StationaryChunks(
        Matern32Profile(),
        Z=rows.X[:M] + 0.05 - blocks.centre,
        variance=torch.tensor(1.4, dtype=torch.float64),
        lengthscales=torch.tensor([0.6, 1.1], dtype=torch.float64),
    )


# 700 rows and 60 points take products in panels.
@pytest.mark.parametrize(("N", "M"), [(40, 0), (40, 1), (40, 9), (700, 60)])
def test_one_block_equals_dense_oracle_and_several_blocks(N: int, M: int) -> None:
    rows = data(N)
    blocks, several = RowBlocks.of(rows), RowBlocks.of(rows, size=N // 3)
    block = one_block(blocks, NOISE)
    assert block is not None
    assert one_block(several, NOISE) is None
    chunks = kernel(rows, blocks, M)
    Kuu = chunks.uu()
    Kuu.diagonal().add_(row_blocks.JITTER * 1.4)
    everything = RowBlocks.of(rows, size=N)
    Kff = kernel(replace(rows, X=rows.X - 0.05), everything, N).uu()
    expected = oracles.collapsed(Kuu, chunks.uf(block), Kff, rows.Y, NOISE)
    bound = OneBlockBound.of(chunks, block, rows.Y, noise=NOISE.item())
    assert bound.value == pytest.approx(expected.item(), rel=1e-9)
    slope, mean, gradient = bound.gradient()
    general = two_pass_bound(
        kernel(rows, several, M),
        several,
        mean=AutogradMean(ZeroMean(), parameters=[]),
        noise=NOISE,
    )
    assert general.value.item() == pytest.approx(bound.value, rel=1e-10)
    assert general.noise.item() == pytest.approx(slope, rel=1e-8)
    for a, b in zip(gradient, general.kernel, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)
    # ∂F/∂mean = Q̂⁻¹ Y
    Q = oracles.explained(Kuu, chunks.uf(block)) + NOISE * torch.eye(N, dtype=torch.float64)
    torch.testing.assert_close(mean, torch.linalg.solve(Q, rows.Y), rtol=1e-7, atol=1e-7)


def test_one_block_of_rows_with_weights_missing_targets_or_noise_is_none() -> None:
    rows = data()
    weights = torch.full((rows.N,), 2.0, dtype=torch.float64)
    assert one_block(RowBlocks.of(replace(rows, weights=weights)), NOISE) is None
    missing = rows.Y.clone()
    missing[0, 0] = torch.nan
    assert one_block(RowBlocks.of(replace(rows, Y=missing)), NOISE) is None
    known = replace(rows, noise=torch.ones_like(rows.Y))
    assert one_block(RowBlocks.of(known), NOISE) is None
    assert one_block(RowBlocks.of(rows), NOISE.expand(2)) is None
