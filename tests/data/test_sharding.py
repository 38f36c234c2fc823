"""Sources that are divided among processes."""

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from helpers import shared_rows
from helpers.forks import Forks
from helpers.shared_rows import ASKED, D, N, rows
from helpers.shared_work import together
from winnowgp.data import BatchSource, Dataset, shard, standardise
from winnowgp.data.distributed import SINGLE_PROCESS, ProcessGroup
from winnowgp.data.sharding import ShardedSource
from winnowgp.errors import InputError

forked = pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")
COUNTS = (1, 2, 3, 4)
SOURCES = ("dataset", "weights", "array", "parquet", "batches")


@pytest.fixture(params=SOURCES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def source(forks: Forks, name: str) -> dict[int, list[Any]]:
    work = getattr(shared_rows, f"of_{name}")
    return {of: forks.call(together, work, of) for of in COUNTS}


@pytest.fixture(params=COUNTS)
def of(request: pytest.FixtureRequest) -> int:
    return request.param


@forked
def test_sharded_source_every_row_is_read_by_one_process(
    source: dict[int, list[Any]], of: int, name: str
) -> None:
    X, y, weights = rows()
    results = source[of]
    read = [row for each in results for chunk in each["read"] for row in chunk]
    np.testing.assert_array_equal(read, np.column_stack([X, y]))
    if name == "weights":
        assert [
            w for each in results for chunk in each["weights"] for w in chunk
        ] == weights.tolist()
    else:
        assert all(chunk is None for each in results for chunk in each["weights"])
    total = float(weights.sum()) if name == "weights" else N
    for each in results:
        *shape, observations = each["shape"]
        assert shape == [N, D, 1, "torch.float64"]
        assert observations == pytest.approx(total, rel=1e-14)
        np.testing.assert_allclose(each["total"], X.sum(0), rtol=1e-13)
        assert each["gathered"] == [len(one["read"]) for one in results]


@forked
def test_sharded_source_shards_do_not_depend_on_world_size(
    source: dict[int, list[Any]], name: str
) -> None:
    shards = {of: [shard for each in source[of] for shard in each["shards"]] for of in COUNTS}
    assert shards[1] == shards[2] == shards[4]
    assert len(shards[1]) == 8
    assert len(shards[3]) == 3
    assert sum(shards[1]) == sum(shards[3]) == N
    for of in COUNTS:
        assert max(shards[of]) - min(shards[of]) <= 1
        for each in source[of]:
            assert sum(each["sizes"]) == sum(each["shards"])


@forked
def test_sharded_source_part_is_the_same_in_every_process(
    source: dict[int, list[Any]], of: int, name: str
) -> None:
    X, y, weights = rows()
    for each in source[of]:
        np.testing.assert_array_equal(each["part"], np.column_stack([X, y])[ASKED])
        expected = weights[ASKED].tolist() if name == "weights" else None
        assert each["part weights"] == expected


@forked
def test_standardise_sharded_rows_has_the_digits_of_one_process(
    source: dict[int, list[Any]], of: int, name: str
) -> None:
    X, y, weights = rows()
    w = weights if name == "weights" else np.ones(N)
    mean = np.average(X, axis=0, weights=w)
    scale = np.sqrt(np.average((X - mean) ** 2, axis=0, weights=w))
    y_mean = np.average(y, weights=w)
    y_scale = np.sqrt(np.average((y - y_mean) ** 2, weights=w))
    for each in source[of]:
        scalers = each["scalers"]
        for mine, right in zip(scalers, (mean, scale, [y_mean], [y_scale]), strict=True):
            np.testing.assert_allclose(np.ravel(mine), right, rtol=1e-13)
        if of != 3:
            assert scalers == source[1][0]["scalers"]
        np.testing.assert_allclose(each["standard part"], ((X - mean) / scale)[ASKED], 1e-12)
    shards = [row for each in source[of] for shard in each["standard shards"] for row in shard]
    np.testing.assert_allclose(shards, (X - mean) / scale, rtol=1e-10, atol=1e-12)


@forked
def test_sharded_source_invalid_requests_raise_input_error(
    source: dict[int, list[Any]], of: int, name: str
) -> None:
    for each in source[of]:
        kind, message = each["refused"]
        assert kind == "InputError"
        assert "cannot be sharded again" in message
        if name in ("array", "parquet", "batches"):
            required = f"`rows` must be indices from 0 to 202; got {N} to {N}."
            assert each["missing"] == ["InputError", required]


def test_shard_without_torchrun_reads_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    X, y, _ = map(torch.tensor, rows())
    source = shard(Dataset.of(X, y))
    assert source.process_group == SINGLE_PROCESS == ProcessGroup(0, 1)
    assert sum(len(chunk.X) for chunk in source.chunks(50)) == N
    assert standardise(source).process_group == SINGLE_PROCESS


def test_all_chunks_are_those_of_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    X, y, _ = map(torch.tensor, rows())
    source = Dataset.of(X, y)
    expected = [chunk.X for chunk in source.chunks(50)]
    for found, X in zip(shard(source).all_chunks(50), expected, strict=True):
        torch.testing.assert_close(found.X, X, rtol=0, atol=0)


def test_sharded_source_more_processes_than_shards_reads_all() -> None:
    X, y, _ = map(torch.tensor, rows())
    whole = Dataset.of(X, y)
    parts = [ShardedSource(whole, ProcessGroup(rank, 11)) for rank in range(11)]
    assert torch.equal(torch.cat([next(part.chunks(N)).X for part in parts]), X)
    few = whole.part(slice(0, 5))
    assert [shard.N for shard in ShardedSource(few, ProcessGroup(1, 2)).shards()] == [3]


@pytest.mark.parametrize("of", [1, 2, 3])
@pytest.mark.parametrize("N", [5, 8, 61])
def test_sharded_source_shards_are_read_in_one_pass(of: int, N: int) -> None:
    passes = 0

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        nonlocal passes
        passes += 1
        numbers = torch.arange(N, dtype=torch.float64)
        yield from zip(numbers[:, None].split(7), numbers.split(7), strict=True)

    source = BatchSource(batches)
    read = []
    for rank in range(of):
        shared = ShardedSource(source, ProcessGroup(rank, of))
        passes = 0
        shards = [[chunk.Y[:, 0] for chunk in shard] for shard in shared.shard_chunks(4)]
        assert passes == 1
        direct = [next(shard.chunks(N)).Y[:, 0] for shard in shared.shards()]
        assert [torch.cat(shard).tolist() for shard in shards] == [d.tolist() for d in direct]
        assert all(len(chunk) <= 4 for shard in shards for chunk in shard)
        read += [row for shard in shards for row in torch.cat(shard).tolist()]
    assert read == list(range(N))


@pytest.mark.parametrize("later", [39, 41])
def test_sharded_source_that_changes_raises_at_its_end(later: int) -> None:
    counts = iter([40])

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        rows = torch.arange(next(counts, later), dtype=torch.float64)
        yield from zip(rows[:, None].split(8), rows.split(8), strict=True)

    shared = ShardedSource(BatchSource(batches), SINGLE_PROCESS)
    with pytest.raises(InputError, match="`batches` gave 40 rows when they were counted and"):
        list(shared.chunks(5))


def test_standardise_twice_keeps_the_process_group() -> None:
    rows = torch.arange(40, dtype=torch.float64)
    shared = ShardedSource(Dataset.of(rows[:, None], rows), SINGLE_PROCESS)
    for source in (standardise(shared), standardise(standardise(shared))):
        result = source.materialised()
        assert isinstance(result, ShardedSource)
        assert result.process_group == shared.process_group
        assert isinstance(result.as_dataset(), Dataset)


def test_sharded_source_more_processes_than_rows_raises() -> None:
    rows = Dataset.of(torch.zeros(3, 1), torch.zeros(3))
    assert ShardedSource(rows, ProcessGroup(2, 3)).shards()[0].N == 1
    with pytest.raises(InputError, match=r"each of 4 processes needs at least one row; got 3 rows"):
        ShardedSource(rows, ProcessGroup(0, 4))


def test_standardise_scales_every_shard() -> None:
    rows = torch.arange(40, dtype=torch.float64)
    source = BatchSource(lambda: iter([(rows[:, None], rows)]))
    shared = standardise(ShardedSource(source, SINGLE_PROCESS))
    scaled = torch.cat([chunk.X[:, 0] for shard in shared.shard_chunks(3) for chunk in shard])
    torch.testing.assert_close(scaled, (rows - rows.mean()) / rows.std(correction=0))
