"""Reading tables from CSV (also gzipped), Excel and Parquet files, whole or in blocks of rows.

CSV is read with the standard library: every field stays a string until an encoder has decided what
its column means, so that a model reads a new file as it read the first one. Excel files need
openpyxl, Parquet files pyarrow. Nothing here imports PyTorch: a command reads the names of the
columns before it loads what a fit needs.
"""

import codecs
import csv
import gzip
import io
import re
import warnings
import zlib
from collections.abc import Iterator
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any, final
from zipfile import BadZipFile

import numpy as np

from winnowgp.data.tables import (
    ROW_INDEX,
    DataTable,
    Origin,
    arrow_column,
    as_string,
    distinct_names,
    parse_string,
)
from winnowgp.errors import InputError, MissingExtraError, RowIndexWarning

BLOCK = 16_384
"""Default number of rows of a block."""

_DELIMITERS = ",;\t|"
# An Excel file is a zip archive; before 2007 it was a compound file.
_ZIP, _OLD_EXCEL = b"PK\x03\x04", b"\xd0\xcf\x11\xe0"
# A file without line ends is not a table; do not read it whole to find out.
_LONGEST_LINE = 2**26
# Bytes of each Parquet column that are read at a time; pyarrow would read the whole row group.
_BUFFER = 2**20


def read_table(path: Path, *, encoding: str = "utf-8") -> DataTable:
    """Read a CSV, Excel or Parquet file, whose content decides which of them it is.

    For a file that does not fit in memory, see `read_blocks`.

    Args:
        path: file whose first line, or schema, names the columns; of an Excel file the first sheet.
            A first column without a name is a row index, as pandas and R write it, and left out
            with a `RowIndexWarning`.
        encoding: text encoding of a CSV file; a byte-order mark overrides it.
    """
    table = DataTable.joined(list(_blocks(path, size=BLOCK, encoding=encoding)))
    if ROW_INDEX in table.names:
        warnings.warn(
            f"{path}: the first column has no name; it is taken for a row index and left out. To "
            "use it, give it a name in the first line.",
            RowIndexWarning,
            stacklevel=2,
        )
    return DataTable(table.without([ROW_INDEX]).values)


def read_blocks(path: Path, *, size: int = BLOCK, encoding: str = "utf-8") -> Iterator[DataTable]:
    """Yield the rows of a CSV, Excel or Parquet file in order, in blocks of at most `size` rows.

    Memory is that of one block. An error in a row is raised after the rows before it were yielded.

    Args:
        path: file whose first line, or schema, names the columns; of an Excel file the first sheet.
            A first column without a name is left out.
        size: largest number of rows of a block.
        encoding: text encoding of a CSV file; a byte-order mark overrides it.
    """
    for block in _blocks(path, size=size, encoding=encoding):
        yield block.without([ROW_INDEX])


def _blocks(path: Path, *, size: int, encoding: str) -> Iterator[DataTable]:
    """Yield all columns of a file in blocks of rows."""
    if path.is_dir():
        raise InputError(f"{path} is a folder; give a CSV, Excel or Parquet file.")
    if size < 1:
        raise InputError(f"`size` must be at least 1 row; got {size}.")
    try:
        file = path.open("rb")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error
    with file:
        start = file.peek(8)
        if not start.startswith((b"PAR1", _ZIP, _OLD_EXCEL)):
            yield from _csv_blocks(file, path, size=size, encoding=encoding)
            return
    if start.startswith(_OLD_EXCEL):
        raise InputError(f"{path} is a file of an old version of Excel; save it as .xlsx or CSV.")
    blocks = _excel_blocks if start.startswith(_ZIP) else _parquet_blocks
    yield from blocks(path, size=size)


def _csv_blocks(
    file: io.BufferedReader, path: Path, *, size: int, encoding: str
) -> Iterator[DataTable]:
    content: Any = file
    try:
        if file.peek(2).startswith(b"\x1f\x8b"):
            content = gzip.GzipFile(fileobj=file)
        with _text(content, encoding, path) as text:
            try:
                yield from _text_blocks(text, path, size)
            except UnicodeDecodeError as error:
                # The bytes that the decoder was given end at the current position.
                byte = content.tell() - len(error.object) + error.start
                raise InputError(
                    f"{path} is not {error.encoding} text: byte {byte:,} cannot be read. Save it "
                    "as UTF-8, or give its encoding, such as latin-1 or cp1252 (`--encoding`)."
                ) from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(
            f"{path} is a damaged or cut-off gzip file; download or write it again."
        ) from error
    except InputError:
        raise
    except (UnicodeError, ValueError) as error:
        raise InputError(f"{path} is not {encoding} text: {error}. Save it as UTF-8.") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error


def _text(content: Any, encoding: str, path: Path) -> io.TextIOWrapper:
    """Decode bytes, and leave line ends as they are."""
    start = content.peek(4096)[:4096]
    if start.startswith(codecs.BOM_UTF8):
        content.read(len(codecs.BOM_UTF8))
        encoding = "utf-8"
    elif start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    elif b"\0" in start:
        raise InputError(f"{path} is a binary file; give a CSV, Excel or Parquet file.")
    try:
        return io.TextIOWrapper(content, encoding=encoding, newline="")
    except LookupError:
        raise InputError(
            f"`encoding` must be one Python knows, such as utf-8 or latin-1; got {encoding!r}."
        ) from None


