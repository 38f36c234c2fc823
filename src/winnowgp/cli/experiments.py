"""`winnow demo`, `winnow data` and `winnow reproduce`: data and experiments of the paper."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from winnowgp.cli.options import (
    PICTURES,
    Json,
    Quiet,
    Seed,
    checked_folder,
    checked_output,
    print_json,
)
from winnowgp.errors import InputError, WinnowError

if TYPE_CHECKING:
    from rich.table import Table

    from winnowgp.experiments.base import Experiment, Scope
    from winnowgp.experiments.illustration import IllustrationResult
    from winnowgp.experiments.runner import Reproduction


def demo(
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Where to save the plot (.png, .pdf, .svg).")
    ] = Path("winnow-demo.png"),
    quiet: Quiet = False,
    seed: Seed = 0,
) -> None:
    """Select inducing points for a small data set, and plot before, during and after."""
    checked_output(output, PICTURES)
    import torch
    from rich.console import Console

    from winnowgp.cli.summary import PhaseBars
    from winnowgp.experiments.illustration import draw_panels, illustrate
    from winnowgp.plots.style import save_figure

    # The data set is small: a second thread would only wait for the first.
    torch.set_num_threads(1)
    console = Console(quiet=quiet)
    with PhaseBars(console, quiet=quiet) as bars:
        result = illustrate(callbacks=(bars.update,), seed=seed)
    save_figure(draw_panels(result.panels), output)
    console.print(_table(result))
    console.print(f"plot: {output}")


def _table(result: "IllustrationResult") -> "Table":
    from winnowgp.cli.summary import titled_table

    title = "Inducing points selected by the model"
    table = titled_table(title, "", "inducing points", "ELBO (nats)")
    before, fitted = result.panels.before, result.fit
    table.add_row("all candidates", str(len(before.points)), f"{result.full_bound:.2f}")
    table.add_row(
        "expected under q(Z)", f"{fitted.selection.inclusion.sum().item():.1f}", "", style="dim"
    )
    table.add_row("selected and refitted", str(fitted.posterior.M), f"{fitted.elbo:.2f}")
    return table


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
    """List data sets, write a synthetic one, or copy and verify one of the paper's.

    Synthetic data sets are part of winnowgp. Those of the paper are searched in $WINNOWGP_DATA and
    winnowgp's cache folder; nothing is downloaded. The list shows where each can be obtained.
    """
    from winnowgp.data.catalogue import EXAMPLES, ORIGINS

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
        print_json(rows)
        return
    for row in rows:
        typer.echo(f"{row['name']:<10} {row['file'] or 'not found locally'}")
        typer.echo(f"{'':<10} {row['origin']}")


def _write_example(name: str, output: Path | None) -> str:
    """Write a synthetic table as CSV, and return a line about it."""
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


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...", help="Experiments, or all; without a name they are listed."
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Reduced settings, one or two minutes each; the reductions are printed."
        ),
    ] = False,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="Number of repetitions; by default that of the experiment."),
    ] = None,
    settings_as: Annotated[
        str,
        typer.Option(
            "--as",
            metavar="SETTINGS",
            help="Settings of the paper's procedure: printed in the paper, or released in the "
            "scripts of its authors (stored in NAME-released.jsonl).",
        ),
    ] = "printed",
    device: Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")] = "cpu",
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Parallel runs; by default one per core, or one on a GPU."),
    ] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder for results and figures.")
    ] = Path("reproduced"),
    only_draw: Annotated[
        bool,
        typer.Option(
            "--only-draw", help="Only draw figures and check claims from existing results."
        ),
    ] = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Run experiments of the paper, draw their figures, and report whether its claims hold.

    Results are appended to NAME.jsonl, with one line per run, and finished runs are not repeated:
    run the same command again to resume. Quick runs are stored in NAME-quick.jsonl.
    """
    from winnowgp.experiments.base import Scope
    from winnowgp.experiments.runner import check_released, check_tables, select_experiments

    if settings_as not in ("printed", "released"):
        raise InputError(f"`--as` must be printed or released; got {settings_as!r}.")
    if not names:
        _list(select_experiments("all"), json=json)
        return
    experiments = select_experiments(*names)
    _check_device(device)
    scope = Scope(quick=quick, seeds=seeds, device=device, released=settings_as == "released")
    if scope.released and "all" in names:
        experiments = [experiment for experiment in experiments if experiment.has_released]
    check_released(experiments, scope)
    if not only_draw:
        check_tables(experiments, scope, output)
        checked_folder(output)
    if not quiet:
        _warn_folds(experiments, seeds)
    failures: list[Exception] = []
    for experiment in experiments:
        try:
            result = _reproduced(
                experiment, scope, output, jobs=jobs, only_draw=only_draw, shown=not (quiet or json)
            )
        except Exception as error:  # hours of other experiments must not be lost
            if len(experiments) == 1:
                raise
            typer.echo(f"winnow: {experiment.name} failed and is skipped: {error}", err=True)
            failures.append(error)
            continue
        if not quiet or json:
            _print_result(result, json=json)
    if failures:
        # Again at the end, where it is seen; internal errors take precedence over invalid input.
        raise min(failures, key=lambda error: isinstance(error, WinnowError))


def _check_device(device: str) -> None:
    if device not in ("cpu", "cuda"):
        raise InputError(f"`--device` must be cpu or cuda; got {device!r}.")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise InputError("`--device cuda` needs a CUDA device that torch can see; use cpu.")


def _warn_folds(experiments: "list[Experiment]", seeds: int | None) -> None:
    """Warn where more repetitions are requested than the data has folds."""
    for experiment in experiments:
        if experiment.folds is not None and (seeds or 0) > experiment.folds:
            typer.echo(
                f"winnow: {experiment.name} has {experiment.folds} folds; `--seeds {seeds}` uses "
                "all of them.",
                err=True,
            )


def _list(experiments: "list[Experiment]", *, json: bool) -> None:
    if json:
        rows = [{"name": experiment.name, "title": experiment.title} for experiment in experiments]
        print_json(rows)
        return
    for experiment in experiments:
        typer.echo(f"{experiment.name:<14} {experiment.title}")


def _reproduced(
    experiment: "Experiment",
    scope: "Scope",
    folder: Path,
    *,
    jobs: int | None,
    only_draw: bool,
    shown: bool,
) -> "Reproduction":
    from rich.console import Console

    from winnowgp.cli.summary import RunBar
    from winnowgp.experiments.runner import draw_experiment, run_experiment

    if only_draw:
        return draw_experiment(experiment, scope, folder)
    with RunBar(Console(stderr=True), experiment.name, shown=shown) as bar:
        try:
            return run_experiment(experiment, scope, folder, jobs=jobs, on_run=bar.update)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"rows of finished runs are in {folder}; run the same command again to resume."
            ) from None


def _print_result(result: "Reproduction", *, json: bool) -> None:
    if json:
        typer.echo(result.as_json())
        return
    typer.echo(f"{result.name}: {result.title}")
    if result.cuts:
        typer.echo(f"  quick: {result.cuts}")
    if result.missing:
        typer.echo(f"  {result.missing} run{'s' * (result.missing > 1)} missing")
    for line in result.claims:
        typer.echo(f"  - {line}")
    typer.echo(f"  rows: {result.results} ({result.rows} of this scope)")
    typer.echo(f"  figure: {result.figure}")
