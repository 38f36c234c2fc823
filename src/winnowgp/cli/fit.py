"""`winnow fit`: from a table to a model file."""

import shlex
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from winnowgp.cli.evaluate import folds_json, print_folds
from winnowgp.cli.options import (
    Device,
    Encoding,
    Json,
    Quiet,
    Seed,
    check_columns,
    check_rereadable,
    checked_output,
    file_digest,
    is_main_process,
    launched,
    print_json,
    refuse_single_target_options,
    several_likelihoods,
    target_likelihoods,
)
from winnowgp.errors import FitWarning, InputError

if TYPE_CHECKING:
    from winnowgp.data.distributed import ProcessGroup
    from winnowgp.tabular import TabularModel
    from winnowgp.tabular.evaluation import CrossValidation
    from winnowgp.training import Checkpoint


def fit(
    data: Annotated[
        Path,
        typer.Argument(metavar="DATA", help="CSV, CSV.gz, Excel or Parquet.", show_default=False),
    ],
    target: Annotated[
        list[str],
        typer.Option(
            "--target",
            "-t",
            metavar="COLUMN",
            help="The column to predict. Several (-t a -t b) are predicted together, as mixed "
            "processes.",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to save the model.")] = Path(
        "model.winnow"
    ),
    task: Annotated[str, typer.Option(help="auto, regression, classification or counts.")] = "auto",
    likelihood: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[TARGET=]NAME",
            help="auto: gaussian, or poisson for counts; heteroscedastic for noise that depends on "
            "the inputs, student-t or laplace for targets with outliers, poisson or "
            "negative-binomial for counts, beta for proportions. Of several targets: one for all "
            "(gaussian by default), or TARGET=NAME for each; bernoulli for classes 0 and 1.",
            show_default="auto",
        ),
    ] = None,
    log_target: Annotated[
        bool,
        typer.Option(
            "--log-target",
            help="Fit the logarithm of a positive target; predictions are log-normal, in its own "
            "units.",
        ),
    ] = False,
    noise_column: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="A column of known noise variances of the target, squares of standard deviations "
            "in its units: not an input. What it leaves out is learnt.",
            show_default=False,
        ),
    ] = None,
    id_column: Annotated[
        str | None,
        typer.Option(
            "--id",
            metavar="COLUMN",
            help="A column that identifies rows: not an input, copied to predictions.",
        ),
    ] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMNS", help="Columns to ignore, separated by commas, or one per option."
        ),
    ] = None,
    categorical: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMNS",
            help="Columns to read as categories, separated by commas, or one per option; NA is a "
            "category in them.",
        ),
    ] = None,
    decimal: Annotated[
        str,
        typer.Option(
            help="What commas in numbers mean: ',' if they are decimal commas, '.' if they "
            "separate thousands; auto: thousands where a cell shows that, an error elsewhere."
        ),
    ] = "auto",
    dates: Annotated[
        str,
        typer.Option(
            help="Order of dates such as 03/04/2024: day-first or month-first; auto where only one "
            "is possible."
        ),
    ] = "auto",
    missing: Annotated[
        str,
        typer.Option(
            help="error, or impute: the median and an indicator for numbers, no category for "
            "strings; rows without a target are dropped."
        ),
    ] = "error",
    max_categories: Annotated[
        int, typer.Option(min=1, help="Largest number of categories of a string column.")
    ] = 30,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Largest ELBO gap, in nats per observation; larger keeps fewer inducing points. "
            "0.01 unless another option sets their number.",
            show_default=False,
        ),
    ] = None,
    max_points: Annotated[
        int | None,
        typer.Option(
            help="Largest number of inducing points; fewer if a tolerance is given and they are "
            "within it."
        ),
    ] = None,
    max_predict_us: Annotated[
        float | None, typer.Option(help="Largest prediction time per row, in microseconds.")
    ] = None,
    max_fit_seconds: Annotated[
        float | None,
        typer.Option(
            help="Time that the fit is to take, in seconds; a step that has begun ends. By default "
            "a number of operations limits it."
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
    layers: Annotated[
        str,
        typer.Option(
            help="1; or the number of layers of a deep GP, for functions that jump or whose "
            "smoothness varies; auto compares one, two and three. Takes minutes on a CPU."
        ),
    ] = "1",
    priors: Annotated[
        str,
        typer.Option(
            help="weak: priors of hyper-parameters, which small tables need, if noise is Gaussian; "
            "or none."
        ),
    ] = "weak",
    hyper: Annotated[
        str,
        typer.Option(
            help="point: the most probable hyper-parameters; laplace: predictions average over "
            "their uncertainty, for regression of at most 2,000 rows with Gaussian noise; auto: "
            "laplace with up to 500 rows."
        ),
    ] = "auto",
    posterior: Annotated[
        str,
        typer.Option(
            help="Posterior over subsets of the candidates: mean-field, independent inclusion; "
            "determinantal, similar candidates exclude each other; gibbs, samples of the optimal "
            "one, over which predictions with Gaussian noise average."
        ),
    ] = "mean-field",
    mean: Annotated[
        str,
        typer.Option(
            help="Prior mean of the function: zero, constant or linear; auto: zero for Gaussian "
            "noise, a constant for other likelihoods and classes."
        ),
    ] = "auto",
    test_size: Annotated[
        float | None,
        typer.Option(
            help="Fraction of rows held out to measure quality, 0.2 by default; 0 for none.",
            show_default=False,
        ),
    ] = None,
    split_by: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="A column that decides which rows are held out: the latest dates or largest "
            "numbers, or whole groups of equal strings. At random by default.",
        ),
    ] = None,
    test_file: Annotated[
        Path | None,
        typer.Option(
            help="Rows to hold out, in a file of their own; all rows of DATA are for training.",
            show_default=False,
        ),
    ] = None,
    cv: Annotated[
        int | None,
        typer.Option(
            "--cv",
            min=2,
            help="Measure quality by cross-validation with so many folds, 5 for example; the model "
            "is fitted to all rows. Takes one more fit per fold.",
            show_default=False,
        ),
    ] = None,
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
        float | None,
        typer.Option(
            min=0, help="Seconds between two checkpoints; 30 by default.", show_default=False
        ),
    ] = None,
    seed: Seed = 0,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Fit a model that predicts a column of a table, or several, and save it.

    Numbers are used as they are, dates as days, strings as one indicator column per category.

    Under torchrun (`torchrun --nproc-per-node 4 -m winnowgp fit ...`) the rows of a regression are
    divided among the processes, and the first one prints and writes. Classification, counts, other
    likelihoods and `--log-target` are not distributed.
    """
    if is_main_process():
        checked_output(output)
    check_rereadable(data)
    alpha_value = _alpha(alpha)
    dropped, categories = _names(drop), _names(categorical)
    used = {"`--target`": tuple(target), "`--drop`": dropped, "`--categorical`": categories}
    named = {"`--id`": id_column, "`--split-by`": split_by, "`--noise-column`": noise_column}
    for option, name in named.items():
        if name is not None:
            used[option] = (name,)
    check_columns(data, used, encoding=encoding)
    likelihoods = target_likelihoods(likelihood or [], target)
    if priors not in ("weak", "none"):
        raise InputError(f"`--priors` must be weak or none; got {priors!r}.")
    if checkpoint is None and checkpoint_every is not None:
        raise InputError("`--checkpoint-every` needs a folder; give one with `--checkpoint`.")
    _check_held_out(test_size, split_by=split_by, test_file=test_file, cv=cv)
    if cv is not None and (checkpoint is not None or launched()):
        raise InputError("`--cv` does not work with `--checkpoint` or torchrun; leave one out.")
    from rich.console import Console

    from winnowgp.cli.summary import PhaseBars
    from winnowgp.data import read_table
    from winnowgp.estimators.validation import MEANS
    from winnowgp.tabular import cross_validate_table, fit_table

    if mean not in MEANS:
        raise InputError(f"`--mean` must be one of {', '.join(MEANS)}; got {mean!r}.")
    if not quiet and not json and len(target) == 1:
        # The summary that is printed has these notes; that of several targets has none.
        warnings.simplefilter("ignore", FitWarning)
    table = read_table(data, encoding=encoding)
    # What models of one target and of several have in common.
    options: dict[str, Any] = {
        "split_by": split_by,
        "id_column": id_column,
        "drop": dropped,
        "categorical": categories,
        "decimal": decimal,
        "dates": dates,
        "missing": missing,
        "max_categories": max_categories,
        "kernel": kernel,
        "priors": None if priors == "none" else priors,
        "alpha": alpha_value,
        "tolerance": tolerance,
        "max_points": max_points,
        "seed": seed,
        "device": device,
        "settings": _settings(data),
    }
    held_out = 0.2 if test_size is None else test_size
    if len(target) > 1:
        single = {"--task": task == "auto"}
        single |= {"--log-target": not log_target, "--noise-column": noise_column is None}
        single |= {"--test-file": test_file is None, "--max-predict-us": max_predict_us is None}
        single |= {"--posterior": posterior == "mean-field", "--mean": mean == "auto"}
        single |= {"--layers": layers == "1", "--hyper": hyper == "auto"}
        single |= {"--criterion": criterion == "elbo", "--precision": precision == "double"}
        single["--max-fit-seconds"] = max_fit_seconds is None
        refuse_single_target_options(single)
        options |= {
            "kernel": "rbf" if kernel == "auto" else kernel,
            "likelihood": several_likelihoods(likelihoods),
            "test_size": held_out,
            "checkpoint": _checkpoint(checkpoint, checkpoint_every),
        }
        if decimal != "auto":
            options["settings"]["decimal"] = decimal
        from winnowgp.cli.outputs import fit_outputs

        fit_outputs(table, target, output, folds=cv, quiet=quiet, json=json, **options)
        return
    options |= {
        "task": task,
        "likelihood": likelihoods[target[0]],
        "log_target": log_target,
        "noise_column": noise_column,
        "layers": _layers(layers),
        "hyper": hyper,
        "posterior": posterior,
        "mean": mean,
        "max_predict_us": max_predict_us,
        "max_fit_seconds": max_fit_seconds,
        "criterion": criterion,
        "precision": precision,
    }
    test_table = None if test_file is None else read_table(test_file, encoding=encoding)
    # Progress goes to stderr: stdout is for the result.
    with PhaseBars(Console(stderr=True), quiet=quiet or json or not is_main_process()) as bars:
        options["callbacks"] = bars.update
        validation = None
        if cv is not None:
            validation = cross_validate_table(table, target[0], folds=cv, **options)
            model = validation.model
        else:
            model = fit_table(
                table,
                target[0],
                test_size=held_out,
                test_table=test_table,
                checkpoint=_checkpoint(checkpoint, checkpoint_every),
                process_group=_process_group(device) if launched() else None,
                **options,
            )
    if not is_main_process():
        return
    model.save(output)
    total = table.N + (0 if test_table is None else test_table.N)
    left_out = total - model.summary["rows"]
    _print_result(model, validation, output, dropped=left_out, quiet=quiet, json=json)


def _check_held_out(
    test_size: float | None, *, split_by: str | None, test_file: Path | None, cv: int | None
) -> None:
    """Check that the rows to hold out are specified in one way only."""
    given = {"--test-size": test_size, "--test-file": test_file, "--cv": cv}
    names = [name for name, value in given.items() if value is not None]
    if test_file is not None and split_by is not None:
        names = ["--test-file", "--split-by"]
    if len(names) > 1:
        raise InputError(
            f"`{names[0]}` and `{names[1]}` both say which rows are held out; leave one of them "
            "out."
        )


def _settings(data: Path) -> dict[str, str]:
    """Return the command and the data file, which are kept with the model."""
    return {
        "command": shlex.join(["winnow", *sys.argv[1:]]),
        "data": data.name,
        "data_sha256": file_digest(data),
    }


def _names(options: list[str] | None) -> tuple[str, ...]:
    names = [name.strip() for option in options or [] for name in option.split(",")]
    return tuple(filter(None, names))


def _alpha(alpha: str) -> str | float:
    if alpha == "auto":
        return alpha
    try:
        return float(alpha)
    except ValueError:
        raise InputError(f"`--alpha` must be auto or a number; got {alpha!r}.") from None


def _layers(layers: str) -> str | int:
    if layers == "auto":
        return layers
    if not layers.isdecimal() or int(layers) < 1:
        raise InputError(f"`--layers` must be a number of at least 1, or auto; got {layers!r}.")
    return int(layers)


def _checkpoint(folder: Path | None, every: float | None) -> "Checkpoint | None":
    from winnowgp.training import Checkpoint

    if folder is None:
        return None
    return Checkpoint(folder) if every is None else Checkpoint(folder, every)


def _process_group(device: str) -> "ProcessGroup":
    import torch

    from winnowgp.data.distributed import ProcessGroup

    gpu = device != "cpu" and torch.cuda.is_available()
    return ProcessGroup.initialise(torch.device("cuda") if gpu else None)


def _print_result(
    model: "TabularModel",
    validation: "CrossValidation | None",
    output: Path,
    *,
    dropped: int,
    quiet: bool,
    json: bool,
) -> None:
    if quiet and not json:
        return
    from winnowgp.cli.summary import print_summary, summary_json

    if json:
        found = summary_json(model.summary, file=str(output))
        if validation is not None:
            found["cross_validation"] = folds_json(validation)
        print_json(found)
        return
    print_summary(model.summary)
    if validation is not None:
        print_folds(validation)
    if dropped:
        typer.echo(f"{dropped} rows without a target were dropped.")
    typer.echo(f"model: {output}")
