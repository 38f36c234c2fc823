"""`winnow fit`: from a table to a model file."""

import hashlib
import shlex
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from winnowgp.cli.options import (
    Device,
    Encoding,
    Json,
    Quiet,
    Seed,
    checked_output,
    is_main_process,
    launched,
)
from winnowgp.errors import FitWarning, InputError

if TYPE_CHECKING:
    from winnowgp.data.distributed import ProcessGroup
    from winnowgp.estimators import TabularModel
    from winnowgp.training import Checkpoint


def fit(
    data: Annotated[Path, typer.Argument(help="CSV, CSV.gz or Parquet.", show_default=False)],
    target: Annotated[
        str, typer.Option("--target", "-t", help="The column to predict.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to save the model.")] = Path(
        "model.winnow"
    ),
    task: Annotated[str, typer.Option(help="auto, regression, classification or counts.")] = "auto",
    id_column: Annotated[
        str | None,
        typer.Option(
            "--id", help="A column that identifies rows: not an input, copied to predictions."
        ),
    ] = None,
    drop: Annotated[str, typer.Option(help="Columns to ignore, separated by commas.")] = "",
    missing: Annotated[
        str,
        typer.Option(
            help="error, or impute: the median and an indicator for numbers, no category for "
            "strings; rows without a target are dropped."
        ),
    ] = "error",
    max_words: Annotated[
        int, typer.Option(min=1, help="Largest number of categories of a string column.")
    ] = 30,
    tolerance: Annotated[
        float,
        typer.Option(
            help="Largest ELBO gap, in nats per observation; larger keeps fewer inducing points."
        ),
    ] = 0.01,
    max_points: Annotated[
        int | None, typer.Option(help="Largest number of inducing points.")
    ] = None,
    max_predict_us: Annotated[
        float | None, typer.Option(help="Largest prediction time per row, in microseconds.")
    ] = None,
    max_fit_seconds: Annotated[
        float | None,
        typer.Option(
            help="Time that growing the number of candidates may take, in seconds; by default a "
            "budget of work limits it."
        ),
    ] = None,
    criterion: Annotated[
        str,
        typer.Option(
            help="What the tolerance limits: elbo, or predictive, the held-out log density."
        ),
    ] = "elbo",
    alpha: Annotated[
        str, typer.Option(help="auto, or the strength α of the paper's prior, such as 0.05.")
    ] = "auto",
    kernel: Annotated[
        str,
        typer.Option(
            help="auto, the best of several by evidence; or a kernel expression: rbf, matern52, "
            "'rbf + periodic', 'rbf[age] * linear'."
        ),
    ] = "auto",
    test_size: Annotated[
        float, typer.Option(help="Fraction of rows held out to measure quality; 0 for none.")
    ] = 0.2,
    encoding: Encoding = "utf-8",
    device: Device = "cpu",
    precision: Annotated[
        str,
        typer.Option(help="double, or mixed: kernel blocks in float32, sums in float64."),
    ] = "double",
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="A folder for checkpoints: the same command, run again after it was killed, "
            "resumes there and ends with the same model.",
            show_default=False,
        ),
    ] = None,
    checkpoint_every: Annotated[
        float, typer.Option(min=0, help="Seconds between two checkpoints.")
    ] = 30.0,
    seed: Seed = 0,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Fit a model that predicts a column of a table, and save it.

    Numbers are used as they are, ISO dates as days, strings as one indicator column per category.

    Under torchrun (`torchrun --nproc-per-node 4 -m winnowgp fit ...`) the rows of a regression are
    divided among the processes, and the first one prints and writes. Classification and counts are
    not distributed.
    """
    if is_main_process():
        checked_output(output)
    alpha_value = _alpha(alpha)
    from rich.console import Console

    from winnowgp.cli.progress import PhaseBars
    from winnowgp.data import read_table
    from winnowgp.estimators import fit_table

    if not quiet and not json:
        # The summary that is printed has these notes.
        warnings.simplefilter("ignore", FitWarning)
    table = read_table(data, encoding=encoding)
    # Progress goes to stderr: stdout is for the result.
    with PhaseBars(Console(stderr=True), quiet=quiet or json or not is_main_process()) as bars:
        model = fit_table(
            table,
            target,
            task=task,
            test_size=test_size,
            id_column=id_column,
            drop=tuple(name.strip() for name in drop.split(",") if name.strip()),
            missing=missing,
            max_words=max_words,
            kernel=kernel,
            alpha=alpha_value,
            tolerance=tolerance,
            max_points=max_points,
            max_predict_us=max_predict_us,
            max_fit_seconds=max_fit_seconds,
            criterion=criterion,
            seed=seed,
            device=device,
            precision=precision,
            settings={
                "command": shlex.join(["winnow", *sys.argv[1:]]),
                "data": data.name,
                "data_sha256": _digest(data),
            },
            callbacks=bars.update,
            checkpoint=_checkpoint(checkpoint, checkpoint_every),
            process_group=_process_group(device) if launched() else None,
        )
    if not is_main_process():
        return
    model.save(output)
    _print_result(model, output, dropped=table.N - model.summary["rows"], quiet=quiet, json=json)


def _alpha(alpha: str) -> str | float:
    if alpha == "auto":
        return alpha
    try:
        return float(alpha)
    except ValueError:
        raise InputError(f"`--alpha` must be auto or a number; got {alpha!r}.") from None


def _checkpoint(folder: Path | None, every: float) -> "Checkpoint | None":
    from winnowgp.training import Checkpoint

    return None if folder is None else Checkpoint(folder, every)


def _process_group(device: str) -> "ProcessGroup":
    import torch

    from winnowgp.data.distributed import ProcessGroup

    gpu = device != "cpu" and torch.cuda.is_available()
    return ProcessGroup.initialise(torch.device("cuda") if gpu else None)


def _digest(data: Path) -> str:
    with data.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _print_result(
    model: "TabularModel", output: Path, *, dropped: int, quiet: bool, json: bool
) -> None:
    if quiet and not json:
        return
    from winnowgp.cli.summary import as_json, print_summary

    if json:
        typer.echo(as_json(model.summary, file=str(output)))
        return
    print_summary(model.summary)
    if dropped:
        typer.echo(f"{dropped} rows without a target were dropped.")
    typer.echo(f"model: {output}")
