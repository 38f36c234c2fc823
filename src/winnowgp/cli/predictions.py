"""Predictions on their way out, some rows at a time."""

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

"""Takes named columns of the next rows; every time the same names."""

FORMATS = (".csv", ".csv.gz", ".parquet")
# Rows of a row group: enough for a reader to skip by, few enough to be held.
_ROW_GROUP = 131_072
# Letters to be printed that wait in memory; more wait in a temporary file.
_WAITING = 2**23


@contextmanager
def written_predictions(output: Path) -> Iterator[Write]:
    """Write a file of one of the `FORMATS`, which is there at the end, whole, or not at all."""
    from winnowgp.io.format import atomic_write

    with atomic_write(output) as part:
        if output.name.lower().endswith(".parquet"):
            with _parquet_rows(part) as write:
                yield write
        else:
            with _text(part, zipped=output.suffix.lower() == ".gz") as file:
                yield csv_rows(file)


@contextmanager
def printed_predictions(screen: Any, rows: Callable[[Any], Write]) -> Iterator[Write]:
    """Print `csv_rows` or `json_rows` at the end, all of them; nothing if anything fails before.

    They wait in a temporary file: whoever reads on never acts on half a table.
    """
    with SpooledTemporaryFile(_WAITING, "w+", encoding="utf-8", newline="") as waiting:
        yield rows(waiting)
        waiting.seek(0)
        shutil.copyfileobj(waiting, screen)


def csv_rows(file: Any) -> Write:
    """Lines of CSV, the first of which names the columns."""
    writer = csv.writer(file, lineterminator="\n")
    named = False

    def write(found: Mapping[str, Any]) -> None:
        nonlocal named
        if not named:
            writer.writerow(found)
            named = True
        writer.writerows(zip(*[column.tolist() for column in found.values()], strict=True))

    return write


def json_rows(file: Any) -> Write:
    """One JSON object a line."""
    import json

    def write(found: Mapping[str, Any]) -> None:
        for row in zip(*[column.tolist() for column in found.values()], strict=True):
            file.write(json.dumps(dict(zip(found, row, strict=True)), ensure_ascii=False) + "\n")

    return write


@contextmanager
def _text(part: Path, *, zipped: bool) -> Iterator[io.TextIOWrapper]:
    with part.open("wb") as file:
        # Without a name: it would be that of the temporary file.
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
            "Parquet needs pyarrow: pip install 'winnowgp[parquet]'; or ask for a .csv."
        ) from None
    writer: Any = None
    held: list[Any] = []

    def flush() -> None:
        if held:
            writer.write_table(pyarrow.Table.from_batches(held))
            held.clear()

    def write(found: Mapping[str, Any]) -> None:
        nonlocal writer
        kinds = {
            name: pyarrow.float64() if column.dtype.kind == "f" else pyarrow.string()
            for name, column in found.items()
        }
        # From the first rows alone, a column of names that starts with holes would have no type.
        schema = pyarrow.schema(list(kinds.items()))
        if writer is None:
            writer = parquet.ParquetWriter(part, schema)
        arrays = [pyarrow.array(found[name].tolist(), kind) for name, kind in kinds.items()]
        held.append(pyarrow.record_batch(arrays, schema=schema))
        if sum(batch.num_rows for batch in held) >= _ROW_GROUP:
            flush()

    try:
        yield write
        flush()
    finally:
        if writer is not None:
            writer.close()
