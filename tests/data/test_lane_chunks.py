"""Lanes of rows that come one after another are read in one pass."""

from collections.abc import Iterator

import pytest
import torch

from winnowgp.data import BatchSource, Dataset, standardise
from winnowgp.data.distributed import SINGLE_PROCESS, ProcessGroup
from winnowgp.data.sharding import ShardedSource
from winnowgp.data.sources import sampled_rows
from winnowgp.errors import InputError


@pytest.mark.parametrize("of", [1, 2, 3])
@pytest.mark.parametrize("N", [5, 8, 61])
def test_lanes_are_cut_from_one_stream(of: int, N: int) -> None:
    passes = 0

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        nonlocal passes
        passes += 1
        numbers = torch.arange(N, dtype=torch.float64)
        yield from zip(numbers[:, None].split(7), numbers.split(7), strict=True)

    source = BatchSource(batches)
    found = []
    for rank in range(of):
        shared = ShardedSource(source, ProcessGroup(rank, of))
        passes = 0
        shards = [[chunk.Y[:, 0] for chunk in shard] for shard in shared.shard_chunks(4)]
        assert passes == 1
        direct = [next(shard.chunks(N)).Y[:, 0] for shard in shared.shards()]
        assert [torch.cat(shard).tolist() for shard in shards] == [d.tolist() for d in direct]
        assert all(len(chunk) <= 4 for shard in shards for chunk in shard)
        found += [row for shard in shards for row in torch.cat(shard).tolist()]
    assert found == list(range(N))


@pytest.mark.parametrize("later", [39, 41])
def test_a_stream_that_changes_is_noticed_at_its_end(later: int) -> None:
    counts = iter([40])

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        rows = torch.arange(next(counts, later), dtype=torch.float64)
        yield from zip(rows[:, None].split(8), rows.split(8), strict=True)

    shared = ShardedSource(BatchSource(batches), SINGLE_PROCESS)
    with pytest.raises(InputError, match="`batches` gave 40 rows when they were counted and"):
        list(shared.chunks(5))


def test_rows_that_are_in_standard_units_twice_stay_shared() -> None:
    rows = torch.arange(40, dtype=torch.float64)
    shared = ShardedSource(Dataset.of(rows[:, None], rows), SINGLE_PROCESS)
    for source in (standardise(shared), standardise(standardise(shared))):
        found = source.materialised()
        assert isinstance(found, ShardedSource)
        assert found.process_group == shared.process_group
        assert isinstance(found.as_dataset(), Dataset)


def test_every_process_needs_a_row() -> None:
    rows = Dataset.of(torch.zeros(3, 1), torch.zeros(3))
    assert ShardedSource(rows, ProcessGroup(2, 3)).shards()[0].N == 1
    with pytest.raises(InputError, match=r"each of 4 processes needs at least one row; got 3 rows"):
        ShardedSource(rows, ProcessGroup(0, 4))


def test_standard_units_reach_every_lane() -> None:
    rows = torch.arange(40, dtype=torch.float64)
    source = BatchSource(lambda: iter([(rows[:, None], rows)]))
    shared = standardise(ShardedSource(source, SINGLE_PROCESS))
    found = torch.cat([chunk.X[:, 0] for shard in shared.shard_chunks(3) for chunk in shard])
    torch.testing.assert_close(found, (rows - rows.mean()) / rows.std(correction=0))


@pytest.mark.parametrize("N", [10, 30, 1000])
def test_sampled_rows_are_different_ones(N: int) -> None:
    rows = sampled_rows(N, 20, torch.Generator().manual_seed(0))
    assert len(rows.unique()) == len(rows) == min(N, 20)
    assert not torch.equal(rows, rows.sort().values)
    assert int(rows.max()) < N
