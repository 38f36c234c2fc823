"""Reading tables from CSV (also gzipped), Excel and Parquet files, whole or in blocks of rows.

CSV is read with the standard library: every field stays a string until an encoder has decided what
its column means, so that a model reads a new file as it read the first one. Nothing here imports
PyTorch: a command reads the names of the columns before it loads what a fit needs.
"""

import codecs
import csv
import gzip
import io
import re
import warnings
import zlib
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from winnowgp.data.excel import excel_blocks
from winnowgp.data.frames import parse_string
from winnowgp.data.parquet_file import parquet_blocks
from winnowgp.data.tables import ROW_INDEX, DataTable, Origin, checked_size, distinct_names
from winnowgp.errors import InputError, RowIndexWarning

BLOCK = 16_384
"""Default number of rows of a block."""

_DELIMITERS = ",;\t|"
# An Excel file is a zip archive; before 2007 it was a compound file.
_ZIP, _OLD_EXCEL = b"PK\x03\x04", b"\xd0\xcf\x11\xe0"
# A file without line ends is not a table; do not read it whole to find out.
_LONGEST_LINE = 2**26


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
    checked_size(size)
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
    blocks = excel_blocks if start.startswith(_ZIP) else parquet_blocks
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
        raise InputError(f"{path} is not {encoding} text: {error}.") from error
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
