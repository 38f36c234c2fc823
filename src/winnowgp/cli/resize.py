"""`winnow resize`: a smaller model from what a fit kept."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from winnowgp.cli.options import Json, ModelFile, Quiet, checked_output

if TYPE_CHECKING:
    from winnowgp.estimators import TabularModel


def resize(
    model: ModelFile,
    points: Annotated[
        int | None,
        typer.Option(help="Number of inducing points; without it, the sizes are listed."),
    ] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Where to save the smaller model.")
    ] = Path("resized.winnow"),
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Save a model with fewer inducing points, which the fit has optimised already.

    No rows are needed. Without `--points` the command lists the sizes in the file and writes
    nothing.
    """
    from winnowgp.cli.options import load_table_model

    if points is None:
        _list(load_table_model(model), quiet=quiet, json=json)
        return
    checked_output(output)
    fitted = load_table_model(model)
    command = shlex.join(["winnow", "resize", model.name, "--points", str(points)])
    before = fitted.summary["settings"].get("command")
    settings = {"command": command if before is None else f"{before} && {command}"}
    smaller = fitted.resized(points, settings=settings)
    smaller.save(output)
    from winnowgp.cli.summary import as_json, print_summary

    if json:
        typer.echo(as_json(smaller.summary, file=str(output)))
    elif not quiet:
        print_summary(smaller.summary)
        typer.echo(f"model: {output}")


def _list(model: "TabularModel", *, quiet: bool, json: bool) -> None:
    """Print the sizes of the models in a file."""
    estimator = model.estimator
    models = [estimator.resized(M) for M in estimator.available_sizes_]
    if json:
        import json as to_json

        rows = [
            {
                "inducing_points": each.n_inducing_,
                "elbo_nats": each.elbo_,
                "elbo_gap_nats_per_observation": each.elbo_gap_,
            }
            for each in models
        ]
        typer.echo(to_json.dumps({"available": rows}))
    elif not quiet:
        from rich.console import Console
        from rich.table import Table

        table = Table(title="Models in the file", title_justify="left")
        for name in ("inducing points", "ELBO (nats)", "gap per observation (nats)"):
            table.add_column(name, justify="right")
        for each in models:
            table.add_row(str(each.n_inducing_), f"{each.elbo_:.2f}", f"{each.elbo_gap_:.4f}")
        Console().print(table)
