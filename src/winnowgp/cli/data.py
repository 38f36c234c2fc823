"""`winnow data`: the paper's data sets."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from winnowgp.cli.options import Json
from winnowgp.cli.output import checked_output


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
