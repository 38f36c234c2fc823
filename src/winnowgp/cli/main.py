"""The command `winnow`. Heavy imports wait inside the commands, so that `--help` is quick."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from winnowgp import __version__
from winnowgp.cli.output import checked_picture
from winnowgp.errors import WinnowError

app = typer.Typer(
    name="winnow",
    help="Gaussian processes that choose their own inducing points.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"winnow {__version__}")
        raise typer.Exit


@app.callback()
def winnow(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Gaussian processes that choose their own inducing points."""


@app.command()
def demo(
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Where to save the picture (.png, .pdf, .svg).")
    ] = Path("winnow-demo.png"),
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar and no table.")] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Where randomness starts.")] = 0,
) -> None:
    """Choose inducing points for a small curve, and draw before, midway and after."""
    checked_picture(output)
    from winnowgp.cli.demo import run_demo

    run_demo(output, quiet=quiet, seed=seed)


def main() -> None:
    """Entry point: a mistake of the user's ends with one line and exit code 2."""
    try:
        app()
    except (WinnowError, OSError) as error:
        typer.echo(f"winnow: {error}", err=True)
        sys.exit(2)
