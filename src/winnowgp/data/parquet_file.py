"""An open Parquet file, and its rows as blocks of a table; needs pyarrow."""

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, final

from winnowgp.data.frames import arrow_column
from winnowgp.data.tables import DataTable, Origin, distinct_names
from winnowgp.errors import InputError, MissingExtraError

# Bytes of each column that are read at a time; pyarrow would read the whole row group.
_BUFFER = 2**20


def parquet_blocks(path: Path, *, size: int) -> Iterator[DataTable]:
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
