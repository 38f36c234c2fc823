"""A whole table from a file: CSV (also gzipped) or Parquet, told apart by what is in it."""

from pathlib import Path

from winnowgp.data.column_blocks import column_blocks
from winnowgp.data.columns import Columns


def read_columns(path: Path, *, encoding: str = "utf-8") -> Columns:
    """Read a table whose first line names its columns. For one too large, see `column_blocks`.

    Args:
        encoding: of text; a byte-order mark overrides it.
    """
    return Columns(Columns.joined(list(column_blocks(path, encoding=encoding))).values)
