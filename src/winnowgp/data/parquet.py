"""Parquet files as sources of numbers and as tables, read in batches of rows; needs pyarrow."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from winnowgp.data.dataset import Dataset, SourceInfo
from winnowgp.data.out_of_core import StreamedSource
from winnowgp.data.tables import Column, DataTable, Origin, distinct_names, parse_string
from winnowgp.errors import InputError, MissingExtraError

# Largest number of rows, and of numbers, that a source decodes at once.
_BATCH, _NUMBERS = 8192, 2**23
# Bytes of each column that are read at a time; pyarrow would read the whole row group.
_BUFFER = 2**20


@final
class ParquetSource(StreamedSource):
    """The numeric columns of a Parquet file, or of all files below a folder, as one source.

    Files are read in the order of their paths. Only their footers are read at first; a pass reads
    the selected columns, a batch of rows at a time. Integers, decimals and booleans are converted
    to floating point. Values in the names of folders (`year=2024/`) are not columns.

    Args:
        path: a file or a folder, in which names that begin with a dot or underscore are ignored.
        targets: name or names of the target columns.
        inputs: name or names of the input columns; all other columns if None.
        dtype: dtype of the tensors that rows are converted to.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        targets: str | Sequence[str],
        inputs: str | Sequence[str] | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        paths = _paths(Path(path))
        self.targets = _names(targets)
        if inputs is None:
            with ParquetFile(paths[0]) as file:
                inputs = [name for name in file.schema.names if name not in self.targets]
        self.inputs = _names(inputs)
        _check_selection(self.inputs, self.targets)
        self._files: list[_FileRows] = []
        N = 0
        for each in paths:
            stamp = _stamp(each)
            with ParquetFile(each) as file:
                _check_columns(file, [*self.inputs, *self.targets])
                if file.N:
                    self._files.append(_FileRows(each, N, N + file.N, stamp))
                    N += file.N
        if not N:
            raise InputError(f"{path} has no rows; a fit needs at least one.")
        self._info = SourceInfo(N, len(self.inputs), len(self.targets), dtype, self.inputs)

    @property
    def info(self) -> SourceInfo:
        return self._info

    def between(self, start: int, stop: int) -> Iterator[Dataset]:
        columns = [*self.inputs, *self.targets]
        size = max(1, min(_BATCH, _NUMBERS // len(columns)))
        for rows in self._files:
            if rows.stop <= start or stop <= rows.start:
                continue
            if _stamp(rows.path) != rows.stamp:
                raise InputError(
                    f"{rows.path} has changed since it was opened; every pass must read the same "
                    "rows. Open it again, and do not change it during the fit."
                )
            with ParquetFile(rows.path) as file:
                first, last = start - rows.start, stop - rows.start
                for batch, origin in file.batches(size, start=first, stop=last, columns=columns):
                    yield self._dataset(batch, rows.path, origin)

    def _dataset(self, batch: Any, path: Path, origin: Origin) -> Dataset:
        X, Y = (
            torch.from_numpy(
                np.stack([_numbers(batch, name, path, origin) for name in names], axis=1)
            ).to(self.dtype)
            for names in (self.inputs, self.targets)
        )
        if not bool(torch.isfinite(X).all() and torch.isfinite(Y).all()):
            raise InputError(
                f"{path}: a number in or after {origin.describe(0)} is too large for {self.dtype}; "
                "use float64, or scale the column."
            )
        return Dataset(X, Y)


def parquet_blocks(path: Path, *, size: int) -> Iterator[DataTable]:
    """Yield the rows of a file in blocks of at most `size` rows, each within one row group."""
    with ParquetFile(path) as file:
        names = distinct_names([str(name) for name in file.schema.names], path)
        if not names or not file.N:
            raise InputError(f"{path} has no rows or no columns; a table needs some.")
        for batch, origin in file.batches(size):
            columns = zip(names, batch.columns, strict=True)
            yield DataTable({name: _column(name, c, path) for name, c in columns}, origin)


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


@dataclass(frozen=True, slots=True)
class _FileRows:
    """A file of a source, and the range of its rows among those of all files."""

    path: Path
    start: int
    stop: int
    stamp: tuple[int, int]
    """Size in bytes and time of the last change, to notice a file that changes between passes."""


def _pyarrow_errors() -> tuple[type[Exception], ...]:
    import pyarrow

    return (pyarrow.ArrowException, OSError, ValueError)


def _reason(error: Exception) -> str:
    lines = str(error).splitlines()
    return (lines[0] if lines else type(error).__name__)[:200].rstrip(".")


def _names(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error
    return status.st_size, status.st_mtime_ns


def _paths(path: Path) -> list[Path]:
    if not path.is_dir():
        if not path.exists():
            raise InputError(f"{path} cannot be read: there is no such file or folder.")
        return [path]
    paths = sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and not any(n[0] in "._" for n in file.relative_to(path).parts)
    )
    if not paths:
        raise InputError(f"{path} is a folder without files; give one that holds Parquet files.")
    return paths


def _check_selection(inputs: tuple[str, ...], targets: tuple[str, ...]) -> None:
    if not inputs or not targets:
        raise InputError(
            f"`inputs` and `targets` must each name a column; got {list(inputs)} and "
            f"{list(targets)}."
        )
    repeated = [name for name, count in Counter([*inputs, *targets]).items() if count > 1]
    if repeated:
        raise InputError(
            f"a column must be named once in `inputs` and `targets`; got {repeated[0]!r} twice."
        )


def _check_columns(file: ParquetFile, names: list[str]) -> None:
    from pyarrow import types

    schema = file.schema
    for name in names:
        indices = schema.get_all_field_indices(name)
        if len(indices) != 1:
            number = "no column" if not indices else "more than one column"
            raise InputError(
                f"{file.path} has {number} {name!r}; its columns are "
                f"{', '.join(map(repr, schema.names[:12]))}."
            )
        kind = schema.field(indices[0]).type
        if not any(
            test(kind)
            for test in (types.is_floating, types.is_integer, types.is_decimal, types.is_boolean)
        ):
            raise InputError(
                f"{file.path}: column {name!r} has type {kind}; a source needs numeric columns. "
                "Leave it out of `inputs`, or encode it first."
            )


def _numbers(batch: Any, name: str, path: Path, origin: Origin) -> NDArray[np.float64]:
    """Convert a numeric column to float64, and raise an error if a value is not finite."""
    import pyarrow

    column = batch.column(name)
    # Nulls become NaN.
    values = column.cast(pyarrow.float64(), safe=False).to_numpy(zero_copy_only=False)
    bad = ~np.isfinite(values)
    if bad.any():
        row = int(bad.argmax())
        value = column[row].as_py()
        raise InputError(
            f"{path}: column {name!r} has {'no value' if value is None else value} in "
            f"{origin.describe(row)}; numbers must be finite. Correct that row, or leave it out."
        )
    return values


def _column(name: str, column: Any, path: Path) -> Column:
    """Convert a column of any type to that of a `DataTable`."""
    import pyarrow

    kind = column.type
    if pyarrow.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = column.type
    if pyarrow.types.is_nested(kind) or pyarrow.types.is_binary(kind):
        raise InputError(
            f"{path}: column {name!r} has unsupported type {kind}; expected numbers, strings or "
            "dates. Convert it, or remove it from the file."
        )
    if pyarrow.types.is_null(kind):
        return np.full(len(column), None, dtype=object)
    if pyarrow.types.is_floating(kind):
        # Nulls become NaN; a copy, as pyarrow's own memory is read-only and soon reused.
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
    return np.array([None if v is None else parse_string(str(v)) for v in values], dtype=object)


def _exact(integers: Any) -> bool:
    """Return whether every integer of a column is exact in float64."""
    from pyarrow.compute import call_function

    extremes = call_function("min_max", [integers]).as_py().values()
    return all(abs(value) < 2**53 for value in extremes if value is not None)


def _iso(value: Any) -> str:
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
