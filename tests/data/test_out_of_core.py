"""Arrays, memory maps and restartable iterators that are read in chunks."""

import tracemalloc
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.source_problems import N, X, Y, batches
from winnowgp.data import ArraySource, BatchSource, Dataset, DataTable, Source
from winnowgp.data.dataset import SourceInfo
from winnowgp.data.out_of_core import StreamedSource, rechunk
from winnowgp.errors import InputError

PAIR = (np.zeros((2, 1)), np.zeros(2))


class Counting(np.ndarray[Any, Any]):
    """An array that counts the rows that are read from it."""

    taken = 0

    def __getitem__(self, key: Any) -> Any:
        rows = np.asarray(super().__getitem__(key))
        Counting.taken += len(rows) if rows.ndim else 0
        return rows


def test_array_source_reads_only_the_rows_of_a_chunk() -> None:
    source = ArraySource(X.view(Counting), Y)
    Counting.taken = 0
    chunks = source.chunks(10)
    next(chunks)
    assert Counting.taken == 10
    source.part(torch.tensor([3, 99]))
    assert Counting.taken == 12


def test_array_source_memory_maps_stay_on_disk(tmp_path: Path) -> None:
    rows = 200_000
    for name, shape in (("X", (rows, 8)), ("y", (rows,))):
        made = np.lib.format.open_memmap(
            tmp_path / f"{name}.npy", mode="w+", dtype=np.float32, shape=shape
        )
        made[:] = 1.0
        del made
    tracemalloc.start()
    source = ArraySource.open(tmp_path / "X.npy", tmp_path / "y.npy").shard(1, 2)
    for chunk in source.chunks(1000):
        assert float(chunk.X.sum()) == 8000
    source.part(torch.tensor([99_999, 0]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The shard would be 7 MB in float64; a chunk is 64 kB.
    assert peak < 500_000


def test_array_source_names_the_entry_that_is_not_finite() -> None:
    bad = X.copy()
    bad[57, 2] = np.nan
    for source in (ArraySource(bad, Y), ArraySource(bad, Y).shard(1, 2).shard(0, 2)):
        with pytest.raises(InputError, match=r"`X\[57, 2\]` is nan"):
            list(source.chunks(10))
    with pytest.raises(InputError, match=r"`X\[57, 2\]` is nan"):
        ArraySource(bad, Y).part(torch.tensor([3, 57]))
    with pytest.raises(InputError, match=r"`y\[4\]` is 1e\+300; numbers must be finite in .*32"):
        list(ArraySource(X[:5], np.array([0, 0, 0, 0, 1e300]), dtype=torch.float32).chunks(9))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (torch.tensor(X), "`X` must be a numpy array; got a Tensor. Use `Dataset.of` for tensors"),
        (X.tolist(), "`X` must be a numpy array; got a list"),
    ],
    ids=["tensor", "list"],
)
@pytest.mark.unchecked
def test_array_source_without_arrays_raises_input_error(inputs: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ArraySource(inputs, np.zeros(N))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: ArraySource(X, Y[1:]), "`X` has 103 rows and `y` has 102"),
        (lambda: ArraySource(X[0], Y), r"`X` must be numbers in 2 dimensions; got .*\[3\]"),
        (lambda: ArraySource(X, Y.astype(str)), "`y` must be numbers in 1 or 2 dimensions; got <U"),
        (lambda: ArraySource(X[:0], Y[:0]), "no rows"),
        (lambda: ArraySource.open("no.npy", "no.npy"), "`X` must be a .npy file.*No such file"),
        (lambda: BatchSource(lambda: iter([])), "`batches` yielded no rows"),
        (lambda: BatchSource(lambda: iter([(X, Y[1:])])), "batch 0 .*103 rows and `y` has 102"),
        (lambda: BatchSource(lambda: iter([(X, Y), (X, Y[:, 0])])), "batch 1 .*3 inputs and 1 tar"),
        (lambda: BatchSource(lambda: iter([(X, Y), (X / 0, Y)])), "batch 1 .*`X` has 309 entries"),
        (lambda: BatchSource(lambda: iter([([["a"]], [1])])), "batch 0 .*`X` must be numbers"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_sources_of_invalid_rows_raise_input_error(
    made: Callable[[], Source], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        made()


@pytest.mark.parametrize("made", [torch.zeros, np.zeros], ids=["tensors", "arrays"])
@pytest.mark.parametrize("size", [2, 4, 12])
def test_batch_source_copies_batches_that_reuse_a_buffer(
    made: Callable[..., Any], size: int
) -> None:
    def batches() -> Iterator[tuple[Any, Any]]:
        # In the dtype of the source, so that no conversion makes a copy.
        X, y = torch.zeros(3, 1).double(), torch.zeros(3).double()
        X, y = (X, y) if made is torch.zeros else (X.numpy(), y.numpy())
        for number in range(4):
            X[:], y[:] = number, -number
            yield X, y

    chunks = list(BatchSource(batches).chunks(size))
    expected = torch.arange(4).double().repeat_interleave(3)
    assert torch.equal(torch.cat([chunk.X[:, 0] for chunk in chunks]), expected)
    assert torch.equal(torch.cat([chunk.Y[:, 0] for chunk in chunks]), -expected)


def test_batch_source_detaches_tensors() -> None:
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    X = torch.ones(2, 1).double()
    chunk = next(BatchSource(lambda: iter([(X * weight, X * weight)])).chunks(2))
    assert not chunk.X.requires_grad
    assert not chunk.Y.requires_grad


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([PAIR], "`batches` must be a function .*got a list"),
        (iter([PAIR]), "`batches` must be a function .*got a list_iterator"),
        (lambda: None, "`batches` must return an iterator of pairs; it returned a NoneType"),
        (
            lambda: iter([PAIR[0]]),
            r"batch 0 .*must be a pair of inputs and targets.* got a ndarray",
        ),
        (lambda: iter([PAIR, (*PAIR, 1, 1)]), r"batch 1 .*must be a pair .*got a tuple of 4"),
        (lambda: iter([(*PAIR, 1.0)]), r"batch 0 .*a variance for each target.*got shape \[\]"),
        (lambda: iter([PAIR, (*PAIR, PAIR[1] ** 2)]), "batch 1 .*noise of all batches, or of none"),
    ],
)
@pytest.mark.unchecked
def test_batch_source_without_a_function_of_pairs_raises(batches: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        BatchSource(batches)


@pytest.mark.parametrize(("second", "count"), [(60, "60"), (0, "0"), (104, "more than 103")])
def test_batch_source_that_changes_raises_input_error(second: int, count: str) -> None:
    lengths = iter([N, second])
    twice = np.concatenate([X, X]), np.concatenate([Y, Y])

    def changing() -> Iterator[tuple[Any, Any]]:
        rows = next(lengths)
        yield twice[0][:20], twice[1][:20]
        yield twice[0][20:rows], twice[1][20:rows]

    source = BatchSource(changing if second else iterator_once())
    with pytest.raises(InputError, match=f"gave 103 rows when they were counted and {count} now"):
        list(source.chunks(10))


def iterator_once() -> Callable[[], Iterator[tuple[Any, Any]]]:
    """An iterator in the place of a function that makes one: used up by counting."""
    used = batches()
    return lambda: used


class Short(StreamedSource):
    """A source that reports ten rows and has six."""

    @property
    def info(self) -> SourceInfo:
        return SourceInfo(10, 1, 1, torch.float64)

    def between(self, start: int, stop: int) -> Iterator[Dataset]:
        rows: Tensor = torch.arange(start, min(stop, 6)).double()[:, None]
        yield from (Dataset(part, part) for part in rows.split(2))


def test_streamed_source_that_ends_early_raises_input_error() -> None:
    assert Short().part(torch.tensor([5, 0, 5])).X[:, 0].tolist() == [5, 0, 5]
    for call in (lambda: Short().part(torch.tensor([7, 1])), lambda: list(Short().chunks(4))):
        with pytest.raises(InputError, match="fewer rows than its `N`"):
            call()


def test_rechunk_reads_no_more_blocks_than_it_needs() -> None:
    given = 0

    def blocks() -> Iterator[DataTable]:
        nonlocal given
        for i in range(100):
            given += 3
            yield DataTable.of({"a": [3 * i, 3 * i + 1, 3 * i + 2]})

    taken = 0
    for block in rechunk(blocks(), repeat(10)):
        assert given - taken < 10 + 3
        taken += block.N
    assert taken == given == 300
