"""Parquet files with chosen, and damaged, row groups."""

from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet


def write_row_groups(path: Path, columns: dict[str, Any], sizes: list[int]) -> Path:
    """Write the columns in row groups of these sizes."""
    whole = pyarrow.table(columns)
    with parquet.ParquetWriter(path, whole.schema) as writer:
        start = 0
        for size in sizes:
            writer.write_table(whole.slice(start, size))
            start += size
    return path


def spoil(path: Path, *, group: int, column: int) -> None:
    """Overwrite one column of one row group with invalid bytes."""
    from pyarrow import parquet

    chunk = parquet.ParquetFile(path).metadata.row_group(group).column(column)
    content = bytearray(path.read_bytes())
    size, start = chunk.total_compressed_size, chunk.dictionary_page_offset
    content[start : start + size] = b"\xff" * size
    path.write_bytes(bytes(content))
