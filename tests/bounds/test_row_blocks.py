"""Row blocks: all rows in order, in memory only while they are used, and pairwise sums."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.tracked_source import Tracked
from winnowgp.bounds.row_blocks import CHUNK, RowBlocks, pairwise_sum
from winnowgp.data import ArraySource, BatchSource, Dataset, Source, shard, standardise
from winnowgp.data.sharding import ShardedSource

N, D, P = 103, 3, 2
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(N, D)), RNG.normal(size=(N, P))
WHOLE = Dataset.of(torch.tensor(X), torch.tensor(Y))

SOURCES: dict[str, Callable[[], Source]] = {
    "tensors": lambda: WHOLE,
    "arrays": lambda: ArraySource(X, Y),
    "batches": lambda: BatchSource(lambda: iter([(X[:40], Y[:40]), (X[40:], Y[40:])])),
    "shared tensors": lambda: shard(WHOLE),
    "shared arrays": lambda: shard(ArraySource(X, Y)),
}


def blocks(source: Source, size: int = 10) -> RowBlocks:
    return RowBlocks.of(source, size=size)


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("size", [1, 10, 200])
def test_row_blocks_contain_all_rows_in_order(source: Callable[[], Source], size: int) -> None:
    row_blocks = blocks(source(), size)
    assert (row_blocks.N, row_blocks.P, row_blocks.observations) == (N, P, N)
    for _ in range(2):
        cut = list(row_blocks)
        assert max(len(block) for block in cut) <= size
        assert torch.equal(torch.cat([block.X for block in cut]), WHOLE.X)
        assert torch.equal(torch.cat([block.Y for block in cut]), WHOLE.Y)
        indices = [torch.arange(N)[block.rows] for block in cut]
        assert torch.equal(torch.cat(indices), torch.arange(N))
        assert all(block.weights is None for block in cut)


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_row_blocks_features_use_one_centre(source: Callable[[], Source]) -> None:
    row_blocks = blocks(source())
    for block in row_blocks:
        x = block.X - row_blocks.centre
        expected = torch.cat([x, x**2, torch.ones(len(x), 1).double()], 1)
        assert torch.equal(block.features, expected)


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_row_blocks_sums_of_shards_equal_sums_of_rows(source: Callable[[], Source]) -> None:
    row_blocks = blocks(source())
    shards = [
        torch.stack([block.X.sum(0) for block in shard]).sum(0) for shard in row_blocks.shards()
    ]
    assert len(shards) == (8 if row_blocks.in_memory or isinstance(source(), ShardedSource) else 1)
    (total,) = row_blocks.summed((shard,) for shard in shards)
    torch.testing.assert_close(total, WHOLE.X.sum(0), rtol=1e-12, atol=1e-12)


def test_row_blocks_keep_weights_with_their_rows() -> None:
    weights = torch.tensor(RNG.uniform(0.5, 2, N))
    data = Dataset.of(WHOLE.X, WHOLE.Y, weights=weights)
    for rows in (data, shard(data), standardise(data)):
        row_blocks = blocks(rows)
        assert row_blocks.observations == pytest.approx(float(weights.sum()))
        parts = [block.weights for block in row_blocks if block.weights is not None]
        assert torch.equal(torch.cat(parts), weights)


def test_row_blocks_cut_memory_once_and_read_sources_per_pass() -> None:
    held, read = blocks(WHOLE), blocks(ArraySource(X, Y))
    assert held.in_memory
    assert not read.in_memory
    assert all(a is b for a, b in zip(held, held, strict=True))
    assert not any(a is b for a, b in zip(read, read, strict=True))


def test_row_blocks_hold_at_most_two_blocks_in_memory() -> None:
    source = Tracked(WHOLE)
    sizes = []
    for size in map(len, blocks(source)):
        sizes.append(size)
        assert source.alive <= 20
    assert sum(sizes) == N
    assert source.alive == 0
    assert source.read >= N


def test_row_blocks_size_on_cpu_fits_the_caches() -> None:
    many = Dataset(torch.zeros(2 * CHUNK + 1, 1).double(), torch.zeros(2 * CHUNK + 1, 1).double())
    assert [len(block) for block in RowBlocks.of(many, points=10_000)] == [CHUNK, CHUNK, 1]


def numbers(count: int) -> list[tuple[Tensor, ...]]:
    """Numbers of very different sizes, so that the order of additions changes the last digits."""
    g = torch.Generator().manual_seed(1)
    scale = 10.0 ** torch.randint(-8, 8, (count, 1), generator=g)
    values = torch.randn(count, 50, generator=g, dtype=torch.float64) * scale
    return [(row, row[:3] ** 2) for row in values]


def summed(parts: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """The definition: split at the largest power of two below, and sum both parts likewise."""
    if len(parts) == 1:
        return parts[0]
    half = 1
    while 2 * half < len(parts):
        half *= 2
    pairs = zip(summed(parts[:half]), summed(parts[half:]), strict=True)
    return tuple(a + b for a, b in pairs)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 13, 16])
def test_pairwise_sum_equals_recursive_definition(count: int) -> None:
    parts = numbers(count)
    for total, expected in zip(pairwise_sum(iter(parts)), summed(parts), strict=True):
        assert torch.equal(total, expected)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_pairwise_sum_is_identical_for_any_number_of_processes(world_size: int) -> None:
    """Each process sums its own shards, then the sums are added in the same way."""
    parts, each = numbers(8), 8 // world_size
    by_process = [pairwise_sum(parts[i * each : (i + 1) * each]) for i in range(world_size)]
    for total, expected in zip(pairwise_sum(by_process), pairwise_sum(parts), strict=True):
        assert torch.equal(total, expected)
