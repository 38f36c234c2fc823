"""`winnow predict`: a model and a new table in, predictions out."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from winnowgp.cli.options import Device, Encoding, ModelFile, Quiet, checked_output
from winnowgp.cli.predictions import (
    FORMATS,
    csv_rows,
    json_rows,
    printed_predictions,
    written_predictions,
)


def predict(
    model: ModelFile,
    data: Annotated[Path, typer.Argument(help="CSV, CSV.gz or Parquet.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Where to save predictions (.csv, .csv.gz, .parquet); printed as CSV if not said.",
        ),
    ] = None,
    level: Annotated[float, typer.Option(help="Probability that an interval holds.")] = 0.95,
    encoding: Encoding = "utf-8",
    device: Device = "cpu",
    quiet: Quiet = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print predictions as JSON, one object a row.")
    ] = False,
) -> None:
    """Predict the target for every row of a table.

    Numbers: mean, sd, and the ends of an interval. Classes: the most probable one, and the
    probability of each. The column named with `--id` at fit time is repeated. The table may be of
    any size: it is read, predicted and written some rows at a time.
    """
    if output is not None:
        checked_output(output, FORMATS)
    from winnowgp.cli.options import loaded
    from winnowgp.cli.summary import TableNotes
    from winnowgp.data import read_blocks

    fitted = loaded(model)
    notes, count = TableNotes(fitted), 0
    blocks = notes.watched(read_blocks(data, encoding=encoding))
    with ExitStack() as open_checkpoint:
        # Left in the opposite order: the file is whole before a line is printed.
        writers = []
        if json or output is None:
            rows = json_rows if json else csv_rows
            writers.append(open_checkpoint.enter_context(printed_predictions(sys.stdout, rows)))
        if output is not None:
            writers.append(open_checkpoint.enter_context(written_predictions(output)))
        for found in fitted.predict_blocks(blocks, level=level, device=device):
            for write in writers:
                write(found)
            count += len(next(iter(found.values())))
        for line in [] if quiet else notes.lines():
            typer.echo(f"note: {line}", err=True)
    if output is not None and not json and not quiet:
        typer.echo(f"{count} predictions: {output}")
