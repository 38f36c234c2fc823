"""`winnow reproduce`: the paper's experiments, their figures, and whether its claims hold."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from winnowgp.cli.options import Json, Quiet, checked_folder
from winnowgp.errors import InputError, WinnowError

if TYPE_CHECKING:
    from winnowgp.experiments.base import Experiment, Scope
    from winnowgp.experiments.runner import Reproduction


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
        import json as to_json

        rows = [{"name": experiment.name, "title": experiment.title} for experiment in experiments]
        typer.echo(to_json.dumps(rows, ensure_ascii=False))
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
