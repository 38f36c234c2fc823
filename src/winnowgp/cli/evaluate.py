"""`winnow evaluate` and `winnow compare`: models on rows whose target is known."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from winnowgp.cli.options import Encoding, Json, ModelFile, file_digest, print_json
from winnowgp.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from winnowgp.data import DataTable
    from winnowgp.tabular import TabularModel
    from winnowgp.tabular.evaluation import CrossValidation, PairedDifference
    from winnowgp.tabular.outputs import MultiOutputTable

Labelled = Annotated[
    Path,
    typer.Argument(
        metavar="DATA",
        help="CSV, CSV.gz, Excel or Parquet with the target; rows without one are left out.",
        show_default=False,
    ),
]


def evaluate(
    model: ModelFile, data: Labelled, encoding: Encoding = "utf-8", json: Json = False
) -> None:
    """Measure how well a model predicts rows whose target is known.

    It is compared with the best constant prediction of these rows. Use rows that the model was not
    fitted to: its quality on training rows is too good.
    """
    from winnowgp.cli.options import load_outputs, load_table_model
    from winnowgp.cli.outputs import print_output_quality
    from winnowgp.cli.summary import held_out_json, print_quality
    from winnowgp.data import read_table
    from winnowgp.tabular.evaluation import evaluate_model

    if (outputs := load_outputs(model)) is not None:
        decimal = outputs.settings.get("decimal", "auto")
        scores = outputs.evaluate(read_table(data, encoding=encoding), decimal=decimal)
        if not scores:
            raise InputError("no target has at least 2 rows in this table; give more rows.")
        if json:
            seen = _was_fitted_to(outputs, data)
            content = {"file": str(model), "targets": outputs.targets, "data": str(data)}
            content |= {"used_for_training": seen, "quality": scores}
            print_json(content)
            return
        print_output_quality(scores, title=f"Rows of {data.name}")
        _note_training_rows({model.name: outputs}, data)
        return
    fitted, table = load_table_model(model), read_table(data, encoding=encoding)
    quality = evaluate_model(fitted, table)
    _note_missing_noise({model.name: fitted}, table)
    _note_missing_targets(table, quality["rows"])
    if json:
        content = {
            "file": str(model),
            "target": fitted.target,
            "task": fitted.task,
            "data": str(data),
            "used_for_training": _was_fitted_to(fitted, data),
            **held_out_json(quality),
            "constant": {metric["name"]: metric["baseline"] for metric in quality["metrics"]},
        }
        print_json(content)
        return
    print_quality(quality, title=f"{quality['rows']} rows of {data.name}, target {fitted.target}")
    _note_training_rows({model.name: fitted}, data)


def compare(
    first: Annotated[
        Path,
        typer.Argument(metavar="FIRST", help="A file that `winnow fit` wrote.", show_default=False),
    ],
    second: Annotated[
        Path,
        typer.Argument(
            metavar="SECOND", help="Another one, for the same target.", show_default=False
        ),
    ],
    data: Labelled,
    encoding: Encoding = "utf-8",
    json: Json = False,
) -> None:
    """Compare two models on rows whose target is known.

    Differences are taken row by row, the second model less the first, and have a standard error. A
    difference of less than about two standard errors may be chance. Use rows that neither model was
    fitted to.
    """
    from winnowgp.cli.options import load_table_model
    from winnowgp.data import read_table
    from winnowgp.tabular.evaluation import compare_models

    a, b = load_table_model(first), load_table_model(second)
    table = read_table(data, encoding=encoding)
    measures = compare_models(a, b, table)
    _note_missing_noise({first.name: a, second.name: b}, table)
    _note_missing_targets(table, measures[0].rows)
    if json:
        content = {
            "first": str(first),
            "second": str(second),
            "target": a.target,
            "used_for_training": any(_was_fitted_to(model, data) for model in (a, b)),
            "measures": [asdict(measure) for measure in measures],
        }
        print_json(content)
        return
    _print_comparison(measures, first.name, second.name, data.name)
    _note_training_rows({first.name: a, second.name: b}, data)


def _was_fitted_to(model: "TabularModel | MultiOutputTable", data: Path) -> bool:
    """Return whether a model was fitted to rows of this very file."""
    from winnowgp.tabular import TabularModel

    single = isinstance(model, TabularModel)
    settings = model.summary["settings"] if single else model.settings
    return file_digest(data) in settings.get("data_sha256", "").split()


def _note_missing_noise(models: "Mapping[str, TabularModel]", table: "DataTable") -> None:
    """Say on stderr if the rows lack a column of known noise that a model was fitted with."""
    for name, model in models.items():
        if model.noise_column is not None and model.noise_column not in table.values:
            typer.echo(
                f"note: the noise column {model.noise_column!r} of {name} is missing; its "
                "densities and intervals have the learnt noise only.",
                err=True,
            )


def _note_missing_targets(table: "DataTable", used: int) -> None:
    """Say on stderr how many rows were left out because they have no target."""
    if used < table.N:
        typer.echo(f"note: {table.N - used} rows without a target were left out.", err=True)


def _note_training_rows(
    models: "Mapping[str, TabularModel | MultiOutputTable]", data: Path
) -> None:
    """Say so if models were fitted to rows of the file that they are measured on."""
    fitted = [name for name, model in models.items() if _was_fitted_to(model, data)]
    if fitted:
        from rich.console import Console

        Console(markup=False).print(
            f"note: {data.name} is the file that {' and '.join(fitted)} "
            f"{'was' if len(fitted) == 1 else 'were'} fitted to, so that these figures are too "
            "good. Use rows that no model has seen, or `winnow fit --cv 5`.",
            style="bold",
            soft_wrap=True,
            highlight=False,
        )


def print_folds(validation: "CrossValidation") -> None:
    """Print the metrics of each fold, their mean and its standard error."""
    from rich.console import Console

    from winnowgp.cli.summary import titled_table
    from winnowgp.report.summary import rounded

    names = [metric["name"] for metric in validation.folds[0]["metrics"]]
    table = titled_table("Cross-validation", "fold", "rows", *names)
    for number, fold in enumerate(validation.folds, start=1):
        values = [rounded(metric["value"]) for metric in fold["metrics"]]
        table.add_row(str(number), str(fold["rows"]), *values)
    table.add_section()
    means = [validation.mean(name) for name in names]
    table.add_row("mean", "", *(rounded(mean) for mean, _ in means))
    table.add_row("± error", "", *(rounded(error, 2) for _, error in means))
    Console(markup=False).print(table)


def folds_json(validation: "CrossValidation") -> dict[str, object]:
    """Return the metrics of each fold, their means and standard errors."""
    from winnowgp.cli.summary import held_out_json

    names = [metric["name"] for metric in validation.folds[0]["metrics"]]
    means = {name: validation.mean(name) for name in names}
    return {
        "folds": [held_out_json(fold) for fold in validation.folds],
        "mean": {name: mean for name, (mean, _) in means.items()},
        "standard_error": {name: error for name, (_, error) in means.items()},
    }


def _print_comparison(
    measures: "tuple[PairedDifference, ...]", first: str, second: str, data: str
) -> None:
    from rich.console import Console

    from winnowgp.cli.summary import titled_table
    from winnowgp.report.summary import rounded

    console = Console(markup=False)
    title, measure = f"{measures[0].rows} rows of {data}", "mean per row"
    table = titled_table(title, measure, first, second, "difference", "± error", left=measure)
    for measure in measures:
        table.add_row(
            measure.name,
            rounded(measure.first),
            rounded(measure.second),
            ("+" if measure.difference > 0 else "") + rounded(measure.difference, 3),
            rounded(measure.standard_error, 2),
        )
    console.print(table)
    console.print(_verdict(measures[0], first, second), soft_wrap=True)


def _verdict(density: "PairedDifference", first: str, second: str) -> str:
    """Return which model is better by log density, and whether that may be chance."""
    better = second if density.difference > 0 else first
    by = f"{abs(density.difference):.3g} ± {density.standard_error:.2g} nats per row"
    if abs(density.difference) <= 2 * density.standard_error:
        return f"No clear difference in {density.name}: {by}, less than two standard errors."
    return f"{better} predicts better: its {density.name} is higher by {by}."
