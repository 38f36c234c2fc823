"""Rows in blocks: all of them, in order, in memory only while they are looked at."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.tracked_source import Tracked
from winnowgp.bounds import RowBlocks
from winnowgp.bounds.row_blocks import CHUNK, gpu_size, pairwise_sum
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


@pytest.mark.parametrize("made", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("size", [1, 10, 200])
def test_blocks_are_all_rows_in_order(made: Callable[[], Source], size: int) -> None:
    found = blocks(made(), size)
    assert (found.N, found.P, found.observations) == (N, P, N)
    for _ in range(2):
        parts = list(found)
        assert max(len(part) for part in parts) <= size
        assert torch.equal(torch.cat([part.X for part in parts]), WHOLE.X)
        assert torch.equal(torch.cat([part.Y for part in parts]), WHOLE.Y)
        places = [torch.arange(N)[part.rows] for part in parts]
        assert torch.equal(torch.cat(places), torch.arange(N))
        assert all(part.weights is None for part in parts)


@pytest.mark.parametrize("made", SOURCES.values(), ids=SOURCES)
def test_features_are_those_of_inputs_about_one_centre(made: Callable[[], Source]) -> None:
    found = blocks(made())
    for part in found:
        x = part.X - found.centre
        expected = torch.cat([x, x**2, torch.ones(len(x), 1).double()], 1)
        assert torch.equal(part.features, expected)


@pytest.mark.parametrize("made", SOURCES.values(), ids=SOURCES)
def test_sums_of_lanes_are_those_of_all_rows(made: Callable[[], Source]) -> None:
    found = blocks(made())
    shards = [torch.stack([part.X.sum(0) for part in shard]).sum(0) for shard in found.shards()]
    assert len(shards) == (8 if isinstance(made(), ShardedSource) else 1)
    (total,) = found.summed((shard,) for shard in shards)
    torch.testing.assert_close(total, WHOLE.X.sum(0), rtol=1e-12, atol=1e-12)


def test_weights_travel_with_their_rows() -> None:
    weights = torch.tensor(RNG.uniform(0.5, 2, N))
    data = Dataset.of(WHOLE.X, WHOLE.Y, weights=weights)
    for source in (data, shard(data), standardise(data)):
        found = blocks(source)
        assert found.observations == pytest.approx(float(weights.sum()))
        parts = [part.weights for part in found if part.weights is not None]
        assert torch.equal(torch.cat(parts), weights)


def test_rows_in_memory_are_cut_once_and_others_read_for_each_pass() -> None:
    held, read = blocks(WHOLE), blocks(ArraySource(X, Y))
    assert held.in_memory
    assert not read.in_memory
    assert all(a is b for a, b in zip(held, held, strict=True))
    assert not any(a is b for a, b in zip(read, read, strict=True))


def test_no_more_rows_are_alive_than_a_block_and_the_next() -> None:
    source = Tracked(WHOLE)
    sizes = []
    for size in map(len, blocks(source)):
        sizes.append(size)
        assert source.alive <= 20
    assert sum(sizes) == N
    assert source.alive == 0
    assert source.read >= N


def test_a_block_on_a_cpu_has_rows_for_the_caches() -> None:
    many = Dataset(torch.zeros(2 * CHUNK + 1, 1).double(), torch.zeros(2 * CHUNK + 1, 1).double())
    assert [len(block) for block in RowBlocks.of(many, points=10_000)] == [CHUNK, CHUNK, 1]


def numbers(count: int) -> list[tuple[Tensor, ...]]:
    """Of very different sizes, so that the order of additions shows in the last digits."""
    g = torch.Generator().manual_seed(1)
    scale = 10.0 ** torch.randint(-8, 8, (count, 1), generator=g)
    values = torch.randn(count, 50, generator=g, dtype=torch.float64) * scale
    return [(row, row[:3] ** 2) for row in values]


def summed(parts: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """The definition: halves of the largest power of two below, each summed in the same way."""
    if len(parts) == 1:
        return parts[0]
    half = 1
    while 2 * half < len(parts):
        half *= 2
    pairs = zip(summed(parts[:half]), summed(parts[half:]), strict=True)
    return tuple(a + b for a, b in pairs)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 13, 16])
def test_parts_are_added_in_pairs(count: int) -> None:
    parts = numbers(count)
    for found, expected in zip(pairwise_sum(iter(parts)), summed(parts), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("of", [1, 2, 4, 8])
def test_processes_add_up_to_the_same_digits(of: int) -> None:
    """Each sums its own lanes, then their sums are summed in the same way."""
    parts, each = numbers(8), 8 // of
    theirs = [pairwise_sum(parts[i * each : (i + 1) * each]) for i in range(of)]
    for found, expected in zip(pairwise_sum(theirs), pairwise_sum(parts), strict=True):
        assert torch.equal(found, expected)


def test_gpu_size_leaves_half_of_the_memory_free() -> None:
    # 128 GiB are more than enough for few columns; a matrix of a block has 2^26 numbers at most.
    assert gpu_size(2**37, 1024, 9) == 65_536
    assert gpu_size(2**37, 128, 9) == gpu_size(2**37, 0, 9) == 262_144
    assert gpu_size(2**37, 1024, 10_000) == 2**26 // 10_000
    # What is held of a row: six numbers for each point and each input, of eight bytes.
    for points, inputs in ((1000, 24), (24, 1000), (512, 512)):
        assert gpu_size(2**30, points, inputs) == 2**29 // (8 * 6 * 1024)
    assert gpu_size(0, 1024, 9) == CHUNK