def _text_blocks(text: io.TextIOWrapper, path: Path, size: int) -> Iterator[DataTable]:
    lines = _lines(text, path)
    first = next(lines, "")
    if not first.strip():
        raise InputError(f"{path} has nothing in its first line, which must name the columns.")
    # A delimiter within quotes is part of a name.
    delimiter = max(_DELIMITERS, key=re.sub(r'"[^"]*"', "", first).count)
    reader = csv.reader(chain([first], lines), delimiter=delimiter, strict=True)
    before = 0
    try:
        names = distinct_names(next(reader), path)
        rows = _rows(reader, len(names), path)
        while block := list(islice(rows, size)):
            columns = zip(names, zip(*block, strict=True), strict=True)
            yield DataTable(
                {
                    name: np.array([parse_string(field) for field in fields], dtype=object)
                    for name, fields in columns
                },
                Origin(before),
            )
            before += len(block)
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: {error}; correct that line.") from error
    if not before:
        raise InputError(f"{path} has a line of column names and no rows; a table needs some.")


def _lines(text: io.TextIOWrapper, path: Path) -> Iterator[str]:
    while line := text.readline(_LONGEST_LINE):
        if len(line) == _LONGEST_LINE:
            raise InputError(
                f"{path} has a line of over {_LONGEST_LINE:,} characters; give a CSV or Parquet "
                "file."
            )
        yield line


def _rows(reader: Any, width: int, path: Path) -> Iterator[list[str]]:
    for row in reader:
        if not row:
            continue
        if len(row) != width:
            raise InputError(
                f"{path}, line {reader.line_num}: {len(row)} fields where the first line names "
                f"{width}; correct that line."
            )
        yield row


def _excel_blocks(path: Path, *, size: int) -> Iterator[DataTable]:
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


def _parquet_blocks(path: Path, *, size: int) -> Iterator[DataTable]:
    """Yield the rows of a file in blocks of at most `size` rows, each within one row group."""
    with ParquetFile(path) as file:
        names = distinct_names([str(name) for name in file.schema.names], path)
        if not names or not file.N:
            raise InputError(f"{path} has no rows or no columns; a table needs some.")
        for batch, origin in file.batches(size):
            columns = zip(names, batch.columns, strict=True)
            place = f"{path}: "
            yield DataTable({n: arrow_column(n, c, place=place) for n, c in columns}, origin)


@final
class ParquetFile:
    """An open Parquet file, whose rows are read in batches.

    Memory is that of a batch and of a page of each column, however large the row groups are. Errors
    name the file, and the row group that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        """Open a file and read its footer."""
        try:
            from pyarrow import parquet
        except ImportError:
            raise MissingExtraError(
                f"{path} is a Parquet file, which needs pyarrow: pip install 'winnowgp[parquet]'."
            ) from None
        self.path = path
        try:
            self._file: Any = parquet.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False)
        except _pyarrow_errors() as error:
            raise InputError(
                f"{path} cannot be read as Parquet: {_reason(error)}. If it is cut off, download "
                "or write it again."
            ) from error
        metadata = self._file.metadata
        groups = (metadata.row_group(g).num_rows for g in range(metadata.num_row_groups))
        self.group_ends = tuple(accumulate(groups))
        """Number of rows up to the end of each row group."""

    def __enter__(self) -> "ParquetFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def schema(self) -> Any:
        """The pyarrow schema: names and types of the columns."""
        return self._file.schema_arrow

    @property
    def N(self) -> int:
        """Number of rows."""
        return self.group_ends[-1] if self.group_ends else 0

    def batches(
        self,
        size: int,
        *,
        start: int = 0,
        stop: int | None = None,
        columns: list[str] | None = None,
    ) -> Iterator[tuple[Any, Origin]]:
        """Yield pyarrow record batches of at most `size` rows, and their positions in the file.

        Row groups without rows from `start` to before `stop` are not read. No batch spans two row
        groups.

        Args:
            size: largest number of rows of a batch.
            start: first row.
            stop: row after the last one; the end of the file if None.
            columns: names of the columns to read, all if None; batches have them in file order.
        """
        stop, row = self.N if stop is None else stop, 0
        for group, end in enumerate(self.group_ends):
            if row >= stop:
                return
            if start < end:
                for batch in self._group_batches(group, size, columns):
                    skipped = min(max(start - row, 0), batch.num_rows)
                    wanted = batch.slice(skipped, max(stop - row - skipped, 0))
                    if wanted.num_rows:
                        yield wanted, Origin(row + skipped, self.group_ends)
                    row += batch.num_rows
                    if row >= stop:
                        return
            row = end

    def _group_batches(self, group: int, size: int, columns: list[str] | None) -> Iterator[Any]:
        try:
            yield from self._file.iter_batches(size, row_groups=[group], columns=columns)
        except _pyarrow_errors() as error:
            raise InputError(
                f"{self.path}: row group {group} (counted from 0) cannot be read: "
                f"{_reason(error)}. The file is damaged or cut off; download or write it again."
            ) from error


def _pyarrow_errors() -> tuple[type[Exception], ...]:
    import pyarrow

    return (pyarrow.ArrowException, OSError, ValueError)


def _reason(error: Exception) -> str:
    lines = str(error).splitlines()
    return (lines[0] if lines else type(error).__name__)[:200].rstrip(".")
