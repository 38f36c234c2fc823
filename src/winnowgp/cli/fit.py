"""`winnow fit`: from a table to a model file."""

import hashlib
import shlex
import sys
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
    launched,
    speaks,
)
from winnowgp.errors import InputError

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
        typer.Option("--id", help="A column that names rows: no input, repeated in predictions."),
    ] = None,
    drop: Annotated[str, typer.Option(help="Columns to leave out, with commas between them.")] = "",
    missing: Annotated[
        str,
        typer.Option(
            help="error, or impute: numbers by their median and a flag, words by no category; "
            "rows without a target are left out."
        ),
    ] = "error",
    max_words: Annotated[
        int, typer.Option(min=1, help="Most categories of a column of words.")
    ] = 30,
    tolerance: Annotated[
        float, typer.Option(help="Nats per row that may be given up; larger keeps fewer points.")
    ] = 0.01,
    max_points: Annotated[int | None, typer.Option(help="Most inducing points.")] = None,
    max_predict_us: Annotated[
        float | None, typer.Option(help="Most microseconds a prediction may take.")
    ] = None,
    alpha: Annotated[
        str, typer.Option(help="auto, or the strength of the paper's prior, such as 0.05.")
    ] = "auto",
    kernel: Annotated[
        str, typer.Option(help="Such as rbf, matern52, 'rbf + periodic' or 'rbf[age] * linear'.")
    ] = "rbf",
    test_size: Annotated[
        float, typer.Option(help="Share of rows held out to measure quality; 0 for none.")
    ] = 0.2,
    encoding: Encoding = "utf-8",
    device: Device = "cpu",
    precision: Annotated[
        str,
        typer.Option(help="double, or mixed: rows in float32, sums in float64."),
    ] = "double",
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="A folder to write down progress in: the same command, run again after it was "
            "killed, goes on from there to the same model.",
            show_default=False,
        ),
    ] = None,
    checkpoint_every: Annotated[
        float, typer.Option(min=0, help="Seconds between two writings to that folder.")
    ] = 30.0,
    seed: Seed = 0,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Learn to predict a column of a table, and save the model.

    Numbers are used as they are, dates in ISO form as days, words as one 0/1 column each.

    Under torchrun (`torchrun --nproc-per-node 4 -m winnowgp fit ...`) processes share the rows of a
    regression; the first one speaks and writes. Classes and counts are not shared.
    """
    if speaks():
        checked_output(output)
    strength = _alpha(alpha)
    from rich.console import Console

    from winnowgp.cli.progress import PhaseBars
    from winnowgp.data import read_table
    from winnowgp.estimators import fit_table

    table = read_table(data, encoding=encoding)
    # Progress goes to stderr: stdout is for the result.
    with PhaseBars(Console(stderr=True), quiet=quiet or json or not speaks()) as bars:
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
            alpha=strength,
            tolerance=tolerance,
            max_points=max_points,
            max_predict_us=max_predict_us,
            seed=seed,
            device=device,
            precision=precision,
            settings={
                "command": shlex.join(["winnow", *sys.argv[1:]]),
                "data": data.name,
                "data_sha256": _digest(data),
            },
            on_progress=bars.update,
            checkpoint=_checkpoint(checkpoint, checkpoint_every),
            process_group=_process_group(device) if launched() else None,
        )
    if not speaks():
        return
    model.save(output)
    _say(model, output, left_out=table.N - model.summary["rows"], quiet=quiet, json=json)


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


def _say(model: "TabularModel", output: Path, *, left_out: int, quiet: bool, json: bool) -> None:
    if quiet and not json:
        return
    from winnowgp.cli.summary import as_json, print_summary

    if json:
        typer.echo(as_json(model.summary, file=str(output)))
        return
    print_summary(model.summary)
    if left_out:
        typer.echo(f"{left_out} rows without a target were left out.")
    typer.echo(f"model: {output}")
