"""`winnow info`: what a model file holds."""

import typer

from winnowgp.cli.options import Json, ModelFile


def info(model: ModelFile, json: Json = False) -> None:
    """Say what a model predicts, from what, how well, and how it was made."""
    from winnowgp.cli.loaded import loaded
    from winnowgp.cli.summary import as_json, print_summary

    findings = loaded(model).findings
    if json:
        typer.echo(as_json(findings, file=str(model)))
        return
    print_summary(findings)
    for name, value in findings["settings"].items():
        typer.echo(f"{name}: {value}")
