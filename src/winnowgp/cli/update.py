"""`winnow update`: learn from more rows, without those that the model was fitted to."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from winnowgp.cli.options import (
    Encoding,
    Json,
    ModelFile,
    Quiet,
    Seed,
    check_rereadable,
    checked_output,
    file_digest,
    print_json,
    refuse_single_target_options,
)
from winnowgp.cli.outputs import update_outputs
from winnowgp.errors import InputError

if TYPE_CHECKING:
    from winnowgp.tabular.updates import TableUpdate


def update(
    model: ModelFile,
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA",
            help="CSV, CSV.gz, Excel or Parquet with the target; rows without one are left out.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Where to save the updated model.")
    ] = Path("updated.winnow"),
    test_size: Annotated[
        float,
        typer.Option(
            help="Share of the new rows held out to compare before and after; 0: none. They are "
            "learnt too."
        ),
    ] = 0.2,
    split_by: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="Column that decides which rows are held out; that of the fit if any.",
        ),
    ] = None,
    forgetting: Annotated[
        float | None,
        typer.Option(
            help="Factor, above 0 and at most 1, by which all earlier rows count less, for data "
            "that drift."
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            help="Number of the latest updates to remember, this one included, each of up to "
            "4,096 rows; the file keeps it for later updates."
        ),
    ] = None,
    move_points: Annotated[
        bool, typer.Option("--move-points", help="Move inducing points where the rows need them.")
    ] = False,
    seed: Seed = 0,
    encoding: Encoding = "utf-8",
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Save a model that has learnt from more rows as well.

    The rows that it was fitted to are not needed. Inducing points are added where the new rows need
    them, and dropped where they are no longer needed. Columns are read as in the fit: unknown
    categories, missing columns, and inputs or targets in other units are errors. Kernel and scaling
    stay those of the fit; the hyper-parameters are updated. Those of several targets stay too.
    """
    checked_output(output)
    check_rereadable(data)
    from winnowgp.cli.options import load_predictor
    from winnowgp.data import read_table
    from winnowgp.tabular import update_table
    from winnowgp.tabular.outputs import MultiOutputTable

    fitted, table = load_predictor(model), read_table(data, encoding=encoding)
    several = isinstance(fitted, MultiOutputTable)
    known = fitted.settings if several else fitted.summary["settings"]
    digest, earlier = file_digest(data), known.get("data_sha256", "")
    if digest in earlier.split():
        raise InputError(
            f"the model has learnt from {data.name} before: its rows would count twice. Pass a "
            "file with new rows only."
        )
    command = shlex.join(["winnow", *sys.argv[1:]])
    before = known.get("command")
    settings = {
        "command": command if before is None else f"{before} && {command}",
        "data_sha256": f"{earlier} {digest}".strip(),
    }
    if several:
        refuse_single_target_options(
            {
                "--forgetting": forgetting is None,
                "--window": window is None,
                "--move-points": not move_points,
            }
        )
        options = {"test_size": test_size, "split_by": split_by, "seed": seed}
        update_outputs(fitted, table, output, settings, quiet=quiet, json=json, **options)
        return
    result = update_table(
        fitted,
        table,
        test_size=test_size,
        split_by=split_by,
        seed=seed,
        forgetting=forgetting,
        window=window,
        move_points=True if move_points else None,
        settings=settings,
    )
    result.model.save(output)
    if json:
        print_json(_as_json(result, output))
    elif not quiet:
        _print(result, output)


def _as_json(result: "TableUpdate", output: Path) -> dict[str, object]:
    estimator: Any = result.model.estimator  # Deep GPs cannot be updated.
    return {
        "file": str(output),
        "rows": result.rows,
        "held_out": result.held_out,
        "inducing_points_before": result.points_before,
        "inducing_points": result.points,
        "added": result.added,
        "dropped": result.dropped,
        "moved": result.moved,
        "log_density_before": result.density_before,
        "log_density": result.density,
        "rows_seen": estimator.n_rows_seen_,
        "batches": estimator.n_batches_,
        "elbo_gap_nats_per_observation": estimator.elbo_gap_,
    }


def _print(result: "TableUpdate", output: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    estimator: Any = result.model.estimator  # Deep GPs cannot be updated.
    table = Table(title="Update", title_justify="left", show_header=False)
    held = f", after {result.held_out} of them were held out" if result.held_out else ""
    table.add_row("new rows", f"{result.rows} learnt{held}")
    table.add_row("seen in all", f"{estimator.n_rows_seen_:g} rows, {estimator.n_batches_} batches")
    table.add_row(
        "inducing points",
        f"{result.points_before} before, {result.points} now: {result.added} added, "
        f"{result.dropped} dropped, {result.moved} moved",
    )
    if result.density is not None:
        table.add_row(
            "log density of the new rows held out",
            f"{result.density_before:.4g} before, {result.density:.4g} now (nats per observation)",
        )
    table.add_row("ELBO gap", f"{estimator.elbo_gap_:.2g} nats per observation")
    Console(markup=False).print(table)
    typer.echo(f"model: {output}")
