"""Batches as people make them: buffers that are filled again, and what is no function of pairs."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from winnowgp.data import BatchSource, Dataset
from winnowgp.data.out_of_core import StreamedSource
from winnowgp.data.sources import SourceInfo
from winnowgp.errors import InputError


@pytest.mark.parametrize("made", [torch.zeros, np.zeros], ids=["tensors", "arrays"])
@pytest.mark.parametrize("size", [2, 4, 12])
def test_a_batch_may_come_in_the_place_of_the_last_one(made: Callable[..., Any], size: int) -> None:
    """A chunk that is made of several batches holds each of them as it was."""

    def batches() -> Iterator[tuple[Any, Any]]:
        # In the dtype of the source, in which nothing needs to be converted.
        X, y = torch.zeros(3, 1).double(), torch.zeros(3).double()
        X, y = (X, y) if made is torch.zeros else (X.numpy(), y.numpy())
        for number in range(4):
            X[:], y[:] = number, -number
            yield X, y

    chunks = list(BatchSource(batches).chunks(size))
    expected = torch.arange(4).double().repeat_interleave(3)
    assert torch.equal(torch.cat([chunk.X[:, 0] for chunk in chunks]), expected)
    assert torch.equal(torch.cat([chunk.Y[:, 0] for chunk in chunks]), -expected)


def test_rows_bring_no_graph_with_them() -> None:
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    X = torch.ones(2, 1).double()
    chunk = next(BatchSource(lambda: iter([(X * weight, X * weight)])).chunks(2))
    assert not chunk.X.requires_grad
    assert not chunk.Y.requires_grad


PAIR = (np.zeros((2, 1)), np.zeros(2))


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([PAIR], "`batches` must be a function .*got a list"),
        (iter([PAIR]), "`batches` must be a function .*got a list_iterator"),
        (lambda: None, "`batches` must return an iterator of pairs; it returned a NoneType"),
        (lambda: iter([PAIR[0]]), r"batch 0 .*must be a pair of inputs and targets; got a ndarray"),
        (lambda: iter([PAIR, (*PAIR, 1)]), r"batch 1 .*must be a pair .*got a tuple of 3"),
    ],
)
@pytest.mark.unchecked
def test_what_is_no_function_of_pairs_is_said(batches: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        BatchSource(batches)


class Short(StreamedSource):
    """Says ten rows and has six."""

    info = SourceInfo(10, 1, 1, torch.float64)  # pyright: ignore[reportIncompatibleMethodOverride]

    def between(self, start: int, stop: int) -> Iterator[Dataset]:
        rows: Tensor = torch.arange(start, min(stop, 6)).double()[:, None]
        yield from (Dataset(part, part) for part in rows.split(2))


def test_a_source_that_ends_early_is_found_out() -> None:
    assert Short().part(torch.tensor([5, 0, 5])).X[:, 0].tolist() == [5, 0, 5]
    for ask in (lambda: Short().part(torch.tensor([7, 1])), lambda: list(Short().chunks(4))):
        with pytest.raises(InputError, match="fewer rows than its `N`"):
            ask()
