"""`winnow predict`: predict the rows of a new table."""

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
            help="Where to save predictions (.csv, .csv.gz, .parquet); printed as CSV by default.",
        ),
    ] = None,
    level: Annotated[float, typer.Option(help="Coverage of the prediction interval.")] = 0.95,
    encoding: Encoding = "utf-8",
    device: Device = "cpu",
    quiet: Quiet = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print predictions as JSON, one object per row.")
    ] = False,
) -> None:
    """Predict the target for every row of a table.

    Regression gives mean, standard deviation and a prediction interval; classification gives the
    most probable class and the probability of each. The id column of the fit is copied. The table
    may have any size: it is read, predicted and written in blocks of rows.
    """
    if output is not None:
        checked_output(output, FORMATS)
    from winnowgp.cli.options import load_table_model
    from winnowgp.cli.summary import TableNotes
    from winnowgp.data import read_blocks

    fitted = load_table_model(model)
    notes, count = TableNotes(fitted), 0
    blocks = notes.observe(read_blocks(data, encoding=encoding))
    with ExitStack() as stack:
        # Closed in reverse order: the file is complete before a line is printed.
        writers = []
        if json or output is None:
            rows = json_rows if json else csv_rows
            writers.append(stack.enter_context(printed_predictions(sys.stdout, rows)))
        if output is not None:
            writers.append(stack.enter_context(written_predictions(output)))
        for predictions in fitted.predict_blocks(blocks, level=level, device=device):
            for write in writers:
                write(predictions)
            count += len(next(iter(predictions.values())))
        for line in [] if quiet else notes.lines():
            typer.echo(f"note: {line}", err=True)
    if output is not None and not json and not quiet:
        typer.echo(f"{count} predictions: {output}")
