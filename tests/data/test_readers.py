"""Tables from CSV and Parquet files, whole and in blocks."""

import codecs
import gzip
import tracemalloc
from datetime import date
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from helpers.source_problems import spoil, write_row_groups
from winnowgp.data import DataTable, read_blocks, read_table
from winnowgp.data.out_of_core import rechunk
from winnowgp.errors import InputError, RowIndexWarning

N = 103
FORMATS = ["csv", "crlf", "gz", "utf-8-sig", "utf-16", "latin-1", "parquet"]


def lines() -> list[str]:
    """Return strings, missing values, integers beyond float64, a quoted line end, an empty line."""
    rows = [f'{i},{"" if i % 7 == 3 else i / 8},"wörd\n{i % 3}",{2**60 + i}' for i in range(N)]
    return ["id,x,town,long", *rows[:50], "", *rows[50:]]


def row_groups(path: Path, sizes: list[int], **changes: Any) -> Path:
    """Write the same rows as Parquet, in row groups of these sizes."""
    n = sum(sizes)
    columns = {
        "id": list(range(n)),
        "x": [None if i % 7 == 3 else i / 8 for i in range(n)],
        "town": [f"wörd\n{i % 3}" for i in range(n)],
        # Some groups are exact in float64, others are not.
        "long": [2**60 + i if i > 40 else i for i in range(n)],
        **changes,
    }
    return write_row_groups(path, columns, sizes)


def write_format(kind: str, folder: Path) -> tuple[Path, str]:
    """Write a file, and return it with its encoding."""
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


def write_file(folder: Path, content: bytes | str, name: str = "a.csv") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    "content",
    [
        b"a,b\n1,x y\n,z\n",
        b"\xef\xbb\xbfa,b\r\n1,x y\r\n\r\nNA,z\r\n",
        b"a;b\n 1 ;x y\nnull;z\n",
        b"a\tb\n1\tx y\n?\tz",
        b'"a","b"\n"1","x y"\n"","z"\n',
        gzip.compress(b"a,b\n1,x y\n,z\n", mtime=0),
        "a,b\n1,x y\n,z\n".encode("utf-16"),
    ],
)
def test_read_table_csv_dialects_give_the_same_table(content: bytes, tmp_path: Path) -> None:
    table = read_table(write_file(tmp_path, content))
    assert {name: table.strings(name).tolist() for name in table.names} == {
        "a": ["1", None],
        "b": ["x y", "z"],
    }


