"""`winnow info`, `winnow frontier` and `winnow data`."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from winnowgp.cli.options import PICTURES, Json, ModelFile, Quiet, checked_output

if TYPE_CHECKING:
    from winnowgp.report.summary import Choice


def info(model: ModelFile, json: Json = False) -> None:
    """Show what a model predicts, from which inputs, how well, and its settings."""
    from winnowgp.cli.options import load_table_model
    from winnowgp.cli.summary import as_json, print_summary

    summary = load_table_model(model).summary
    if json:
        typer.echo(as_json(summary, file=str(model)))
        return
    print_summary(summary)
    for name, value in summary["settings"].items():
        typer.echo(f"{name}: {value}")


def frontier(
    model: ModelFile,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Where to save a plot (.png, .pdf, .svg)."),
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Show the best ELBO found for each number of inducing points."""
    if output is not None:
        checked_output(output, PICTURES)
    from winnowgp.cli.options import load_table_model

    choice = load_table_model(model).summary["choice"]
    bounds = choice["frontier"] or []
    if output is not None:
        from winnowgp.cli.plot import frontier_plot
        from winnowgp.plots import save_figure

        save_figure(frontier_plot(choice), output)
    if json:
        import json as to_json

        rows = [{"inducing_points": M, "elbo_nats": bound} for M, bound in enumerate(bounds)]
        typer.echo(to_json.dumps({"selected": choice["points"], "frontier": rows}))
    elif not quiet:
        _print(choice, bounds)
        if output is not None:
            typer.echo(f"plot: {output}")


def _print(choice: "Choice", bounds: list[float]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Best ELBO among {choice['candidates']} candidates", title_justify="left")
    for name in ("inducing points", "ELBO (nats)", "gap per observation (nats)", ""):
        table.add_column(name, justify="right" if name else "left")
    best = max(bounds)
    for M in _sizes(len(bounds) - 1, choice["points"]):
        selected = choice["points"] == M
        table.add_row(
            str(M),
            f"{bounds[M]:.2f}",
            f"{(best - bounds[M]) / choice['rows']:.4f}",
            "<- selected" if selected else "",
            style="bold" if selected else None,
        )
    Console().print(table)


def _sizes(K: int, M: int) -> list[int]:
    """Return 0, powers of two, the neighbourhood of M, and K.

    >>> _sizes(30, 12)
    [0, 1, 2, 4, 8, 10, 11, 12, 13, 14, 16, 30]
    """
    doubling = {2**i for i in range(20) if 2**i <= K}
    near = {m for m in range(M - 2, M + 3) if 0 <= m <= K}
    return sorted({0, K} | doubling | near)


def data(
    name: Annotated[
        str | None, typer.Argument(help="A data set to copy; all are listed by default.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Where to copy it; ./NAME.csv.gz by default."),
    ] = None,
    json: Json = False,
) -> None:
    """List the paper's data sets, or copy one after checking its contents.

    The command searches $WINNOWGP_DATA and winnowgp's cache folder, and downloads nothing. The list
    shows where each data set can be obtained.
    """
    from winnowgp.data.catalogue import ORIGINS, find_table, load_table

    if name is not None:
        destination = checked_output(output or Path(f"{name}.csv.gz"), (".csv.gz",))
        table = load_table(name)
        from winnowgp.io.format import atomic_write

        with atomic_write(destination) as part:
            shutil.copyfile(find_table(name), part)
        typer.echo(f"{len(table.values)} rows of {len(table.columns)} columns: {destination}")
        return
    rows = [
        {
            "name": known,
            "origin": origin,
            "file": str(path) if (path := _local_file(known)) else None,
        }
        for known, origin in ORIGINS.items()
    ]
    if json:
        import json as to_json

        typer.echo(to_json.dumps(rows))
        return
    for row in rows:
        typer.echo(f"{row['name']:<10} {row['file'] or 'not found locally'}")
        typer.echo(f"{'':<10} {row['origin']}")


def _local_file(name: str) -> Path | None:
    from winnowgp.data.catalogue import find_table
    from winnowgp.errors import DataNotFoundError

    try:
        return find_table(name)
    except DataNotFoundError:
        return None
