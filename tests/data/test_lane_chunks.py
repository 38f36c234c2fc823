"""Lanes of rows that come one after another are read in one pass."""

from collections.abc import Iterator

import pytest
import torch

from winnowgp.data import BatchSource, Ranks, SharedSource, sampled_rows, standardised


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
        shared = SharedSource(source, Ranks(rank, of))
        passes = 0
        lanes = [[chunk.Y[:, 0] for chunk in lane] for lane in shared.lane_chunks(4)]
        assert passes == 1
        direct = [next(lane.chunks(N)).Y[:, 0] for lane in shared.lanes()]
        assert [torch.cat(lane).tolist() for lane in lanes] == [d.tolist() for d in direct]
        assert all(len(chunk) <= 4 for lane in lanes for chunk in lane)
        found += [row for lane in lanes for row in torch.cat(lane).tolist()]
    assert found == list(range(N))


def test_standard_units_reach_every_lane() -> None:
    rows = torch.arange(40, dtype=torch.float64)
    source = BatchSource(lambda: iter([(rows[:, None], rows)]))
    shared = standardised(SharedSource(source, Ranks.alone()))
    found = torch.cat([chunk.X[:, 0] for lane in shared.lane_chunks(3) for chunk in lane])
    torch.testing.assert_close(found, (rows - rows.mean()) / rows.std(correction=0))


@pytest.mark.parametrize("N", [10, 30, 1000])
def test_sampled_rows_are_different_ones(N: int) -> None:
    rows = sampled_rows(N, 20, torch.Generator().manual_seed(0))
    assert len(rows.unique()) == len(rows) == min(N, 20)
    assert not torch.equal(rows, rows.sort().values)
    assert int(rows.max()) < N