def test_read_table_ignores_a_delimiter_within_quotes(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('"a, b";y\n1;2\n')
    assert read_table(path).names == ("a, b", "y")


def test_read_table_uses_the_given_encoding(tmp_path: Path) -> None:
    path = write_file(tmp_path, "town\nMünchen\n".encode("latin-1"))
    assert read_table(path, encoding="latin-1").strings("town").tolist() == ["München"]
    with pytest.raises(InputError, match=r"byte 6 cannot be read.*--encoding"):
        read_table(path)
    with pytest.raises(InputError, match="`encoding` must be"):
        read_table(path, encoding="klingon")


def test_read_table_converts_parquet_columns_by_type(tmp_path: Path) -> None:
    table = pyarrow.table(
        {
            "whole": [1, None],
            "huge": [2**60, 2**60 + 1],
            "real": [0.5, None],
            "word": pyarrow.array(["a", None]).dictionary_encode(),
            "flag": [True, None],
            "day": [date(1970, 1, 2), None],
        }
    )
    parquet.write_table(table, tmp_path / "a.anything")
    columns = read_table(tmp_path / "a.anything")
    np.testing.assert_array_equal(columns.values["whole"], [1, np.nan])
    np.testing.assert_array_equal(columns.values["real"], [0.5, np.nan])
    words = {n: columns.strings(n).tolist() for n in ("huge", "word", "flag", "day")}
    assert words == {
        "huge": [str(2**60), str(2**60 + 1)],
        "word": ["a", None],
        "flag": ["true", None],
        "day": ["1970-01-02", None],
    }
    parquet.write_table(pyarrow.table({"list": [[1], [2]]}), tmp_path / "b")
    with pytest.raises(InputError, match="column 'list' has unsupported type list"):
        read_table(tmp_path / "b")


def test_read_table_first_column_without_a_name_is_left_out_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('"","a","b"\n"1",2,3\n"2",4,5\n', encoding="utf-8")
    with pytest.warns(RowIndexWarning, match="row index and left out. To use it, give it a name"):
        table = read_table(path)
    assert table.names == ("a", "b")
    assert table.strings("a").tolist() == ["2", "4"]
    # Later blocks of a file that is predicted say nothing: the fit has said so.
    assert [block.names for block in read_blocks(path, size=1)] == [("a", "b")] * 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "nothing in its first line"),
        ('""\n1\n', "column 1 has no name"),
        ("a,b\n", "no rows"),
        ("a,b\n1,2\n1,2,3\n", "line 3: 3 fields where the first line names 2"),
        ("a,,c\n1,2,3\n", "column 2 has no name.*index=False"),
        ("a,b,a\n1,2,3\n", "called 'a'; rename"),
        ('a\n"x\n', "line 2: .*correct that line"),
        ("a\n" + "x" * 200_000 + "\n", "line 2: field larger than field limit"),
        (b"\x00\x01\x02\x03" * 9, "binary"),
        (gzip.compress(b"a,b\n1,2\n" * 99, mtime=0)[:-9], "gzip"),
        (b"\x1f\x8b" + bytes(50), "gzip"),
        (b"PAR1" + bytes(60), "Parquet"),
    ],
)
def test_read_table_of_an_invalid_file_raises_input_error(
    content: bytes | str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        read_table(write_file(tmp_path, content))


def test_read_table_of_a_missing_file_names_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder"):
        read_table(tmp_path)
    with pytest.raises(InputError, match=r"nope\.csv cannot be read: No such file"):
        read_table(tmp_path / "nope.csv")


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("size", [1, 7, 50, N, 1000])
def test_read_blocks_of_any_size_are_the_whole_table(kind: str, size: int, tmp_path: Path) -> None:
    path, encoding = write_format(kind, tmp_path)
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
def test_read_blocks_rows_keep_their_number_in_the_file(
    kind: str, size: int, tmp_path: Path
) -> None:
    """Row numbers also survive rechunking."""
    path, _ = write_format(kind, tmp_path)
    ends = [40, 41, 41, 71, 103]
    for blocks in (read_blocks(path, size=size), rechunk(read_blocks(path, size=size), repeat(9))):
        row = 0
        for block in blocks:
            for i in range(block.N):
                group = next(g for g, end in enumerate(ends) if row < end)
                suffix = f" (row group {group}, counted from 0)" if kind == "parquet" else ""
                assert block.describe_row(i) == f"row {row + 1}{suffix}"
                row += 1
        assert row == N


@pytest.mark.parametrize("bom", [b"", codecs.BOM_UTF8])
@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("row", [0, 9_000, 30_000])
def test_read_blocks_counts_an_undecodable_byte_from_the_start(
    bom: bytes, zipped: bool, row: int, tmp_path: Path
) -> None:
    start = bom + b"a\n" + "é\n".encode() * row
    content = start + b"\xff\n" + b"x\n" * 9
    (tmp_path / "a").write_bytes(gzip.compress(content) if zipped else content)
    with pytest.raises(InputError, match=f"byte {len(start):,} cannot be read"):
        list(read_blocks(tmp_path / "a"))


def test_read_blocks_does_not_read_an_endless_line_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("winnowgp.data.readers._LONGEST_LINE", 1000)
    (tmp_path / "a").write_text("a,b\n" + "1," * 600)
    with pytest.raises(InputError, match="a line of over 1,000 characters"):
        list(read_blocks(tmp_path / "a"))


def test_read_blocks_yields_good_blocks_of_a_truncated_gzip(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    text = "a\n" + "".join(f"{v}\n" for v in rng.normal(size=40_000))
    content = gzip.compress(text.encode())
    (tmp_path / "a").write_bytes(content[: len(content) // 2])
    blocks = read_blocks(tmp_path / "a", size=100)
    assert next(blocks).N == 100
    with pytest.raises(InputError, match="damaged or cut-off gzip"):
        list(blocks)


def test_read_blocks_names_a_damaged_row_group(tmp_path: Path) -> None:
    path = row_groups(tmp_path / "a", [50] * 40)
    spoil(path, group=37, column=2)
    blocks = read_blocks(path)
    assert sum(next(blocks).N for _ in range(37)) == 37 * 50
    with pytest.raises(InputError, match=r"row group 37 \(counted from 0\) cannot be read.*damage"):
        next(blocks)


def test_read_blocks_names_a_truncated_parquet_file(tmp_path: Path) -> None:
    path = row_groups(tmp_path / "a", [50] * 4)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"a cannot be read as Parquet.*cut off"):
        next(read_blocks(path))


def test_read_blocks_csv_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """Ten times the file has the same peak of traced memory."""
    path = tmp_path / "a"

    def peak(rows: int) -> int:
        path.write_text("a,b\n" + "".join(f"{i},word {i}\n" for i in range(rows)))
        tracemalloc.start()
        for block in read_blocks(path, size=500):
            assert block.N <= 500
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak_bytes

    peak(2_000)
    assert peak(20_000) < 1.2 * peak(2_000)


def test_read_blocks_parquet_memory_does_not_grow_with_row_groups(tmp_path: Path) -> None:
    def peak(rows: int) -> int:
        """Return the most memory that pyarrow holds while it reads a file of one row group."""
        values = np.random.default_rng(0).normal(size=rows)
        table = pyarrow.table({"a": values, "b": -values})
        parquet.write_table(table, tmp_path / "a", row_group_size=rows)
        del table
        before, most = pyarrow.total_allocated_bytes(), 0
        for block in read_blocks(tmp_path / "a", size=1000):
            assert block.N <= 1000
            most = max(most, pyarrow.total_allocated_bytes() - before)
        return most

    # Dictionaries, pages and buffers take about a mebibyte per column in both.
    assert peak(1_200_000) < 1.2 * peak(400_000)


def test_read_blocks_of_size_zero_raises_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`size` must be at least 1 row; got 0"):
        next(read_blocks(tmp_path / "a", size=0))
