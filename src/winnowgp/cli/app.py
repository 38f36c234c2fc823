"""The command `winnow` and its exit codes.

Commands import PyTorch when they run, so that `winnow --help` is quick.
"""

import os
import sys
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

from winnowgp import __version__
from winnowgp.cli.evaluate import compare, evaluate
from winnowgp.cli.experiments import data, demo, reproduce
from winnowgp.cli.fit import fit
from winnowgp.cli.inspect import frontier, info, resize
from winnowgp.cli.options import process_name, with_options
from winnowgp.cli.plot import export, plot, report
from winnowgp.cli.predict import predict
from winnowgp.cli.update import update
from winnowgp.errors import (
    CheckpointWarning,
    FitWarning,
    MissingGlyphWarning,
    NotShardedWarning,
    RowIndexWarning,
    WinnowError,
)

_OWN_WARNINGS = (
    CheckpointWarning,
    FitWarning,
    MissingGlyphWarning,
    NotShardedWarning,
    RowIndexWarning,
)
SUCCESS, INTERNAL_ERROR, INVALID_INPUT, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 130, 141

app = typer.Typer(
    name="winnow",
    help="Sparse Gaussian processes that select their own inducing points.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"winnow {__version__}")
        raise typer.Exit


@app.callback()
def winnow(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Sparse Gaussian processes that select their own inducing points."""


def _interruptible(command: Callable[..., None]) -> Callable[..., None]:
    """Exit with 130 and a message on Ctrl-C, silently with 141 on a broken pipe."""

    @wraps(command)
    def wrapped(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
            sys.stdout.flush()
        except BrokenPipeError:
            # As in `| head -1`. Python must not flush the rest of the buffer at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(BROKEN_PIPE) from None
        except KeyboardInterrupt as interruption:
            folder = options.get("checkpoint")
            resumable = folder is not None and folder.is_dir() and any(folder.iterdir())
            default = (
                "run the same command again to resume from its checkpoint."
                if resumable
                else "nothing was written."
            )
            typer.echo(f"\nwinnow: interrupted; {str(interruption) or default}", err=True)
            raise typer.Exit(INTERRUPTED) from None

    return wrapped


# Each with the line of `winnow --help`, which must fit into 80 columns.
for _command, _line in (
    (fit, "Fit a model that predicts columns of a table, and save it."),
    (predict, "Predict the target for every row of a table."),
    (evaluate, "Measure how well a model predicts rows whose target is known."),
    (compare, "Compare two models on rows whose target is known."),
    (info, "Show what a model predicts, from which inputs, and how well."),
    (frontier, "Show the best ELBO for each number of inducing points."),
    (resize, "Save a smaller model, which the fit has optimised already."),
    (update, "Save a model that has learnt from more rows as well."),
    (report, "Write a web page with data, selection, quality and effects."),
    (plot, "Plot effects, importance, calibration, a surface and more."),
    (export, "Write the predictor as ONNX or as one numpy file."),
    (demo, "Select inducing points for a small data set, and plot them."),
    (data, "List data sets, write a synthetic one, or verify public ones."),
    (reproduce, "Run experiments of the paper, and check its claims."),
):
    app.command(short_help=_line)(_interruptible(_command))


def run(arguments: list[str]) -> int:
    """Run a command line and return its exit code: 0 success, 1 internal error, 2 invalid input."""
    try:
        with warnings.catch_warnings():
            # Warnings of other libraries about themselves are hidden; ours are shown.
            warnings.simplefilter("ignore")
            for ours in _OWN_WARNINGS:
                warnings.simplefilter("always", ours)
            warnings.showwarning = _show_warning
            app(arguments, prog_name="winnow")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else SUCCESS
    except (WinnowError, OSError) as error:
        typer.echo(f"{process_name()}: {with_options(_one_line(error))}", err=True)
        return INVALID_INPUT
    except Exception as error:  # a mistake of ours, which a user sees as one line
        if os.environ.get("WINNOW_TRACEBACK"):
            raise
        typer.echo(
            f"{process_name()}: internal error ({type(error).__name__}: {_one_line(error)}). "
            "Please report it; WINNOW_TRACEBACK=1 shows the traceback.",
            err=True,
        )
        return INTERNAL_ERROR
    return SUCCESS


def _show_warning(message: Warning | str, *_: object) -> None:
    """Print a warning on one line of stderr."""
    typer.echo(f"{process_name()}: {with_options(str(message))}", err=True)


def _wait_passively() -> None:
    """Let OpenMP's threads sleep while they wait, unless the user has set how they wait.

    By default they spin, which takes the time of other processes. OpenMP reads this when PyTorch is
    loaded. The process belongs to the command; a library must not decide this for its user.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def _one_line(error: BaseException) -> str:
    """Return the message of an error and its notes on one line."""
    message = " ".join([str(error), *getattr(error, "__notes__", [])])
    return " ".join(message.split()) or type(error).__name__


def main() -> None:
    """Run the command line of this process."""
    _wait_passively()
    sys.exit(run(sys.argv[1:]))
