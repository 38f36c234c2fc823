"""`winnow predict`: predict the rows of a new table, and write CSV, JSON or Parquet."""

import csv
import gzip
import io
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from winnowgp.cli.options import Device, Encoding, ModelFile, Quiet, checked_output
from winnowgp.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from winnowgp.data import DataTable
    from winnowgp.tabular import TabularModel
    from winnowgp.tabular.outputs import MultiOutputTable


def predict(
    model: ModelFile,
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA",
            help="CSV, CSV.gz, Excel or Parquet; - for a CSV from standard input.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Where to save predictions (.csv, .csv.gz, .parquet); printed as CSV by default.",
        ),
    ] = None,
    level: Annotated[float, typer.Option(help="Coverage of the prediction interval.")] = 0.95,
    quantiles: Annotated[
        str,
        typer.Option(
            help="Probabilities of further columns, such as 0.05,0.5,0.95: q0.05, q0.5 and q0.95."
        ),
    ] = "",
    encoding: Encoding = "utf-8",
    device: Device = "cpu",
    quiet: Quiet = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print predictions as JSON, one object per row.")
    ] = False,
) -> None:
    """Predict the target for every row of a table.

    Regression gives mean, standard deviation, a prediction interval and the requested quantiles;
    classification gives the most probable class and the probability of each. Columns of several
    targets begin with the name of the target. The id column of the fit is copied. The table may
    have any size: it is read, predicted and written in blocks of rows.
    """
    if output is not None:
        checked_output(output, FORMATS)
    wanted = _probabilities(quantiles)
    from winnowgp.cli.options import load_predictor
    from winnowgp.data import read_blocks

    fitted = load_predictor(model)
    missing: set[str] = set()
    data = Path("/dev/stdin") if data == Path("-") else data
    blocks, count = _noting_missing(read_blocks(data, encoding=encoding), fitted, missing), 0
    with ExitStack() as stack:
        # Closed in reverse order: the file is complete before a line is printed.
        writers = []
        if json or output is None:
            rows = json_rows if json else csv_rows
            writers.append(stack.enter_context(printed_predictions(sys.stdout, rows)))
        if output is not None:
            writers.append(stack.enter_context(written_predictions(output)))
        predicted = fitted.predict_blocks(blocks, level=level, quantiles=wanted, device=device)
        for predictions in predicted:
            for write in writers:
                write(predictions)
            count += len(next(iter(predictions.values())))
        if fitted.id_column in missing and not quiet:
            typer.echo(
                f"note: the id column {fitted.id_column!r} is missing; predictions are in the "
                "order of the rows.",
                err=True,
            )
        if fitted.noise_column in missing and not quiet:
            typer.echo(
                f"note: the noise column {fitted.noise_column!r} is missing; sd and intervals have "
                "the learnt noise only.",
                err=True,
            )
    if output is not None and not json and not quiet:
        typer.echo(f"{count} predictions: {output}")


def _noting_missing(
    blocks: "Iterable[DataTable]", model: "TabularModel | MultiOutputTable", missing: set[str]
) -> "Iterator[DataTable]":
    """Yield the blocks, and add the names of an id or noise column that they lack to a set."""
    for block in blocks:
        names = (model.id_column, model.noise_column)
        missing.update(name for name in names if name is not None and name not in block.values)
        yield block


def _probabilities(text: str) -> tuple[float, ...]:
    """Return probabilities that are separated by commas."""
    try:
        probabilities = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        probabilities = (0.0,)
    if not all(0 < p < 1 for p in probabilities):
        raise InputError(
            "`--quantiles` must be probabilities between 0 and 1, separated by commas, such as "
            f"0.05,0.5,0.95; got {text!r}."
        )
    return probabilities


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

    They are buffered, so that the next program in a pipe never reads an incomplete table.
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
