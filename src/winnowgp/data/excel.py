"""The first sheet of an Excel file as blocks of a table; needs openpyxl."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from winnowgp.data.frames import as_string
from winnowgp.data.tables import DataTable, Origin, distinct_names
from winnowgp.errors import InputError, MissingExtraError


def excel_blocks(path: Path, *, size: int) -> Iterator[DataTable]:
    """Yield the rows of the first sheet in blocks of at most `size` rows; its first row has names.

    Cells have the values that Excel last computed. Rows without any value are left out.
    """
    try:
        from openpyxl import load_workbook
        from openpyxl.utils.exceptions import InvalidFileException
    except ImportError:
        raise MissingExtraError(
            f"{path} is an Excel file, which needs openpyxl: pip install 'winnowgp[excel]'; or "
            "save it as CSV."
        ) from None
    try:
        with path.open("rb") as file:
            workbook: Any = load_workbook(file, read_only=True, data_only=True)
            try:
                yield from _sheet_blocks(workbook.worksheets[0], path, size)
            finally:
                workbook.close()
    except (BadZipFile, InvalidFileException, LookupError, EOFError) as error:
        raise InputError(
            f"{path} is a zip archive but not an Excel file that can be read; give a CSV, Excel or "
            "Parquet file."
        ) from error


def _sheet_blocks(sheet: Any, path: Path, size: int) -> Iterator[DataTable]:
    rows = (row for row in sheet.iter_rows(values_only=True) if any(v is not None for v in row))
    header = list(next(rows, ()))
    while header and header[-1] is None:
        header.pop()
    if not header:
        raise InputError(f"{path} has nothing in its first sheet, whose first row names columns.")
    names = distinct_names([as_string(name) or "" for name in header], path)
    before = 0
    while block := list(islice(rows, size)):
        cells = [_cells(row, names, path, before + i) for i, row in enumerate(block)]
        columns = zip(names, zip(*cells, strict=True), strict=True)
        values = {
            name: np.array([as_string(value) for value in column], dtype=object)
            for name, column in columns
        }
        yield DataTable(values, Origin(before))
        before += len(block)
    if not before:
        raise InputError(f"{path} has a row of column names and no other; a table needs some.")


def _cells(row: tuple[Any, ...], names: list[str], path: Path, number: int) -> list[Any]:
    """Return the cells of a row, one per column; rows of a sheet may be shorter or longer."""
    if any(value is not None for value in row[len(names) :]):
        raise InputError(
            f"{path}, row {number + 1}: there are more cells than the first row names columns "
            f"({len(names)}); correct that row."
        )
    return [*row[: len(names)], *[None] * (len(names) - len(row))]
