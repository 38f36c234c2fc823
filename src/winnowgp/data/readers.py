"""CSV and Parquet files read in blocks of columns."""

import codecs
import csv
import gzip
import io
import re
import zlib
from collections.abc import Iterable, Iterator
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any, final

import numpy as np

from winnowgp.data.tables import Column, DataTable, Origin, distinct_names, word_or_missing
from winnowgp.errors import InputError, MissingExtraError

# CSV, also gzipped, some rows at a time.
#
# It is read with the standard library: every field stays the text it was until the encoder knows
# what its column means, so that a model sees new files as it saw the first one, and no data frame
# package is needed.


_DELIMITERS = ",;\t|"
# A file without line ends is no table, and must not be read whole to find out.
_LONGEST_LINE = 2**26


def csv_blocks(
    file: io.BufferedReader, path: Path, *, size: int, encoding: str
) -> Iterator[DataTable]:
    """Blocks of `size` rows, the last one shorter.

    Args:
        path: what to call the file in errors.
        encoding: unless a byte-order mark says otherwise.
    """
    content: Any = file
    try:
        if file.peek(2).startswith(b"\x1f\x8b"):
            content = gzip.GzipFile(fileobj=file)
        with _text(content, encoding, path) as text:
            try:
                yield from _blocks(text, path, size)
            except UnicodeDecodeError as error:
                # What the decoder was given ends where reading has come to.
                byte = content.tell() - len(error.object) + error.start
                raise InputError(
                    f"{path} is not {error.encoding} text: byte {byte:,} cannot be read. Save it "
                    "as UTF-8, or say its encoding, such as latin-1 or cp1252 (`--encoding`)."
                ) from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path} is a damaged or cut-off gzip file; fetch it again.") from error
    except InputError:
        raise
    except (UnicodeError, ValueError) as error:
        raise InputError(f"{path} is not {encoding} text: {error}.") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error


def _text(content: Any, encoding: str, path: Path) -> io.TextIOWrapper:
    """Text, line ends as they are."""
    start = content.peek(4096)[:4096]
    if start.startswith(codecs.BOM_UTF8):
        content.read(len(codecs.BOM_UTF8))
        encoding = "utf-8"
    elif start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    elif b"\0" in start:
        raise InputError(f"{path} is a binary file; give a CSV or Parquet file.")
    try:
        return io.TextIOWrapper(content, encoding=encoding, newline="")
    except LookupError:
        raise InputError(
            f"`encoding` must be one Python knows, such as utf-8 or latin-1; got {encoding!r}."
        ) from None


def _blocks(text: io.TextIOWrapper, path: Path, size: int) -> Iterator[DataTable]:
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
            yield _columns(names, block, Origin(before))
            before += len(block)
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: {error}; mend that line.") from error
    if not before:
        raise InputError(f"{path} has a line of column names and no rows; a table needs some.")


def _lines(text: io.TextIOWrapper, path: Path) -> Iterator[str]:
    while line := text.readline(_LONGEST_LINE):
        if len(line) == _LONGEST_LINE:
            raise InputError(f"{path} has a line of over {_LONGEST_LINE:,} letters; is it a table?")
        yield line


def _rows(reader: Any, width: int, path: Path) -> Iterator[list[str]]:
    for row in reader:
        if not row:
            continue
        if len(row) != width:
            raise InputError(
                f"{path}, line {reader.line_num}: {len(row)} fields where the first line names "
                f"{width}; mend that line."
            )
        yield row


def _columns(names: list[str], rows: list[list[str]], origin: Origin) -> DataTable:
    return DataTable(
        {
            name: np.array([word_or_missing(field) for field in fields], dtype=object)
            for name, fields in zip(names, zip(*rows, strict=True), strict=True)
        },
        origin,
    )


# A Parquet file, one row group after another; needs pyarrow.


# Bytes read at a time of each column; without it, a column's whole row group would be.
_BUFFER = 2**20


@final
class ParquetFile:
    """What is in a file, and its row groups a batch of rows at a time.

    Memory is that of a batch and a page of each column, however large a row group is. Errors name
    the file, and the row group that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        """Reads the footer alone."""
        try:
            from pyarrow import parquet
        except ImportError:
            raise MissingExtraError(
                f"{path} is a Parquet file, which needs pyarrow: pip install 'winnowgp[parquet]'."
            ) from None
        self.path = path
        try:
            self._file: Any = parquet.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False)
        except _unreadable() as error:
            raise InputError(
                f"{path} cannot be read as Parquet, whole or at all: {_reason(error)}. Is it cut "
                "off? Write or fetch it again."
            ) from error

    def __enter__(self) -> "ParquetFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def schema(self) -> Any:
        """Names and types of the columns, pyarrow's."""
        return self._file.schema_arrow

    @property
    def group_ends(self) -> tuple[int, ...]:
        """Rows up to the end of each row group."""
        about = self._file.metadata
        return tuple(accumulate(about.row_group(g).num_rows for g in range(about.num_row_groups)))

    def batches(self, group: int, size: int, *, columns: list[str] | None = None) -> Iterator[Any]:
        """Record batches, pyarrow's, of at most `size` rows of one row group.

        Args:
            columns: their names; all if None. The batches have them in the order of the file.
        """
        try:
            yield from self._file.iter_batches(size, row_groups=[group], columns=columns)
        except _unreadable() as error:
            raise InputError(
                f"{self.path}: row group {group} (counted from 0) cannot be read: "
                f"{_reason(error)}. The file is damaged or cut off; write or fetch it again."
            ) from error


