"""Rows of arrays and of memory maps: no more of them is touched than is asked for."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.source_problems import X, Y
from winnowgp.data import ArraySource
from winnowgp.errors import InputError


class Counting(np.ndarray[Any, Any]):
    """An array that counts the rows it is asked for."""

    taken = 0

    def __getitem__(self, key: Any) -> Any:
        found = np.asarray(super().__getitem__(key))
        Counting.taken += len(found) if found.ndim else 0
        return found


def test_arrays_are_asked_for_the_rows_of_a_chunk_alone() -> None:
    source = ArraySource(X.view(Counting), Y)
    Counting.taken = 0
    chunks = source.chunks(10)
    next(chunks)
    assert Counting.taken == 10
    source.part(torch.tensor([3, 99]))
    assert Counting.taken == 12


def test_memory_maps_stay_on_disk(tmp_path: Path) -> None:
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
    # The share would be 7 MB in float64; a chunk is 64 kB.
    assert peak < 500_000


def test_what_is_not_finite_in_an_array_is_named() -> None:
    bad = X.copy()
    bad[57, 2] = np.nan
    for source in (ArraySource(bad, Y), ArraySource(bad, Y).shard(1, 2).shard(0, 2)):
        with pytest.raises(InputError, match=r"`X\[57, 2\]` is nan"):
            list(source.chunks(10))
    with pytest.raises(InputError, match=r"`X\[57, 2\]` is nan"):
        ArraySource(bad, Y).part(torch.tensor([3, 57]))
    with pytest.raises(InputError, match=r"`y\[4\]` is 1e\+300; numbers must be finite in .*32"):
        list(ArraySource(X[:5], np.array([0, 0, 0, 0, 1e300]), dtype=torch.float32).chunks(9))
