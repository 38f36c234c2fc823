"""`winnow report`: one page about a model."""

from pathlib import Path
from typing import Annotated

import typer

from winnowgp.cli.options import ModelFile, Quiet
from winnowgp.cli.output import checked_output


def report(
    model: ModelFile,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to save the page.")] = Path(
        "report.html"
    ),
    quiet: Quiet = False,
) -> None:
    """Write a self-contained HTML page: data, choice, quality, effects, settings."""
    checked_output(output, (".html", ".htm"))
    from winnowgp.cli.loaded import loaded
    from winnowgp.report import save_report

    save_report(loaded(model).findings, output)
    if not quiet:
        typer.echo(f"report: {output}")
