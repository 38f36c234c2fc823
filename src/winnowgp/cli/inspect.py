"""`winnow info`, `winnow frontier` and `winnow data`."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from winnowgp.cli.options import PICTURES, Json, ModelFile, Quiet, checked_output

if TYPE_CHECKING:
    from winnowgp.report.summary import Choice


# `winnow info`: what a model file holds.


def info(model: ModelFile, json: Json = False) -> None:
    """Say what a model predicts, from what, how well, and how it was made."""
    from winnowgp.cli.options import loaded
    from winnowgp.cli.summary import as_json, print_summary

    summary = loaded(model).summary
    if json:
        typer.echo(as_json(summary, file=str(model)))
        return
    print_summary(summary)
    for name, value in summary["settings"].items():
        typer.echo(f"{name}: {value}")


# `winnow frontier`: what each number of points buys.


def frontier(
    model: ModelFile,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Where to save a picture (.png, .pdf, .svg)."),
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Show the best bound found for each number of inducing points."""
    if output is not None:
        checked_output(output, PICTURES)
    from winnowgp.cli.options import loaded

    choice = loaded(model).summary["choice"]
    bounds = choice["frontier"] or []
    if output is not None:
        from winnowgp.cli.plot import frontier_picture
        from winnowgp.plots import save_figure

        save_figure(frontier_picture(choice), output)
    if json:
        import json as to_json

        rows = [{"points": M, "bound_nats": bound} for M, bound in enumerate(bounds)]
        typer.echo(to_json.dumps({"chosen": choice["points"], "frontier": rows}))
    elif not quiet:
        _print(choice, bounds)
        if output is not None:
            typer.echo(f"picture: {output}")


def _print(choice: "Choice", bounds: list[float]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"Best bound among the last {choice['candidates']} candidates", title_justify="left"
    )
    for name in ("points", "bound (nats)", "below the best, nats a row", ""):
        table.add_column(name, justify="right" if name else "left")
    best = max(bounds)
    for M in _sizes(len(bounds) - 1, choice["points"]):
        chosen = choice["points"] == M
        table.add_row(
            str(M),
            f"{bounds[M]:.2f}",
            f"{(best - bounds[M]) / choice['rows']:.4f}",
            "<- kept" if chosen else "",
            style="bold" if chosen else None,
        )
    Console().print(table)


def _sizes(K: int, M: int) -> list[int]:
    """Round numbers up to K, and M with its neighbourhood.

    >>> _sizes(30, 12)
    [0, 1, 2, 4, 8, 10, 11, 12, 13, 14, 16, 30]
    """
    doubling = {2**i for i in range(20) if 2**i <= K}
    near = {m for m in range(M - 2, M + 3) if 0 <= m <= K}
    return sorted({0, K} | doubling | near)


# `winnow data`: the paper's data sets.


def data(
    name: Annotated[
        str | None, typer.Argument(help="A data set to fetch; all are listed if not said.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Where to put it; NAME.csv.gz here if not said."),
    ] = None,
    json: Json = False,
) -> None:
    """List the paper's data sets, or put one, checked, where you say.

    They are looked for in $WINNOWGP_DATA and in the cache of winnowgp; see the list for where each
    comes from.
    """
    from winnowgp.data.catalogue import ORIGINS, find_table, load_table

    if name is not None:
        where = checked_output(output or Path(f"{name}.csv.gz"), (".csv.gz",))
        table = load_table(name)
        from winnowgp.io import written_whole

        with written_whole(where) as part:
            shutil.copyfile(find_table(name), part)
        typer.echo(f"{len(table.values)} rows of {len(table.columns)} columns: {where}")
        return
    rows = [
        {"name": known, "origin": origin, "file": str(found) if (found := _here(known)) else None}
        for known, origin in ORIGINS.items()
    ]
    if json:
        import json as to_json

        typer.echo(to_json.dumps(rows))
        return
    for row in rows:
        typer.echo(f"{row['name']:<10} {row['file'] or 'not on this machine'}")
        typer.echo(f"{'':<10} {row['origin']}")


def _here(name: str) -> Path | None:
    from winnowgp.data.catalogue import find_table
    from winnowgp.errors import DataNotFoundError

    try:
        return find_table(name)
    except DataNotFoundError:
        return None
