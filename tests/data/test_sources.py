"""One battery for every source, and what is particular to each."""

import tracemalloc
from collections.abc import Callable, Iterator
from decimal import Decimal, localcontext
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from winnowgp.data import (
    ArraySource,
    BatchSource,
    ColumnMoments,
    Dataset,
    ParquetSource,
    Source,
    Standardiser,
    standardised,
)
from winnowgp.errors import InputError

N, D, P = 103, 3, 2
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(N, D)), RNG.normal(size=(N, P))
WHOLE = Dataset.of(torch.tensor(X), torch.tensor(Y))


def row_groups(path: Path, sizes: list[int], X: Any = X, Y: Any = Y, **changes: Any) -> Path:
    """A Parquet file of these rows, its targets between its inputs."""
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    columns = {"a": X[:, 0], "y": Y[:, 0], "b": X[:, 1], "word": ["w"] * len(X), "z": Y[:, 1]}
    whole = pyarrow.table({**columns, "c": X[:, 2], **changes})
    with parquet.ParquetWriter(path, whole.schema) as writer:
        start = 0
        for size in sizes:
            writer.write_table(whole.slice(start, size))
            start += size
    return path


CHOICE: dict[str, Any] = {"inputs": ["a", "b", "c"], "targets": ["y", "z"]}


def folder_of_files(folder: Path) -> Path:
    path = folder / "table"
    (path / "later").mkdir(parents=True)
    row_groups(path / "0.parquet", [20, 1, 0, 13], X[:34], Y[:34])
    row_groups(path / "1.parquet", [0], X[:0], Y[:0])
    row_groups(path / "later" / "0.parquet", [N - 34], X[34:], Y[34:])
    (path / "_SUCCESS").write_text("")
    return path


def maps(folder: Path) -> tuple[Path, Path]:
    np.save(folder / "X.npy", X)
    np.save(folder / "Y.npy", Y)
    return folder / "X.npy", folder / "Y.npy"


def batches() -> Iterator[tuple[Any, Any]]:
    """Arrays and tensors; one batch is empty."""
    for start, stop in ((0, 40), (40, 41), (41, 41), (41, 90)):
        yield X[start:stop], Y[start:stop]
    yield torch.tensor(X[90:]), torch.tensor(Y[90:])


