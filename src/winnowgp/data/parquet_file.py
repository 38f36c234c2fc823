"""A Parquet file, one row group after another; needs pyarrow."""

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, final

from winnowgp.errors import InputError, MissingExtraError

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
