"""Processes that tell each other what they know, and rows that they share."""

import sys
from typing import Any

import numpy as np
import pytest
import torch

from helpers import shared_rows
from helpers.forks import Forks
from helpers.shared_rows import ASKED, D, N, rows
from helpers.shared_work import together
from winnowgp.data import Dataset, shard, standardise
from winnowgp.data.distributed import SINGLE_PROCESS, ProcessGroup
from winnowgp.data.sharding import ShardedSource

COUNTS = (1, 2, 3, 4)
SOURCES = ("dataset", "weights", "array", "parquet", "batches")

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")


@pytest.fixture
def sums(forks: Forks) -> dict[int, list[Any]]:
    """By the number of processes, what each of them answered."""
    return {of: forks.call(together, shared_rows.sums, of) for of in COUNTS}


@pytest.fixture(params=SOURCES)
def name(request: pytest.FixtureRequest) -> str:
    if request.param == "parquet":
        pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    return request.param


@pytest.fixture
def source(forks: Forks, name: str) -> dict[int, list[Any]]:
    work = getattr(shared_rows, f"of_{name}")
    return {of: forks.call(together, work, of) for of in COUNTS}


@pytest.fixture(params=COUNTS)
def of(request: pytest.FixtureRequest) -> int:
    return request.param


def test_processes_know_their_number_and_the_first_speaks(
    sums: dict[int, list[Any]], of: int
) -> None:
    assert [(each["rank"], each["of"]) for each in sums[of]] == [(r, of) for r in range(of)]
    assert [each["first"] for each in sums[of]] == [True] + [False] * (of - 1)


def test_totals_are_sums_over_processes_in_each_of_them(
    sums: dict[int, list[Any]], of: int
) -> None:
    expected = np.sum([each["own"] for each in sums[of]], axis=0)
    for each in sums[of]:
        assert each["own"] == np.full((2, 3), 10.0 ** each["rank"]).tolist()
        np.testing.assert_allclose(each["total"], expected, rtol=1e-15)
        assert each["float32"] == ["torch.float32", of * (of + 1) / 2]
        assert each["single"] == sums[of][0]["single"]


def test_a_power_of_two_adds_up_in_pairs_to_the_last_digit(sums: dict[int, list[Any]]) -> None:
    tenths = [0.1 * (rank + 1) for rank in range(4)]
    in_pairs = (tenths[0] + tenths[1]) + (tenths[2] + tenths[3])
    assert [each["single"] for each in sums[4]] == [in_pairs] * 4
    assert [each["single"] for each in sums[2]] == [tenths[0] + tenths[1]] * 2


def test_all_agree_with_the_first_and_hear_of_each(sums: dict[int, list[Any]], of: int) -> None:
    for each in sums[of]:
        assert each["agreed"] == {"seed": 5, "text": "ü"}
        assert each["gathered"] == [[rank, "x" * rank] for rank in range(of)]


def test_every_row_is_read_by_one_process(source: dict[int, list[Any]], of: int, name: str) -> None:
    X, y, weights = rows()
    found = source[of]
    read = [row for each in found for chunk in each["read"] for row in chunk]
    np.testing.assert_array_equal(read, np.column_stack([X, y]))
    if name == "weights":
        assert [w for each in found for chunk in each["weights"] for w in chunk] == weights.tolist()
    else:
        assert all(chunk is None for each in found for chunk in each["weights"])
    total = float(weights.sum()) if name == "weights" else N
    for each in found:
        *shape, observations = each["shape"]
        assert shape == [N, D, 1, "torch.float64"]
        assert observations == pytest.approx(total, rel=1e-14)
        np.testing.assert_allclose(each["total"], X.sum(0), rtol=1e-13)
        assert each["gathered"] == [len(one["read"]) for one in found]


def test_lanes_are_the_same_whoever_sums_which(source: dict[int, list[Any]], name: str) -> None:
    shards = {of: [shard for each in source[of] for shard in each["lanes"]] for of in COUNTS}
    assert shards[1] == shards[2] == shards[4]
    assert len(shards[1]) == 8
    assert len(shards[3]) == 3
    assert sum(shards[1]) == sum(shards[3]) == N
    for of in COUNTS:
        assert max(shards[of]) - min(shards[of]) <= 1
        for each in source[of]:
            assert sum(each["sizes"]) == sum(each["lanes"])


def test_all_get_the_rows_they_ask_for_whoever_has_them(
    source: dict[int, list[Any]], of: int, name: str
) -> None:
    X, y, weights = rows()
    for each in source[of]:
        np.testing.assert_array_equal(each["part"], np.column_stack([X, y])[ASKED])
        expected = weights[ASKED].tolist() if name == "weights" else None
        assert each["part weights"] == expected


def test_units_are_those_of_all_rows_to_the_last_digit(
    source: dict[int, list[Any]], of: int, name: str
) -> None:
    X, y, weights = rows()
    w = weights if name == "weights" else np.ones(N)
    mean = np.average(X, axis=0, weights=w)
    scale = np.sqrt(np.average((X - mean) ** 2, axis=0, weights=w))
    y_mean = np.average(y, weights=w)
    y_scale = np.sqrt(np.average((y - y_mean) ** 2, weights=w))
    for each in source[of]:
        found = each["units"]
        for mine, right in zip(found, (mean, scale, [y_mean], [y_scale]), strict=True):
            np.testing.assert_allclose(np.ravel(mine), right, rtol=1e-13)
        if of != 3:
            assert found == source[1][0]["units"]
        np.testing.assert_allclose(each["standard part"], ((X - mean) / scale)[ASKED], 1e-12)
    shards = [row for each in source[of] for shard in each["standard lanes"] for row in shard]
    np.testing.assert_allclose(shards, (X - mean) / scale, rtol=1e-10, atol=1e-12)


def test_what_cannot_be_asked_of_shared_rows_is_said(
    source: dict[int, list[Any]], of: int, name: str
) -> None:
    for each in source[of]:
        kind, words = each["refused"]
        assert kind == "InputError"
        assert "cannot be sharded again" in words
        if name in ("array", "parquet", "batches"):
            required = f"`rows` must be indices from 0 to 202; got {N} to {N}."
            assert each["missing"] == ["InputError", required]


def test_without_torchrun_one_process_reads_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    X, y, _ = map(torch.tensor, rows())
    source = shard(Dataset.of(X, y))
    assert source.process_group == SINGLE_PROCESS == ProcessGroup(0, 1)
    assert sum(len(chunk.X) for chunk in source.chunks(50)) == N
    assert standardise(source).process_group == SINGLE_PROCESS


def test_more_processes_than_lanes_or_rows_share_what_there_is() -> None:
    X, y, _ = map(torch.tensor, rows())
    whole = Dataset.of(X, y)
    parts = [ShardedSource(whole, ProcessGroup(rank, 11)) for rank in range(11)]
    assert torch.equal(torch.cat([next(part.chunks(N)).X for part in parts]), X)
    few = whole.part(slice(0, 5))
    assert [shard.N for shard in ShardedSource(few, ProcessGroup(1, 2)).shards()] == [3]
