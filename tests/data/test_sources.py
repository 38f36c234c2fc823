"""One battery for every source, and what none of them can do."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.source_problems import (
    CHOICE,
    WHOLE,
    D,
    N,
    P,
    X,
    Y,
    batches,
    folder_of_files,
    maps,
    row_groups,
)
from winnowgp.data import (
    ArraySource,
    BatchSource,
    Dataset,
    ParquetSource,
    Source,
    Standardiser,
    standardise,
)
from winnowgp.errors import InputError


def once(source: Source) -> Source:
    """In units that change nothing: the wrapper is that of standard ones."""
    made = standardise(source)
    none = Standardiser.none
    return type(made)(source, none(torch.zeros(1, D).double()), none(torch.zeros(1, P).double()))


SOURCES: dict[str, Callable[[Path], Source]] = {
    "tensors": lambda _: WHOLE,
    "arrays": lambda _: ArraySource(X, Y),
    "odd strides": lambda _: ArraySource(np.asfortranarray(X)[::-1][::-1], Y.astype(">f8")),
    "memory maps": lambda folder: ArraySource.open(*maps(folder)),
    "one row group": lambda f: ParquetSource(row_groups(f / "a", [N]), **CHOICE),
    "row groups": lambda f: ParquetSource(row_groups(f / "a", [40, 1, 0, 30, 32]), **CHOICE),
    "folder": lambda folder: ParquetSource(folder_of_files(folder), **CHOICE),
    "batches": lambda _: BatchSource(batches),
    "another's units": lambda _: once(ArraySource(X, Y)),
}


@pytest.fixture(params=SOURCES, ids=lambda name: name.replace(" ", "-"))
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    return SOURCES[request.param](tmp_path)


def same(found: Dataset, X: Any, Y: Any) -> None:
    assert found.X.dtype == found.Y.dtype == torch.float64
    assert torch.equal(found.X, torch.as_tensor(X).double())
    assert torch.equal(found.Y, torch.as_tensor(Y).double())


def joined(chunks: list[Dataset]) -> Dataset:
    return Dataset(torch.cat([c.X for c in chunks]), torch.cat([c.Y for c in chunks]))


def test_a_source_knows_its_size(source: Source) -> None:
    assert isinstance(source, Source)
    assert (source.N, source.D, source.P) == (N, D, P)


@pytest.mark.parametrize("size", [1, 7, 50, N, 1000])
def test_chunks_of_any_size_are_the_whole(source: Source, size: int) -> None:
    for _ in range(2):  # it can be started again
        chunks = list(source.chunks(size))
        full, left = divmod(N, size)
        assert [chunk.N for chunk in chunks] == [size] * full + [left] * (left > 0)
        same(joined(chunks), X, Y)


def test_two_readers_do_not_disturb_each_other(source: Source) -> None:
    first = source.chunks(10)
    next(first)
    same(joined(list(source.chunks(9))), X, Y)
    same(next(first), X[10:20], Y[10:20])


@pytest.mark.parametrize("rows", [[5], [102, 0, 40, 41, 40], list(range(N))[::-1], [50, 51], []])
def test_a_part_is_what_indexing_gives(source: Source, rows: list[int]) -> None:
    same(source.part(torch.tensor(rows, dtype=torch.long)), X[rows], Y[rows])


@pytest.mark.parametrize("of", [1, 2, 4, 7, N])
def test_shares_together_are_the_whole(source: Source, of: int) -> None:
    shares = [source.shard(rank, of) for rank in range(of)]
    sizes = [share.N for share in shares]
    assert sum(sizes) == N
    assert max(sizes) - min(sizes) <= 1
    assert {(share.D, share.P) for share in shares} == {(D, P)}
    same(joined([chunk for share in shares for chunk in share.chunks(6)]), X, Y)
    start = sum(sizes[: of // 2])
    rows = torch.tensor([sizes[of // 2] - 1, 0])
    same(shares[of // 2].part(rows), X[rows + start], Y[rows + start])


def test_a_share_of_a_share(source: Source) -> None:
    same(joined(list(source.shard(1, 2).shard(1, 3).chunks(5))), X[68:85], Y[68:85])


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda s: list(s.chunks(0)), "`size` must be at least 1 row; got 0"),
        (lambda s: s.shard(2, 2), "`index` must be from 0 to below `count`; got 2 of 2"),
        (lambda s: s.shard(0, N + 1), f"{N} rows cannot be divided into {N + 1} shards"),
    ],
)
def test_what_no_source_can_do_is_said(
    source: Source, ask: Callable[[Source], object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        ask(source)


@pytest.mark.parametrize("rows", [[-1], [3, N]])
def test_rows_that_are_not_there_are_refused(source: Source, rows: list[int]) -> None:
    if isinstance(source, Dataset):
        pytest.skip("tensors index as tensors do")
    with pytest.raises(InputError, match=f"indices from 0 to {N - 1}; got {rows[0]} to {rows[-1]}"):
        source.part(torch.tensor(rows))


def test_other_dtypes_convert_when_they_are_read(tmp_path: Path) -> None:
    whole = np.arange(12, dtype=np.int16).reshape(6, 2)
    for made in (
        ArraySource(whole, whole[:, 0] > 4, dtype=torch.float32),
        BatchSource(lambda: iter([(whole, whole[:, 0] > 4)]), dtype=torch.float32),
        ParquetSource(
            row_groups(tmp_path / "a", [6], np.hstack([whole, whole]), whole, t=whole[:, 0] > 4),
            inputs=["a", "b"],
            targets=["t"],
            dtype=torch.float32,
        ),
    ):
        chunk = next(made.chunks(9))
        assert chunk.X.dtype == chunk.Y.dtype == torch.float32
        assert chunk.X.tolist() == whole.tolist()
        assert chunk.Y.tolist() == [[0.0]] * 3 + [[1.0]] * 3


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: ArraySource(X, Y[1:]), "`X` has 103 rows and `y` has 102"),
        (lambda: ArraySource(X[0], Y), r"`X` must be numbers in 2 dimensions; got .*\[3\]"),
        (lambda: ArraySource(X, Y.astype(str)), "`y` must be numbers in 1 or 2 dimensions; got <U"),
        (lambda: ArraySource(X[:0], Y[:0]), "no rows"),
        (lambda: ArraySource.open("no.npy", "no.npy"), "`X` must be a .npy file.*No such file"),
        (lambda: BatchSource(lambda: iter([])), "`batches` gave no rows"),
        (lambda: BatchSource(lambda: iter([(X, Y[1:])])), "batch 0 .*103 rows and `y` has 102"),
        (lambda: BatchSource(lambda: iter([(X, Y), (X, Y[:, 0])])), "batch 1 .*3 inputs and 1 tar"),
        (lambda: BatchSource(lambda: iter([(X, Y), (X / 0, Y)])), "batch 1 .*`X` has 309 entries"),
        (lambda: BatchSource(lambda: iter([([["a"]], [1])])), "batch 0 .*`X` must be numbers"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_what_is_no_source_is_said(made: Callable[[], Source], message: str) -> None:
    with pytest.raises(InputError, match=message):
        made()


@pytest.mark.parametrize(("second", "told"), [(60, "60"), (0, "0"), (104, "more than 103")])
def test_batches_that_change_their_mind_are_refused(second: int, told: str) -> None:
    lengths = iter([N, second])
    twice = np.concatenate([X, X]), np.concatenate([Y, Y])

    def changing() -> Iterator[tuple[Any, Any]]:
        rows = next(lengths)
        yield twice[0][:20], twice[1][:20]
        yield twice[0][20:rows], twice[1][20:rows]

    source = BatchSource(changing if second else iterator_once())
    with pytest.raises(InputError, match=f"gave 103 rows when they were counted and {told} now"):
        list(source.chunks(10))


def iterator_once() -> Callable[[], Iterator[tuple[Any, Any]]]:
    """An iterator in the place of a function that makes one: used up by counting."""
    used = batches()
    return lambda: used


def test_standard_units_are_those_of_the_whole(source: Source) -> None:
    found = standardise(source)
    for units, A in ((found.x_scaler, X), (found.y_scaler, Y)):
        np.testing.assert_allclose(units.shift, A.mean(0), rtol=0, atol=1e-15)
        np.testing.assert_allclose(units.scale, A.std(0), rtol=1e-14)
    expected = (X - X.mean(0)) / X.std(0)
    for chunks in (found.chunks(8), (c for r in range(3) for c in found.shard(r, 3).chunks(8))):
        whole = joined(list(chunks))
        np.testing.assert_allclose(whole.X, expected, atol=1e-13)
        np.testing.assert_allclose(whole.Y, (Y - Y.mean(0)) / Y.std(0), atol=1e-13)
    np.testing.assert_allclose(found.part(torch.tensor([9, 2])).X, expected[[9, 2]], atol=1e-13)
    as_they_are = standardise(source, targets=False)
    assert torch.equal(next(as_they_are.chunks(N)).Y, torch.tensor(Y))
