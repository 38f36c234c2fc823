"""`winnow demo`, the paper's first figure and a short table, and `winnow data`, data to try."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from winnowgp.cli.options import PICTURES, Json, Quiet, Seed, checked_output
from winnowgp.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from winnowgp.experiments.illustration import IllustrationResult


def demo(
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Where to save the plot (.png, .pdf, .svg).")
    ] = Path("winnow-demo.png"),
    quiet: Quiet = False,
    seed: Seed = 0,
) -> None:
    """Select inducing points for a small data set, and plot before, during and after."""
    checked_output(output, PICTURES)
    import torch
    from rich.console import Console

    from winnowgp.cli.summary import PhaseBars
    from winnowgp.experiments.illustration import draw_panels, illustrate
    from winnowgp.plots.style import save_figure

    # The data set is small: a second thread would only wait for the first.
    torch.set_num_threads(1)
    console = Console(quiet=quiet)
    with PhaseBars(console, quiet=quiet) as bars:
        result = illustrate(callbacks=(bars.update,), seed=seed)
    save_figure(draw_panels(result.panels), output)
    console.print(_table(result))
    console.print(f"plot: {output}")


def _table(result: "IllustrationResult") -> "Table":
    from rich.table import Table

    table = Table(title="Inducing points selected by the model", title_justify="left")
    table.add_column("")
    table.add_column("inducing points", justify="right")
    table.add_column("ELBO (nats)", justify="right")
    before, fitted = result.panels.before, result.fit
    table.add_row("all candidates", str(len(before.points)), f"{result.full_bound:.2f}")
    table.add_row(
        "expected under q(Z)", f"{fitted.selection.inclusion.sum().item():.1f}", "", style="dim"
    )
    table.add_row("selected and refitted", str(fitted.posterior.M), f"{fitted.elbo:.2f}")
    return table


def data(
    name: Annotated[
        str | None, typer.Argument(help="A data set to write; all are listed by default.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Where to write it; ./NAME.csv, or ./NAME.csv.gz for the paper's, by default.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """List data sets, write a synthetic one, or copy and verify one of the paper's.

    Synthetic data sets are part of winnowgp. Those of the paper are searched in $WINNOWGP_DATA and
    winnowgp's cache folder; nothing is downloaded. The list shows where each can be obtained.
    """
    from winnowgp.data.catalogue import EXAMPLES, ORIGINS

    if name is not None:
        if name not in (known := (*EXAMPLES, *ORIGINS)):
            raise InputError(f"`NAME` must be one of {', '.join(known)}; got {name!r}.")
        written = _write_example if name in EXAMPLES else _copy_table
        typer.echo(written(name, output))
        return
    rows = [
        {"name": known, "origin": origin, "file": "part of winnowgp"}
        for known, origin in EXAMPLES.items()
    ]
    rows += [
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


def _write_example(name: str, output: Path | None) -> str:
    """Write a synthetic table as CSV, and return a line about it."""
    import csv

    from winnowgp.data import example_table
    from winnowgp.io.format import atomic_write

    destination = checked_output(output or Path(f"{name}.csv"), (".csv",))
    table = example_table(name)
    columns = [table.strings(column) for column in table.names]
    with atomic_write(destination) as part, part.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(table.names)
        writer.writerows(zip(*columns, strict=True))
    return f"{table.N} rows of {len(columns)} columns: {destination}"


def _copy_table(name: str, output: Path | None) -> str:
    """Copy a table of the paper, and return a line about it."""
    from winnowgp.data.catalogue import find_table, load_table
    from winnowgp.io.format import atomic_write

    destination = checked_output(output or Path(f"{name}.csv.gz"), (".csv.gz",))
    table = load_table(name)
    with atomic_write(destination) as part:
        shutil.copyfile(find_table(name), part)
    return f"{len(table.values)} rows of {len(table.columns)} columns: {destination}"


def _local_file(name: str) -> Path | None:
    from winnowgp.data.catalogue import find_table
    from winnowgp.errors import DataNotFoundError

    try:
        return find_table(name)
    except DataNotFoundError:
        return None
