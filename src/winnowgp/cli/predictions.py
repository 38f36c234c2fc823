"""Writers of predictions as CSV, JSON or Parquet, in blocks of rows."""

import csv
import gzip
import io
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any, TypeAlias

from winnowgp.errors import MissingExtraError

Write: TypeAlias = Callable[[Mapping[str, Any]], None]

"""Writes named columns of the next rows; the names are the same in every call."""

FORMATS = (".csv", ".csv.gz", ".parquet")
# Rows per Parquet row group, held in memory until it is written.
_ROW_GROUP = 131_072
# Characters that are buffered in memory; more go to a temporary file.
_BUFFER = 2**23


@contextmanager
def written_predictions(output: Path) -> Iterator[Write]:
    """Write a file in one of the `FORMATS`, atomically."""
    from winnowgp.io.format import atomic_write

    with atomic_write(output) as part:
        if output.name.lower().endswith(".parquet"):
            with _parquet_rows(part) as write:
                yield write
        else:
            with _text(part, zipped=output.suffix.lower() == ".gz") as file:
                yield csv_rows(file)


@contextmanager
def printed_predictions(stream: Any, rows: Callable[[Any], Write]) -> Iterator[Write]:
    """Print `csv_rows` or `json_rows` once all are computed, and nothing after an error.

    They are buffered, so that the next program in a pipe never acts on half a table.
    """
    with SpooledTemporaryFile(_BUFFER, "w+", encoding="utf-8", newline="") as buffer:
        yield rows(buffer)
        buffer.seek(0)
        shutil.copyfileobj(buffer, stream)


def csv_rows(file: Any) -> Write:
    """Return a writer of CSV lines with a header."""
    writer = csv.writer(file, lineterminator="\n")
    has_header = False

    def write(columns: Mapping[str, Any]) -> None:
        nonlocal has_header
        if not has_header:
            writer.writerow(columns)
            has_header = True
        writer.writerows(zip(*[column.tolist() for column in columns.values()], strict=True))

    return write


def json_rows(file: Any) -> Write:
    """Return a writer of one JSON object per line."""
    import json

    def write(columns: Mapping[str, Any]) -> None:
        for row in zip(*[column.tolist() for column in columns.values()], strict=True):
            file.write(json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False) + "\n")

    return write


@contextmanager
def _text(part: Path, *, zipped: bool) -> Iterator[io.TextIOWrapper]:
    with part.open("wb") as file:
        # No name in the header: it would be that of the temporary file.
        content = gzip.GzipFile("", "wb", 6, file) if zipped else file
        with io.TextIOWrapper(content, encoding="utf-8", newline="") as text:
            yield text


@contextmanager
def _parquet_rows(part: Path) -> Iterator[Write]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise MissingExtraError(
            "Parquet needs pyarrow: pip install 'winnowgp[parquet]'; or write a .csv."
        ) from None
    writer: Any = None
    batches: list[Any] = []

    def flush() -> None:
        if batches:
            writer.write_table(pyarrow.Table.from_batches(batches))
            batches.clear()

    def write(columns: Mapping[str, Any]) -> None:
        nonlocal writer
        types = {
            name: pyarrow.float64() if column.dtype.kind == "f" else pyarrow.string()
            for name, column in columns.items()
        }
        # Explicit: a string column that begins with missing values would have no type.
        schema = pyarrow.schema(list(types.items()))
        if writer is None:
            writer = parquet.ParquetWriter(part, schema)
        arrays = [pyarrow.array(columns[name].tolist(), type_) for name, type_ in types.items()]
        batches.append(pyarrow.record_batch(arrays, schema=schema))
        if sum(batch.num_rows for batch in batches) >= _ROW_GROUP:
            flush()

    try:
        yield write
        flush()
    finally:
        if writer is not None:
            writer.close()
