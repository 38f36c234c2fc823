"""Exchanges between the processes of a group."""

import sys
from typing import Any

import numpy as np
import pytest
import torch

from helpers import shared_rows, shared_steps
from helpers.forks import Forks
from helpers.shared_work import together
from winnowgp.data.distributed import SINGLE_PROCESS, ProcessGroup
from winnowgp.errors import InputError

forked = pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")
COUNTS = (1, 2, 3, 4)


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "a",
        "LOCAL_RANK": "1",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("second_of_two")
def test_from_environment_reads_rank_and_world_size(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ProcessGroup.from_environment() == ProcessGroup(1, 2)
    monkeypatch.delenv("MASTER_ADDR")
    assert ProcessGroup.from_environment() == ProcessGroup.initialise() == SINGLE_PROCESS


def test_initialise_one_process_connects_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "nowhere"}.items():
        monkeypatch.setenv(name, value)
    assert ProcessGroup.initialise() == SINGLE_PROCESS


@pytest.mark.usefixtures("second_of_two")
def test_initialise_too_few_gpus_raises_input_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(
        InputError, match="each process needs a GPU of its own; got 1 for process 2"
    ):
        ProcessGroup.initialise(torch.device("cuda"))


@pytest.fixture
def sums(forks: Forks) -> dict[int, list[Any]]:
    """By the number of processes, what each of them answered."""
    return {of: forks.call(together, shared_rows.sums, of) for of in COUNTS}


@pytest.fixture(params=COUNTS)
def of(request: pytest.FixtureRequest) -> int:
    return request.param


@forked
def test_process_group_has_ranks_and_a_first_process(sums: dict[int, list[Any]], of: int) -> None:
    assert [(each["rank"], each["of"]) for each in sums[of]] == [(r, of) for r in range(of)]
    assert [each["first"] for each in sums[of]] == [True] + [False] * (of - 1)


@forked
def test_all_reduce_returns_the_sum_in_every_process(sums: dict[int, list[Any]], of: int) -> None:
    expected = np.sum([each["own"] for each in sums[of]], axis=0)
    for each in sums[of]:
        assert each["own"] == np.full((2, 3), 10.0 ** each["rank"]).tolist()
        np.testing.assert_allclose(each["total"], expected, rtol=1e-15)
        assert each["float32"] == ["torch.float32", of * (of + 1) / 2]
        assert each["single"] == sums[of][0]["single"]


@forked
def test_all_reduce_of_a_power_of_two_adds_in_pairs(sums: dict[int, list[Any]]) -> None:
    tenths = [0.1 * (rank + 1) for rank in range(4)]
    in_pairs = (tenths[0] + tenths[1]) + (tenths[2] + tenths[3])
    assert [each["single"] for each in sums[4]] == [in_pairs] * 4
    assert [each["single"] for each in sums[2]] == [tenths[0] + tenths[1]] * 2


@forked
def test_broadcast_object_and_all_gather_reach_every_process(
    sums: dict[int, list[Any]], of: int
) -> None:
    for each in sums[of]:
        assert each["agreed"] == {"seed": 5, "text": "ü"}
        assert each["gathered"] == [[rank, "x" * rank] for rank in range(of)]


@forked
def test_broadcast_returns_values_and_errors_of_the_first_process(forks: Forks) -> None:
    results = {of: forks.call(together, shared_steps.broadcasts, of) for of in (1, 2, 3)}
    for of, answers in results.items():
        assert [each["led"] for each in answers] == [[[0.1, 1.0], [[True, True]], 3.0]] * of
        kinds = ["torch.float64", "torch.bool", "torch.float32", "torch.float64", "torch.float32"]
        assert [each["dtypes"] for each in answers] == [kinds] * of
        assert [each["decided"] for each in answers] == [None] * of
        first, *others = [each["error"] for each in answers]
        assert first == "Odd: no luck"
        expected = "LostProcessError: another process has failed: Odd: no luck"
        assert others == [expected] * (of - 1)
