"""A table from a file of any size, some rows at a time: CSV (also gzipped) or Parquet, told apart
by what is in it."""

from collections.abc import Iterator
from pathlib import Path

from winnowgp.data.columns import Columns
from winnowgp.data.csv_blocks import csv_blocks
from winnowgp.data.parquet_blocks import parquet_blocks
from winnowgp.errors import InputError

BLOCK = 16_384


def column_blocks(path: Path, *, size: int = BLOCK, encoding: str = "utf-8") -> Iterator[Columns]:
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
