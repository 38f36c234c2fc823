"""The command `winnow`. Heavy imports wait inside the commands, so that `--help` is quick."""

import os
import sys
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

from winnowgp import __version__
from winnowgp.cli.demo import demo
from winnowgp.cli.fit import fit
from winnowgp.cli.inspect import data, frontier, info
from winnowgp.cli.options import name
from winnowgp.cli.plot import export, plot, report
from winnowgp.cli.predict import predict
from winnowgp.cli.reproduce import reproduce
from winnowgp.errors import CheckpointWarning, NotShardedWarning, WinnowError

FINE, OURS, YOURS, INTERRUPTED, UNREAD = 0, 1, 2, 130, 141

NOTHING = "nothing was written."

app = typer.Typer(
    name="winnow",
    help="Gaussian processes that choose their own inducing points.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
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


def _interruptible(command: Callable[..., None]) -> Callable[..., None]:
    """Ctrl-C ends a command with a line, a reader that has seen enough without one; both with the
    code that shells expect."""

    @wraps(command)
    def wrapped(*args: Any, **words: Any) -> None:
        try:
            command(*args, **words)
            sys.stdout.flush()
        except BrokenPipeError:
            # Such as `| head -1`. What is still in the buffer must not be tried again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(UNREAD) from None
        except KeyboardInterrupt as interruption:
            goes_on = words.get("checkpoint") is not None
            usual = "the same command goes on from its checkpoint." if goes_on else NOTHING
            kept = str(interruption) or usual
            typer.echo(f"\nwinnow: interrupted; {kept}", err=True)
            raise typer.Exit(INTERRUPTED) from None

    return wrapped


for _command in (fit, predict, info, frontier, report, plot, export, demo, data, reproduce):
    app.command()(_interruptible(_command))


def run(words: list[str]) -> int:
    """What the words ask for, and an exit code: 0 fine, 2 a mistake in the input, 1 one of ours."""
    try:
        with warnings.catch_warnings():
            # Of libraries, about themselves; ours are messages of their own.
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", CheckpointWarning)
            warnings.simplefilter("always", NotShardedWarning)
            warnings.showwarning = _show
            app(words, prog_name="winnow")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FINE
    except (WinnowError, OSError) as error:
        typer.echo(f"{name()}: {_one_line(error)}", err=True)
        return YOURS
    except Exception as error:
        if os.environ.get("WINNOW_TRACEBACK"):
            raise
        typer.echo(
            f"{name()}: a mistake of ours ({type(error).__name__}: {_one_line(error)}); please "
            "report it. WINNOW_TRACEBACK=1 shows where.",
            err=True,
        )
        return OURS
    return FINE


def _show(message: Warning | str, *_: object) -> None:
    """What a user should know, on a line of its own."""
    typer.echo(f"{name()}: {message}", err=True)


def _one_line(error: BaseException) -> str:
    """However a library wrapped its message, and what was noted about it since."""
    said = " ".join([str(error), *getattr(error, "__notes__", [])])
    return " ".join(said.split()) or type(error).__name__


def main() -> None:
    """Entry point."""
    sys.exit(run(sys.argv[1:]))