def once(source: Source) -> Source:
    """In units that change nothing: the wrapper is that of standard ones."""
    made = standardised(source)
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
    shares = [source.share(rank, of) for rank in range(of)]
    sizes = [share.N for share in shares]
    assert sum(sizes) == N
    assert max(sizes) - min(sizes) <= 1
    assert {(share.D, share.P) for share in shares} == {(D, P)}
    same(joined([chunk for share in shares for chunk in share.chunks(6)]), X, Y)
    start = sum(sizes[: of // 2])
    rows = torch.tensor([sizes[of // 2] - 1, 0])
    same(shares[of // 2].part(rows), X[rows + start], Y[rows + start])


def test_a_share_of_a_share(source: Source) -> None:
    same(joined(list(source.share(1, 2).share(1, 3).chunks(5))), X[68:85], Y[68:85])


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda s: list(s.chunks(0)), "`size` must be at least 1 row; got 0"),
        (lambda s: s.share(2, 2), "`rank` must be from 0 to below `of`; got 2 of 2"),
        (lambda s: s.share(0, N + 1), f"{N + 1} processes cannot share {N} rows"),
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
    with pytest.raises(InputError, match=f"numbers from 0 to {N - 1}; got {rows[0]} to {rows[-1]}"):
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
    source = ArraySource.open(tmp_path / "X.npy", tmp_path / "y.npy").share(1, 2)
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
    for source in (ArraySource(bad, Y), ArraySource(bad, Y).share(1, 2).share(0, 2)):
        with pytest.raises(InputError, match=r"`X\[57, 2\]` is nan"):
            list(source.chunks(10))
    with pytest.raises(InputError, match=r"`X\[57, 2\]` is nan"):
        ArraySource(bad, Y).part(torch.tensor([3, 57]))
    with pytest.raises(InputError, match=r"`y\[4\]` is 1e\+300; numbers must be finite in .*32"):
        list(ArraySource(X[:5], np.array([0, 0, 0, 0, 1e300]), dtype=torch.float32).chunks(9))


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


def test_a_bad_value_in_row_group_37_is_named(tmp_path: Path) -> None:
    for name, value, word in (("b", np.nan, "nan"), ("z", np.inf, "inf"), ("c", None, "no value")):
        values: list[float | None] = [0.5] * 200
        values[37 * 5 + 2] = value
        long = np.ones((200, 3))
        path = row_groups(tmp_path / "a.parquet", [5] * 40, long, long, **{name: values})
        source = ParquetSource(path, **CHOICE)
        told = rf"a\.parquet: column '{name}' has {word} in row 188 \(row group 37, counted from 0"
        for ask in (
            lambda s=source: list(s.chunks(1000)),
            lambda s=source: list(s.share(3, 4).chunks(7)),
            lambda s=source: s.part(torch.tensor([199, 187])),
        ):
            with pytest.raises(InputError, match=told):
                ask()
        # Rows before it can be had.
        assert source.part(torch.tensor([184])).N == 1


def test_row_groups_that_are_not_asked_for_are_not_read(tmp_path: Path) -> None:
    """Damage to them goes unseen; damage to those asked for is named."""
    from pyarrow import parquet

    rng = np.random.default_rng(0)
    path = row_groups(
        tmp_path / "a", [50] * 4, rng.normal(size=(200, 3)), rng.normal(size=(200, 3))
    )
    chunk = parquet.ParquetFile(path).metadata.row_group(2).column(0)
    content = bytearray(path.read_bytes())
    size, start = chunk.total_compressed_size, chunk.dictionary_page_offset
    content[start : start + size] = b"\xff" * size
    path.write_bytes(bytes(content))
    source = ParquetSource(path, **CHOICE)
    assert source.part(torch.tensor([99, 0])).N == 2
    assert sum(chunk.N for chunk in source.share(3, 4).chunks(9)) == 50
    with pytest.raises(InputError, match=r"a: row group 2 \(counted from 0\) cannot be read"):
        list(source.chunks(9))


@pytest.mark.parametrize("kept", [-60, 30])
def test_a_cut_off_file_of_a_folder_is_named(kept: int, tmp_path: Path) -> None:
    folder = folder_of_files(tmp_path)
    last = folder / "later" / "0.parquet"
    last.write_bytes(last.read_bytes()[:kept])
    with pytest.raises(InputError, match=r"later/0\.parquet cannot be read as Parquet.*cut off"):
        ParquetSource(folder, **CHOICE)


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    path = row_groups(tmp_path / "a", [50, 53])
    source = ParquetSource(path, **CHOICE)
    row_groups(path, [53, 50])
    with pytest.raises(InputError, match="a has changed since it was opened"):
        list(source.chunks(9))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"targets": ["y"]}, "column 'word' holds string; a source takes numbers"),
        ({"targets": ["y"], "inputs": ["a", "q"]}, "no column 'q'; its columns are 'a', 'y', 'b'"),
        ({"targets": ["y"], "inputs": ["a", "y"]}, "named once in .*'y' twice"),
        ({"targets": [], "inputs": ["a"]}, r"must each name a column; got \['a'\] and \[\]"),
    ],
)
def test_columns_that_cannot_be_used_are_named(
    words: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = row_groups(tmp_path / "a", [N])
    with pytest.raises(InputError, match=message):
        ParquetSource(path, **words)


def test_places_without_rows_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nope cannot be read: there is no such"):
        ParquetSource(tmp_path / "nope", **CHOICE)
    with pytest.raises(InputError, match="is a folder without files"):
        ParquetSource(tmp_path, **CHOICE)
    path = row_groups(tmp_path / "a", [0])
    with pytest.raises(InputError, match="has no rows"):
        ParquetSource(path, **CHOICE)


def test_inputs_are_all_columns_but_the_targets(tmp_path: Path) -> None:
    path = row_groups(tmp_path / "a", [N], word=np.arange(N))
    source = ParquetSource(path, targets=["z", "y"])
    assert source.inputs == ("a", "b", "word", "c")
    assert torch.equal(next(source.chunks(N)).Y, torch.tensor(Y[:, ::-1].copy()))


def test_a_pass_over_a_large_row_group_holds_a_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    monkeypatch.setattr("winnowgp.data.parquet_source._BATCH", 1000)

    def peak(rows: int) -> int:
        values = np.random.default_rng(0).normal(size=rows)
        parquet.write_table(
            pyarrow.table({"a": values, "y": values}), tmp_path / "a", row_group_size=rows
        )
        source = ParquetSource(tmp_path / "a", targets=["y"])
        before, most, count = pyarrow.total_allocated_bytes(), 0, 0
        for chunk in source.chunks(2500):
            most = max(most, pyarrow.total_allocated_bytes() - before)
            count += chunk.N
        assert count == rows
        return most

    assert peak(1_200_000) < 1.2 * peak(400_000)


def exact_moments(column: Any, weights: Any) -> tuple[float, float]:
    """Mean and standard deviation by definition, in rational numbers."""
    x, w = [Fraction(v) for v in column.tolist()], [Fraction(v) for v in weights.tolist()]
    mean = sum((a * b for a, b in zip(w, x, strict=True)), Fraction()) / sum(w)
    off = sum((a * (b - mean) ** 2 for a, b in zip(w, x, strict=True)), Fraction()) / sum(w)
    with localcontext(prec=60):
        return float(mean), float((Decimal(off.numerator) / Decimal(off.denominator)).sqrt())


COLUMNS = np.stack(
    [
        X[:, 0],
        1e9 + X[:, 1],  # sums of squares would lose every digit of it
        1e200 * X[:, 2],  # squares overflow
        1e-200 * X[:, 2],  # squares vanish
        np.linspace(1e-3, 1e3, N) ** 5,  # every part has another size
        np.where(np.arange(N) < 50, 0.0, 1e308),
    ],
    axis=1,
)


@pytest.mark.parametrize("size", [1, 10, N])
@pytest.mark.parametrize("weighted", [False, True])
def test_moments_of_parts_are_those_of_the_whole(size: int, weighted: bool) -> None:
    weights = RNG.uniform(0.1, 3, N) if weighted else np.ones(N)
    total = None
    for start in range(0, N, size):
        rows = slice(start, start + size)
        w = torch.tensor(weights[rows]) if weighted else None
        part = ColumnMoments.of(torch.tensor(COLUMNS[rows]), weights=w)
        total = part if total is None else total.merged(part)
    assert total is not None
    for column, mean, sd in zip(COLUMNS.T, total.mean.tolist(), total.sd.tolist(), strict=True):
        true_mean, true_sd = exact_moments(column, weights)
        assert mean == pytest.approx(true_mean, rel=1e-15, abs=1e-14 * true_sd)
        assert sd == pytest.approx(true_sd, rel=1e-13 + 1e-15 * abs(true_mean) / true_sd)


def test_standard_units_are_those_of_the_whole(source: Source) -> None:
    found = standardised(source)
    for units, A in ((found.x_units, X), (found.y_units, Y)):
        np.testing.assert_allclose(units.shift, A.mean(0), rtol=0, atol=1e-15)
        np.testing.assert_allclose(units.scale, A.std(0), rtol=1e-14)
    expected = (X - X.mean(0)) / X.std(0)
    for chunks in (found.chunks(8), (c for r in range(3) for c in found.share(r, 3).chunks(8))):
        whole = joined(list(chunks))
        np.testing.assert_allclose(whole.X, expected, atol=1e-13)
        np.testing.assert_allclose(whole.Y, (Y - Y.mean(0)) / Y.std(0), atol=1e-13)
    np.testing.assert_allclose(found.part(torch.tensor([9, 2])).X, expected[[9, 2]], atol=1e-13)
    as_they_are = standardised(source, targets=False)
    assert torch.equal(next(as_they_are.chunks(N)).Y, torch.tensor(Y))


def test_a_constant_column_is_only_shifted_and_weights_count() -> None:
    A = np.stack([np.full(N, 0.1), X[:, 0]], axis=1)
    weights = torch.tensor(RNG.uniform(0.5, 2, N))
    data = Dataset.of(torch.tensor(A), torch.tensor(Y), weights=weights)
    found = standardised(data)
    direct = Standardiser.of(data.X, weights=weights)
    assert found.x_units.scale[0] == 1
    assert torch.allclose(found.x_units.shift, direct.shift, rtol=1e-13)
    assert torch.allclose(found.x_units.scale, direct.scale, rtol=1e-13)
    chunk = next(found.share(1, 2).chunks(N))
    assert chunk.weights is not None
    assert torch.equal(chunk.weights, weights[51:])
