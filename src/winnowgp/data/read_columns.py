"""Tables from CSV (also gzipped) and Parquet files, told apart by what is in them.

CSV is read with the standard library: every field stays the text it was until the encoder knows
what its column means, so that a model sees new files as it saw the first one, and no data frame
package is needed. Parquet needs pyarrow.
"""

import codecs
import csv
import gzip
import io
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from winnowgp.data.columns import Column, Columns, word_or_missing
from winnowgp.errors import InputError, MissingExtraError

_DELIMITERS = ",;\t|"


def read_columns(path: Path, *, encoding: str = "utf-8") -> Columns:
    """Read a table whose first line names its columns.

    Args:
        encoding: of text; a byte-order mark overrides it.
    """
    if path.is_dir():
        raise InputError(f"{path} is a folder; give a CSV or Parquet file.")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error
    if content.startswith(b"PAR1"):
        return _parquet(path)
    if content.startswith(b"\x1f\x8b"):
        try:
            content = gzip.decompress(content)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise InputError(
                f"{path} is a damaged or cut-off gzip file; fetch it again."
            ) from error
    return _csv(_decoded(content, encoding, path), path)


def _decoded(content: bytes, encoding: str, path: Path) -> str:
    """Text, line ends as they are."""
    if content.startswith(codecs.BOM_UTF8):
        encoding = "utf-8-sig"
    elif content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    elif b"\0" in content[:4096]:
        raise InputError(f"{path} is a binary file; give a CSV or Parquet file.")
    try:
        return content.decode(encoding)
    except LookupError:
        raise InputError(
            f"`encoding` must be one Python knows, such as utf-8 or latin-1; got {encoding!r}."
        ) from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not {error.encoding} text: byte {error.start:,} cannot be read. Save it as "
            "UTF-8, or say its encoding, such as latin-1 or cp1252 (`--encoding`)."
        ) from error
    except (UnicodeError, ValueError) as error:
        raise InputError(f"{path} is not {encoding} text: {error}.") from error


def _csv(text: str, path: Path) -> Columns:
    first = text[: text.find("\n") + 1] or text
    if not first.strip():
        raise InputError(f"{path} has nothing in its first line, which must name the columns.")
    # A delimiter within quotes is part of a name.
    delimiter = max(_DELIMITERS, key=re.sub(r'"[^"]*"', "", first).count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        names = _names(next(reader), path)
        rows = list(_rows(reader, len(names), path))
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: {error}; mend that line.") from error
    if not rows:
        raise InputError(f"{path} has a line of column names and no rows; a table needs some.")
    return Columns(
        {
            name: np.array([word_or_missing(field) for field in fields], dtype=object)
            for name, fields in zip(names, zip(*rows, strict=True), strict=True)
        }
    )


def _names(header: list[str], path: Path) -> list[str]:
    names = [name.strip() for name in header]
    for place, name in enumerate(names, start=1):
        if not name:
            raise InputError(
                f"{path}: column {place} has no name; give every column one "
                "(pandas: `to_csv(..., index=False)`)."
            )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        shown = ", ".join(repr(name[:60]) for name in twice[:5])
        raise InputError(f"{path}: more than one column is called {shown}; rename them.")
    return names


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


def _parquet(path: Path) -> Columns:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise MissingExtraError(
            f"{path} is a Parquet file, which needs pyarrow: pip install 'winnowgp[parquet]'."
        ) from None
    try:
        table: Any = parquet.ParquetFile(path).read()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{path} cannot be read as Parquet: {reason[:200]}") from error
    names = _names([str(name) for name in table.column_names], path)
    if not names or not table.num_rows:
        raise InputError(f"{path} has no rows or no columns; a table needs some.")
    return Columns(
        {
            name: _arrow_column(name, column, path)
            for name, column in zip(names, table.columns, strict=True)
        }
    )


def _arrow_column(name: str, column: Any, path: Path) -> Column:
    import pyarrow

    kind = column.type
    if pyarrow.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = column.type
    if pyarrow.types.is_nested(kind) or pyarrow.types.is_binary(kind):
        raise InputError(f"{path}: column {name!r} holds {kind}; only numbers, words and dates do.")
    if pyarrow.types.is_null(kind):
        return np.full(len(column), None, dtype=object)
    if pyarrow.types.is_floating(kind) or pyarrow.types.is_decimal(kind):
        return np.array([np.nan if v is None else float(v) for v in column.to_pylist()])
    values = column.to_pylist()
    if pyarrow.types.is_integer(kind):
        given = [v for v in values if v is not None]
        if not given or max(abs(v) for v in given) < 2**53:
            return np.array([np.nan if v is None else float(v) for v in values])
    if pyarrow.types.is_boolean(kind):
        values = [None if v is None else str(v).lower() for v in values]
    if pyarrow.types.is_temporal(kind):
        values = [None if v is None else _iso(v) for v in values]
    return np.array([None if v is None else word_or_missing(str(v)) for v in values], dtype=object)


def _iso(value: Any) -> str:
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
