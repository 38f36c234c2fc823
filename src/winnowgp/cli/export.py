"""`winnow export`: a model for machines without winnowgp."""

from pathlib import Path
from typing import Annotated

import typer

from winnowgp.cli.options import ModelFile, Quiet
from winnowgp.cli.output import checked_output


def export(
    model: ModelFile,
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", help="model.onnx for ONNX, model.py for a file that needs only numpy."
        ),
    ],
    quiet: Quiet = False,
) -> None:
    """Write the predictor, preprocessing included, as ONNX or as one numpy file."""
    checked_output(output, (".onnx", ".py"))
    from winnowgp.cli.loaded import loaded
    from winnowgp.estimators import export_numpy, export_onnx

    write = export_onnx if output.suffix.lower() == ".onnx" else export_numpy
    write(loaded(model), output)
    if not quiet:
        typer.echo(f"exported: {output}")
