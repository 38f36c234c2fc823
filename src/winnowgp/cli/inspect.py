"""`winnow info`, `winnow frontier` and `winnow data`."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from winnowgp.cli.options import PICTURES, Json, ModelFile, Quiet, checked_output
from winnowgp.errors import InputError

if TYPE_CHECKING:
    from winnowgp.report.summary import Choice


def info(model: ModelFile, json: Json = False) -> None:
    """Show what a model predicts, from which inputs, how well, and its settings."""
    from winnowgp.cli.options import load_summary
    from winnowgp.cli.summary import as_json, print_summary

    summary = load_summary(model)
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
    """Show the best ELBO known for each number of inducing points, and of the full GP."""
    if output is not None:
        checked_output(output, PICTURES)
    from winnowgp.cli.options import load_summary

    choice = load_summary(model)["choice"]
    if output is not None:
        from winnowgp.cli.plot import frontier_plot
        from winnowgp.plots.style import save_figure

        save_figure(frontier_plot(choice), output)
    if json:
        import json as to_json

        typer.echo(to_json.dumps(_as_json(choice)))
    elif not quiet:
        _print(choice)
        if output is not None:
            typer.echo(f"plot: {output}")


def _as_json(choice: "Choice") -> dict[str, Any]:
    """Return the frontier; sizes without a known model are left out."""
    densities = choice["log_densities"]
    rows = [
        {
            "inducing_points": M,
            "elbo_nats": elbo,
            "held_out_nats_per_observation": None if densities is None else densities[M],
        }
        for M, elbo in enumerate(choice["frontier"] or [])
        if elbo is not None
    ]
    exact = None
    if choice["exact_evidence"] is not None:
        exact = {
            "inducing_points": choice["rows"],
            "log_evidence_nats": choice["exact_evidence"],
            "held_out_nats_per_observation": choice["exact_log_density"],
        }
    return {
        "selected": choice["points"],
        "available": choice["sizes"],
        "frontier": rows,
        "full_gp": exact,
    }


def _print(choice: "Choice") -> None:
    from rich.console import Console
    from rich.table import Table

    elbos, densities = choice["frontier"] or [], choice["log_densities"]
    exact, N = choice["exact_evidence"], choice["rows"]
    table = Table(
        title="Best ELBO known with at most as many inducing points", title_justify="left"
    )
    for name in ("inducing points", "ELBO (nats)", "gap", "held-out", ""):
        table.add_column(name, justify="right" if name else "left")
    known = {M: elbo for M, elbo in enumerate(elbos) if elbo is not None}
    best = max(v for v in (*known.values(), exact) if v is not None)
    shown = {*_sizes(len(elbos) - 1, choice["points"]), *choice["sizes"]}
    for M in sorted(shown & known.keys()):
        selected = choice["points"] == M
        note = "<- selected" if selected else "available" if M in choice["sizes"] else ""
        density = None if densities is None else densities[M]
        table.add_row(
            str(M),
            f"{known[M]:.2f}",
            f"{(best - known[M]) / N:.4f}",
            _number(density),
            note,
            style="bold" if selected else None,
        )
    if exact is not None:
        row = (f"{exact:.2f}", f"{(best - exact) / N:.4f}", _number(choice["exact_log_density"]))
        table.add_row(str(N), *row, "full GP")
    console = Console()
    console.print(table)
    console.print("gap and held-out log density: nats per observation, of standardised targets")
    if exact is not None:
        gain = max(exact - choice["bound"], 0.0) / N
        console.print(
            f"the full GP would gain {gain:.4f} nats per observation; each of its predictions "
            f"would use all {N} rows"
        )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


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
    """List data sets, write a made one, or copy one of the paper's after checking its contents.

    Made data sets are part of winnowgp. Those of the paper are searched in $WINNOWGP_DATA and
    winnowgp's cache folder; nothing is downloaded. The list shows where each can be obtained.
    """
    from winnowgp.data.catalogue import ORIGINS
    from winnowgp.data.examples import EXAMPLES

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
    """Write a made table as CSV, and return a line about it."""
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
