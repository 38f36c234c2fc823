"""Excel files as tables."""

import sys
from datetime import datetime
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import openpyxl
import pytest

from winnowgp.data import read_blocks, read_table
from winnowgp.errors import InputError, MissingExtraError


def workbook(path: Path, rows: list[list[Any]]) -> Path:
    book = openpyxl.Workbook()
    sheet = book.active
    assert sheet is not None
    for row in rows:
        sheet.append(row)
    book.create_sheet("notes").append(["not read"])
    book.save(path)
    return path


ROWS: list[list[Any]] = [
    ["size", "colour", "sold", "new", "share"],
    [1, "red", datetime(2024, 3, 1), True, 0.25],
    [2.5, " NA ", datetime(2024, 3, 2, 12, 30), False, None],
    [],
    [None, "blue", None, None, "45%"],
]


def test_excel_first_sheet_is_read_as_a_table(tmp_path: Path) -> None:
    table = read_table(workbook(tmp_path / "a.xlsx", ROWS))
    assert table.names == ("size", "colour", "sold", "new", "share")
    np.testing.assert_array_equal(table.numbers("size"), [1, 2.5, np.nan])
    assert table.strings("colour").tolist() == ["red", None, "blue"]
    assert table.strings("sold").tolist() == ["2024-03-01T00:00:00", "2024-03-02T12:30:00", None]
    assert table.strings("new").tolist() == ["true", "false", None]
    assert table.strings("share").tolist() == ["0.25", None, "45%"]


def test_excel_content_decides_and_not_the_name(tmp_path: Path) -> None:
    path = workbook(tmp_path / "a.csv", ROWS)
    assert [block.N for block in read_blocks(path, size=2)] == [2, 1]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([["a", "b"], [1, 2, 3]], "row 1: there are more cells than the first row names columns"),
        ([["a", "a"], [1, 2]], "more than one column is called 'a'"),
        ([["a", None, "c"], [1, 2, 3]], "column 2 has no name"),
        ([["a", "b"]], "no other"),
        ([], "nothing in its first sheet"),
    ],
)
def test_excel_unusable_sheet_raises_input_error(
    rows: list[list[Any]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        read_table(workbook(tmp_path / "a.xlsx", rows))


def test_excel_other_zip_archive_raises_input_error(tmp_path: Path) -> None:
    with ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.csv", "x,y\n1,2\n")
    with pytest.raises(InputError, match="zip archive but not an Excel file"):
        read_table(tmp_path / "a.zip")
    (tmp_path / "cut.xlsx").write_bytes((tmp_path / "a.zip").read_bytes()[:40])
    with pytest.raises(InputError, match="zip archive but not an Excel file"):
        read_table(tmp_path / "cut.xlsx")


def test_excel_without_openpyxl_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.xlsx").write_bytes(b"PK\x03\x04")
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'winnowgp\[excel\]'"):
        read_table(tmp_path / "a.xlsx")


def test_old_excel_file_raises_input_error(tmp_path: Path) -> None:
    (tmp_path / "a.xls").write_bytes(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(100))
    with pytest.raises(InputError, match=r"old version of Excel; save it as \.xlsx"):
        read_table(tmp_path / "a.xls")
