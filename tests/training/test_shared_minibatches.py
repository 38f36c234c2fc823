"""Minibatches that several processes share give the steps of one process."""

import sys
from typing import Any

import numpy as np
import pytest
import torch

from launched import forked
from winnowgp.data import Dataset, Ranks
from winnowgp.training.parts import Parts

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    answers = forked("minibatches,deep", tmp_path_factory.mktemp("minibatches"), (1, 2))
    return {
        of: [{**each["minibatches"], "deep": each["deep"]} for each in answers[of]]
        for of in answers
    }


@pytest.mark.parametrize("name", ["gaussian", "classes", "relaxed", "whole"])
def test_two_processes_take_the_steps_of_one(found: dict[int, list[Any]], name: str) -> None:
    (alone,) = found[1]
    first, second = found[2]
    assert first[name] == second[name]
    assert len(alone[name]["values"]) == 26
    for finding, value in alone[name].items():
        np.testing.assert_allclose(first[name][finding], value, rtol=1e-8, atol=1e-8)


def test_minibatches_and_all_rows_differ(found: dict[int, list[Any]]) -> None:
    (alone,) = found[1]
    assert not np.allclose(alone["gaussian"]["values"], alone["whole"]["values"], rtol=1e-3)


def test_they_go_on_from_one_checkpoint(found: dict[int, list[Any]]) -> None:
    for each in found[2]:
        told = len(each["again"].pop("values"))
        assert 0 < told < 26
        assert each["again"] == {k: v for k, v in each["gaussian"].items() if k != "values"}


def test_processes_look_at_as_many_rows_each(found: dict[int, list[Any]]) -> None:
    assert found[1][0]["odd"] == []
    for each in found[2]:
        assert each["odd"][0] == "InputError"
        assert "`batch_size` must be a multiple of the number of processes, 2" in each["odd"][1]


def test_layers_stay_the_same_in_all_processes(found: dict[int, list[Any]]) -> None:
    first, second = (each["deep"] for each in found[2])
    assert first == second
    alone = found[1][0]["deep"]
    assert len(alone["values"]) > 18
    np.testing.assert_allclose(first["values"], alone["values"], rtol=1e-8)


def test_each_looks_at_its_part_of_the_same_minibatch() -> None:
    data = Dataset.of(torch.arange(10.0)[:, None], torch.zeros(10))

    def seen(ranks: Ranks) -> list[list[float]]:
        parts = Parts(data, 4, torch.Generator().manual_seed(3), ranks=ranks)
        return [parts.next().X[:, 0].tolist() for _ in range(3)]

    first, second, alone = seen(Ranks(0, 2)), seen(Ranks(1, 2)), seen(Ranks.alone())
    assert [len(rows) for rows in first + second] == [2] * 6
    assert [a + b for a, b in zip(first, second, strict=True)] == alone
