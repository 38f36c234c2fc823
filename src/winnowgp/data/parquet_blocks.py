"""Parquet, some rows at a time; needs pyarrow."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from winnowgp.data.columns import Column, Columns, word_or_missing
from winnowgp.data.distinct_names import distinct_names
from winnowgp.data.origin import Origin
from winnowgp.data.parquet_file import ParquetFile
from winnowgp.errors import InputError


def parquet_blocks(path: Path, *, size: int) -> Iterator[Columns]:
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
                yield Columns(
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