def _unreadable() -> tuple[type[Exception], ...]:
    import pyarrow

    return (pyarrow.ArrowException, OSError, ValueError)


def _reason(error: Exception) -> str:
    lines = str(error).splitlines()
    return (lines[0] if lines else type(error).__name__)[:200].rstrip(".")


# Parquet, some rows at a time; needs pyarrow.


def parquet_blocks(path: Path, *, size: int) -> Iterator[DataTable]:
    """Blocks of at most `size` rows, none of which spans two row groups."""
    with ParquetFile(path) as file:
        names = distinct_names([str(name) for name in file.schema.names], path)
        ends = file.group_ends
        if not names or not ends or not ends[-1]:
            raise InputError(f"{path} has no rows or no columns; a table needs some.")
        before = 0
        for group in range(len(ends)):
            for batch in file.batches(group, size):
                columns = zip(names, batch.columns, strict=True)
                yield DataTable(
                    {name: _column(name, column, path) for name, column in columns},
                    Origin(before, ends),
                )
                before += batch.num_rows


def _column(name: str, column: Any, path: Path) -> Column:
    import pyarrow

    kind = column.type
    if pyarrow.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = column.type
    if pyarrow.types.is_nested(kind) or pyarrow.types.is_binary(kind):
        raise InputError(f"{path}: column {name!r} holds {kind}; only numbers, words and dates do.")
    if pyarrow.types.is_null(kind):
        return np.full(len(column), None, dtype=object)
    if pyarrow.types.is_floating(kind):
        # Nulls become NaN; a copy, as pyarrow's own memory is read-only and soon used again.
        return np.array(column.to_numpy(zero_copy_only=False), dtype=np.float64)
    if pyarrow.types.is_integer(kind) and _exact(column):
        return np.array(column.cast("float64").to_numpy(zero_copy_only=False))
    values = column.to_pylist()
    if pyarrow.types.is_decimal(kind):
        return np.array([np.nan if v is None else float(v) for v in values])
    if pyarrow.types.is_boolean(kind):
        values = [None if v is None else str(v).lower() for v in values]
    if pyarrow.types.is_temporal(kind):
        values = [None if v is None else _iso(v) for v in values]
    return np.array([None if v is None else word_or_missing(str(v)) for v in values], dtype=object)


def _exact(whole: Any) -> bool:
    """Whether every whole number is also a float64."""
    from pyarrow.compute import call_function

    ends = [end for end in call_function("min_max", [whole]).as_py().values() if end is not None]
    return all(abs(end) < 2**53 for end in ends)


def _iso(value: Any) -> str:
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


# Blocks of rows of one size, whatever size they came in.


def regrouped(blocks: Iterable[DataTable], size: int) -> Iterator[DataTable]:
    """The same rows in the same order, `size` at a time and what is left at the end.

    Holds fewer than `size` rows and one block.

    >>> parts = [DataTable.of({"a": [1, 2]}), DataTable.of({"a": [3, 4, 5]})]
    >>> [block.numbers("a").tolist() for block in regrouped(parts, 2)]
    [[1.0, 2.0], [3.0, 4.0], [5.0]]
    """
    held: list[DataTable] = []
    count = 0
    for block in blocks:
        held.append(block)
        count += block.N
        if count < size:
            continue
        joined, full = DataTable.joined(held), count - count % size
        held, count = [joined.between(full, count)] if count > full else [], count - full
        for start in range(0, full, size):
            yield joined.between(start, start + size)
    if held:
        yield DataTable.joined(held)


# A table from a file of any size, some rows at a time: CSV (also gzipped) or Parquet, told apart
# by what is in it.


BLOCK = 16_384


def column_blocks(path: Path, *, size: int = BLOCK, encoding: str = "utf-8") -> Iterator[DataTable]:
    """Blocks of at most `size` rows of a table whose first line names its columns, in order.

    Memory is that of a block, whatever the file holds. What is wrong with a row is said once the
    rows before it have been given out.

    Args:
        encoding: of text; a byte-order mark overrides it.
    """
    if path.is_dir():
        raise InputError(f"{path} is a folder; give a CSV or Parquet file.")
    if size < 1:
        raise InputError(f"`size` must be at least 1 row; got {size}.")
    try:
        file = path.open("rb")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error
    with file:
        if not file.peek(4).startswith(b"PAR1"):
            yield from csv_blocks(file, path, size=size, encoding=encoding)
            return
    yield from parquet_blocks(path, size=size)


# A whole table from a file: CSV (also gzipped) or Parquet, told apart by what is in it.


def read_table(path: Path, *, encoding: str = "utf-8") -> DataTable:
    """Read a table whose first line names its columns. For one too large, see `column_blocks`.

    Args:
        encoding: of text; a byte-order mark overrides it.
    """
    return DataTable(DataTable.joined(list(column_blocks(path, encoding=encoding))).values)
