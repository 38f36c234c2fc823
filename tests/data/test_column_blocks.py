"""Tables of any size, some rows at a time."""

import codecs
import gzip
import tracemalloc
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.parquet_files import spoil, write_row_groups
from winnowgp.data import DataTable, read_blocks, read_table
from winnowgp.data.out_of_core import rechunk
from winnowgp.errors import InputError

N = 103


def lines() -> list[str]:
    """Words, holes, numbers too long for a float, a line end within quotes, an empty line."""
    rows = [f'{i},{"" if i % 7 == 3 else i / 8},"wörd\n{i % 3}",{2**60 + i}' for i in range(N)]
    return ["id,x,town,long", *rows[:50], "", *rows[50:]]


def row_groups(path: Path, sizes: list[int], **changes: Any) -> Path:
    """The same rows as Parquet, in row groups of these sizes."""
    n = sum(sizes)
    columns = {
        "id": list(range(n)),
        "x": [None if i % 7 == 3 else i / 8 for i in range(n)],
        "town": [f"wörd\n{i % 3}" for i in range(n)],
        # Some groups hold numbers alone, others what no float64 can.
        "long": [2**60 + i if i > 40 else i for i in range(n)],
        **changes,
    }
    return write_row_groups(path, columns, sizes)


FORMATS = ["csv", "crlf", "gz", "utf-8-sig", "utf-16", "latin-1", "parquet"]


def written(kind: str, folder: Path) -> tuple[Path, str]:
    """A file, and the encoding to read it with."""
    path, text = folder / "a", "\n".join(lines())
    if kind == "parquet":
        return row_groups(path, [40, 1, 0, 30, 32]), "utf-8"
    if kind == "crlf":
        text = text.replace("\n", "\r\n")
    coded = text.encode(kind if kind in ("utf-16", "utf-8-sig", "latin-1") else "utf-8")
    path.write_bytes(gzip.compress(coded) if kind == "gz" else coded)
    return path, "latin-1" if kind == "latin-1" else "utf-8"


def same(a: DataTable, b: DataTable) -> None:
    assert a.names == b.names
    for name in a.names:
        assert a.strings(name).tolist() == b.strings(name).tolist()
        np.testing.assert_array_equal(a.numbers(name), b.numbers(name))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("size", [1, 7, 50, N, 1000])
def test_blocks_of_any_size_are_the_whole_table(kind: str, size: int, tmp_path: Path) -> None:
    path, encoding = written(kind, tmp_path)
    blocks = list(read_blocks(path, size=size, encoding=encoding))
    assert max(block.N for block in blocks) <= size
    whole = read_table(path, encoding=encoding)
    assert whole.N == N
    assert whole.strings("id").tolist() == [str(i) for i in range(N)]
    assert whole.strings("long")[-1] == str(2**60 + N - 1)
    same(DataTable.joined(blocks), whole)
    again = list(rechunk(blocks, repeat(10)))
    assert [block.N for block in again] == [10] * 10 + [3]
    same(DataTable.joined(again), whole)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("size", [1, 7, N])
def test_rows_know_their_number_in_the_file(kind: str, size: int, tmp_path: Path) -> None:
    """Also after their blocks have been cut anew."""
    path, _ = written(kind, tmp_path)
    ends = [40, 41, 41, 71, 103]
    for blocks in (read_blocks(path, size=size), rechunk(read_blocks(path, size=size), repeat(9))):
        row = 0
        for block in blocks:
            for i in range(block.N):
                group = next(g for g, end in enumerate(ends) if row < end)
                told = f" (row group {group}, counted from 0)" if kind == "parquet" else ""
                assert block.describe_row(i) == f"row {row + 1}{told}"
                row += 1
        assert row == N


@pytest.mark.parametrize("bom", [b"", codecs.BOM_UTF8])
@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("row", [0, 9_000, 30_000])
def test_a_byte_that_cannot_be_read_is_counted_from_the_start(
    bom: bytes, zipped: bool, row: int, tmp_path: Path
) -> None:
    """However far into the file it is."""
    start = bom + b"a\n" + "é\n".encode() * row
    content = start + b"\xff\n" + b"x\n" * 9
    (tmp_path / "a").write_bytes(gzip.compress(content) if zipped else content)
    with pytest.raises(InputError, match=f"byte {len(start):,} cannot be read"):
        list(read_blocks(tmp_path / "a"))


def test_a_line_without_an_end_is_not_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("winnowgp.data.readers._LONGEST_LINE", 1000)
    (tmp_path / "a").write_text("a,b\n" + "1," * 600)
    with pytest.raises(InputError, match="a line of over 1,000 characters"):
        list(read_blocks(tmp_path / "a"))


def test_a_cut_off_gzip_file_is_named_after_its_good_blocks(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    text = "a\n" + "".join(f"{v}\n" for v in rng.normal(size=40_000))
    content = gzip.compress(text.encode())
    (tmp_path / "a").write_bytes(content[: len(content) // 2])
    blocks = read_blocks(tmp_path / "a", size=100)
    assert next(blocks).N == 100
    with pytest.raises(InputError, match="damaged or cut-off gzip"):
        list(blocks)


def test_a_damaged_row_group_is_named(tmp_path: Path) -> None:
    path = row_groups(tmp_path / "a", [50] * 40)
    spoil(path, group=37, column=2)
    blocks = read_blocks(path)
    assert sum(next(blocks).N for _ in range(37)) == 37 * 50
    with pytest.raises(InputError, match=r"row group 37 \(counted from 0\) cannot be read.*damage"):
        next(blocks)


def test_a_cut_off_parquet_file_is_named(tmp_path: Path) -> None:
    path = row_groups(tmp_path / "a", [50] * 4)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"a cannot be read as Parquet.*cut off"):
        next(read_blocks(path))


def test_the_csv_reader_holds_a_block_and_no_more(tmp_path: Path) -> None:
    """Python's own account of its memory: ten times the file, the same peak."""
    path = tmp_path / "a"

    def peak(rows: int) -> int:
        path.write_text("a,b\n" + "".join(f"{i},word {i}\n" for i in range(rows)))
        tracemalloc.start()
        for block in read_blocks(path, size=500):
            assert block.N <= 500
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(2_000)
    assert peak(20_000) < 1.2 * peak(2_000)


def test_the_parquet_reader_holds_a_batch_and_no_row_group(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    def peak(rows: int) -> int:
        """What pyarrow holds of a file of a single row group, at most."""
        values = np.random.default_rng(0).normal(size=rows)
        table = pyarrow.table({"a": values, "b": -values})
        parquet.write_table(table, tmp_path / "a", row_group_size=rows)
        del table
        before, most = pyarrow.total_allocated_bytes(), 0
        for block in read_blocks(tmp_path / "a", size=1000):
            assert block.N <= 1000
            most = max(most, pyarrow.total_allocated_bytes() - before)
        return most

    # Dictionaries, pages and buffers of a mebibyte or so a column come first.
    assert peak(1_200_000) < 1.2 * peak(400_000)


def test_regrouping_waits_for_no_more_than_it_needs() -> None:
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


def test_a_size_of_no_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`size` must be at least 1 row; got 0"):
        next(read_blocks(tmp_path / "a", size=0))
