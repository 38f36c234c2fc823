"""CSV, also gzipped, some rows at a time.

It is read with the standard library: every field stays the text it was until the encoder knows
what its column means, so that a model sees new files as it saw the first one, and no data frame
package is needed.
"""

import codecs
import csv
import gzip
import io
import re
import zlib
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from winnowgp.data.columns import Columns, word_or_missing
from winnowgp.data.distinct_names import distinct_names
from winnowgp.data.origin import Origin
from winnowgp.errors import InputError

_DELIMITERS = ",;\t|"
# A file without line ends is no table, and must not be read whole to find out.
_LONGEST_LINE = 2**26


def csv_blocks(
    file: io.BufferedReader, path: Path, *, size: int, encoding: str
) -> Iterator[Columns]:
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


def _blocks(text: io.TextIOWrapper, path: Path, size: int) -> Iterator[Columns]:
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


def _columns(names: list[str], rows: list[list[str]], origin: Origin) -> Columns:
    return Columns(
        {
            name: np.array([word_or_missing(field) for field in fields], dtype=object)
            for name, fields in zip(names, zip(*rows, strict=True), strict=True)
        },
        origin,
    )
