"""`winnow predict`: a model and a new table in, predictions out."""

import csv
import gzip
import io
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from winnowgp.cli.options import Encoding, ModelFile, Quiet
from winnowgp.cli.output import checked_output

FORMATS = (".csv", ".csv.gz", ".parquet")


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
    quiet: Quiet = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print predictions as JSON, one object a row.")
    ] = False,
) -> None:
    """Predict the target for every row of a table.

    Numbers: mean, sd, and the ends of an interval. Classes: the most probable one, and the
    probability of each. The column named with `--id` at fit time is repeated.
    """
    if output is not None:
        checked_output(output, FORMATS)
    from winnowgp.cli.loaded import loaded
    from winnowgp.data import read_columns

    fitted = loaded(model)
    table = read_columns(data, encoding=encoding)
    found = fitted.predict(table, level=level)
    if not quiet:
        if fitted.id_column is not None and fitted.id_column not in table.values:
            typer.echo(
                f"note: there is no column {fitted.id_column!r} to name rows by; predictions are "
                "in the order of the rows.",
                err=True,
            )
        for name, words in fitted.encoder.unseen(table).items():
            shown = ", ".join(repr(word[:30]) for word in words[:5])
            typer.echo(
                f"note: {len(words)} words of column {name!r} were not in the training rows "
                f"({shown}); they count as no category.",
                err=True,
            )
    if output is not None:
        _save(found, output)
    if json:
        _print_json(found)
    elif output is None:
        _write_csv(found, sys.stdout)
    elif not quiet:
        typer.echo(f"{table.N} predictions: {output}")


def _save(found: dict[str, Any], output: Path) -> None:
    from winnowgp.io import written_whole

    with written_whole(output) as part:
        if output.name.lower().endswith(".parquet"):
            _write_parquet(found, part)
            return
        text = io.StringIO(newline="")
        _write_csv(found, text)
        content = text.getvalue().encode()
        part.write_bytes(gzip.compress(content) if output.suffix.lower() == ".gz" else content)


def _write_csv(found: dict[str, Any], file: Any) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(found)
    writer.writerows(zip(*[_plain(column) for column in found.values()], strict=True))


def _print_json(found: dict[str, Any]) -> None:
    import json

    for row in zip(*[_plain(column) for column in found.values()], strict=True):
        typer.echo(json.dumps(dict(zip(found, row, strict=True)), ensure_ascii=False))


def _write_parquet(found: dict[str, Any], path: Path) -> None:
    from winnowgp.errors import MissingExtraError

    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise MissingExtraError(
            "Parquet needs pyarrow: pip install 'winnowgp[parquet]'; or ask for a .csv."
        ) from None
    parquet.write_table(
        pyarrow.table({name: _plain(column) for name, column in found.items()}), path
    )


def _plain(column: Any) -> list[Any]:
    return column.tolist()
