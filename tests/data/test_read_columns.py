"""Tables from files."""

import gzip
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from winnowgp.data import read_table
from winnowgp.errors import InputError


def written(folder: Path, content: bytes | str, name: str = "a.csv") -> Path:
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
def test_dialects_of_csv_say_the_same(content: bytes, tmp_path: Path) -> None:
    table = read_table(written(tmp_path, content))
    assert {name: table.strings(name).tolist() for name in table.names} == {
        "a": ["1", None],
        "b": ["x y", "z"],
    }


def test_an_encoding_can_be_said(tmp_path: Path) -> None:
    path = written(tmp_path, "town\nMünchen\n".encode("latin-1"))
    assert read_table(path, encoding="latin-1").strings("town").tolist() == ["München"]
    with pytest.raises(InputError, match=r"byte 6 cannot be read.*--encoding"):
        read_table(path)
    with pytest.raises(InputError, match="`encoding` must be"):
        read_table(path, encoding="klingon")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "nothing in its first line"),
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
def test_what_cannot_be_read_is_said(content: bytes | str, message: str, tmp_path: Path) -> None:
    if isinstance(content, bytes) and content.startswith(b"PAR1"):
        pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    with pytest.raises(InputError, match=message):
        read_table(written(tmp_path, content))


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder"):
        read_table(tmp_path)
    with pytest.raises(InputError, match=r"nope\.csv cannot be read: No such file"):
        read_table(tmp_path / "nope.csv")


def test_parquet_is_read_by_type(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

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


def test_a_delimiter_within_a_quoted_name_is_no_delimiter(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('"a, b";y\n1;2\n')
    assert read_table(path).names == ("a, b", "y")
