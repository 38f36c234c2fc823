"""`winnow frontier`: what each number of points buys."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from winnowgp.cli.options import Json, ModelFile, Quiet
from winnowgp.cli.output import PICTURES, checked_output

if TYPE_CHECKING:
    from winnowgp.report.findings import Choice


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
    from winnowgp.cli.loaded import loaded

    choice = loaded(model).findings["choice"]
    bounds = choice["frontier"] or []
    if output is not None:
        from winnowgp.cli.plot import frontier_picture
        from winnowgp.plots import saved

        saved(frontier_picture(choice), output)
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
