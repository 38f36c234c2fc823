"""Minibatches that several processes share give the steps of one process."""

import sys

import numpy as np
import pytest
import torch

from helpers import shared_minibatches as work
from helpers import shared_steps
from helpers.forks import Forks
from helpers.shared_work import together
from winnowgp.data import Dataset
from winnowgp.data.distributed import SINGLE_PROCESS, ProcessGroup
from winnowgp.training.adam import Minibatches

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")


@pytest.mark.parametrize("name", ["gaussian", "classes", "relaxed", "whole"])
def test_two_processes_take_the_steps_of_one(forks: Forks, name: str) -> None:
    (alone,) = forks.call(together, getattr(work, name), 1)
    first, second = forks.call(together, getattr(work, name), 2)
    assert first == second
    assert len(alone["values"]) == 26
    for finding, value in alone.items():
        np.testing.assert_allclose(first[finding], value, rtol=1e-8, atol=1e-8)


def test_minibatches_and_all_rows_differ(forks: Forks) -> None:
    (some,), (every,) = (forks.call(together, w, 1) for w in (work.gaussian, work.whole))
    assert not np.allclose(some["values"], every["values"], rtol=1e-3)


def test_minibatches_resume_from_one_checkpoint(forks: Forks) -> None:
    unbroken, resumed = (forks.call(together, w, 2) for w in (work.gaussian, work.resumed))
    for once, again in zip(unbroken, resumed, strict=True):
        assert 0 < len(again.pop("values")) < len(once.pop("values")) == 26
        assert again == once


def test_batch_size_not_divisible_by_processes_raises(forks: Forks) -> None:
    assert forks.call(together, work.odd, 1) == [[]]
    for kind, message in forks.call(together, work.odd, 2):
        assert kind == "InputError"
        assert "`batch_size` must be a multiple of the number of processes, 2" in message


def test_layers_are_the_same_in_all_processes(forks: Forks) -> None:
    first, second = forks.call(together, work.deep, 2)
    assert first == second
    (alone,) = forks.call(together, work.deep, 1)
    assert len(alone["values"]) > 18
    # Rounding errors grow with every step, and faster where Adam restarts: none within
    # the first four, 9e-9 within eight and 5e-6 within all.
    for steps, apart in ((4, 1e-12), (8, 1e-6), (len(alone["values"]), 1e-4)):
        np.testing.assert_allclose(first["values"][:steps], alone["values"][:steps], rtol=apart)


def test_processes_split_each_minibatch() -> None:
    data = Dataset.of(torch.arange(10.0)[:, None], torch.zeros(10))

    def seen(process_group: ProcessGroup) -> list[list[float]]:
        parts = Minibatches(data, 4, torch.Generator().manual_seed(3), process_group=process_group)
        return [parts.next().X[:, 0].tolist() for _ in range(3)]

    first, second, alone = (
        seen(ProcessGroup(0, 2)),
        seen(ProcessGroup(1, 2)),
        seen(SINGLE_PROCESS),
    )
    assert [len(rows) for rows in first + second] == [2] * 6
    assert [a + b for a, b in zip(first, second, strict=True)] == alone


@pytest.mark.parametrize("name", ["paper", "fast", "classes", "all rows"])
def test_two_processes_train_layers_as_one(forks: Forks, name: str) -> None:
    (alone,) = forks.call(together, shared_steps.deep_layers, 1)
    first, second = forks.call(together, shared_steps.deep_layers, 2)
    assert first[name] == second[name]
    assert first[name]["sizes"] == alone[name]["sizes"]
    assert len(alone[name]["values"]) > 8
    for finding in ("values", "bound", "state"):
        np.testing.assert_allclose(first[name][finding], alone[name][finding], rtol=1e-8, atol=1e-8)
