"""Processes that torchrun starts, and what the first of them says for all."""

import sys

import pytest
import torch

from helpers import shared_steps as work
from helpers.forks import Forks
from helpers.shared_work import together
from winnowgp.data.distributed import SINGLE_PROCESS, ProcessGroup
from winnowgp.errors import InputError


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
def test_they_are_counted_before_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ProcessGroup.from_environment() == ProcessGroup(1, 2)
    monkeypatch.delenv("MASTER_ADDR")
    assert ProcessGroup.from_environment() == ProcessGroup.initialise() == SINGLE_PROCESS


def test_one_process_meets_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "nowhere"}.items():
        monkeypatch.setenv(name, value)
    assert ProcessGroup.initialise() == SINGLE_PROCESS


@pytest.mark.usefixtures("second_of_two")
def test_each_needs_a_card_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(
        InputError, match="each process needs a GPU of its own; got 1 for process 2"
    ):
        ProcessGroup.initialise(torch.device("cuda"))


@pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")
def test_the_first_speaks_for_all(forks: Forks) -> None:
    found = {of: forks.call(together, work.words, of) for of in (1, 2, 3)}
    for of, answers in found.items():
        assert [each["led"] for each in answers] == [[[0.1, 1.0], [[True, True]], 3.0]] * of
        kinds = ["torch.float64", "torch.bool", "torch.float32", "torch.float64", "torch.float32"]
        assert [each["dtypes"] for each in answers] == [kinds] * of
        assert [each["decided"] for each in answers] == [None] * of
        first, *others = [each["error"] for each in answers]
        assert first == "Odd: no luck"
        expected = "LostProcessError: the first process has failed: Odd: no luck"
        assert others == [expected] * (of - 1)
