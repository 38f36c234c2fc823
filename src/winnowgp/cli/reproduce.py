"""`winnow reproduce`: the paper's experiments, their figures, and whether they say what it says."""

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
        typer.Argument(metavar="[NAME]...", help="Experiments, or all; listed if none is said."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A minute or two each; says what it leaves out.")
    ] = False,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="Repetitions; as many as usual if not said, or as folds are."),
    ] = None,
    device: Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")] = "cpu",
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Runs at once; if not said one a core, or one on a GPU."),
    ] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="A folder for rows and figures; made if new.")
    ] = Path("reproduced"),
    only_draw: Annotated[
        bool, typer.Option("--only-draw", help="Make no runs; draw and judge the rows there are.")
    ] = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Run experiments of the paper, draw their figures, and say whether the paper's claims hold.

    Rows that NAME.jsonl has already are not made again, whatever ended the command before: the
    same command goes on. Quick runs have a file of their own, NAME-quick.jsonl.
    """
    from winnowgp.experiments.base import Scope
    from winnowgp.experiments.runner import check_tables, select_experiments

    if not names:
        _list(select_experiments("all"), json=json)
        return
    experiments = select_experiments(*names)
    _check_device(device)
    scope = Scope(quick=quick, seeds=seeds, device=device)
    if not only_draw:
        check_tables(experiments, scope, output)
        checked_folder(output)
    if not quiet:
        _say_folds(experiments, seeds)
    failures: list[Exception] = []
    for experiment in experiments:
        try:
            found = _reproduced(
                experiment, scope, output, jobs=jobs, only_draw=only_draw, shown=not (quiet or json)
            )
        except Exception as error:
            if len(experiments) == 1:
                raise
            typer.echo(f"winnow: {experiment.name} is left out: {error}", err=True)
            failures.append(error)
            continue
        if not quiet or json:
            _say(found, json=json)
    if failures:
        # Once more at the end, where it is seen; a mistake of ours before one in the input.
        raise min(failures, key=lambda error: isinstance(error, WinnowError))


def _check_device(device: str) -> None:
    if device not in ("cpu", "cuda"):
        raise InputError(f"`--device` must be cpu or cuda; got {device!r}.")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise InputError("`--device cuda` needs a CUDA device that torch can see; use cpu.")


def _say_folds(experiments: "list[Experiment]", seeds: int | None) -> None:
    """Where more repetitions are asked for than there are folds."""
    for found in experiments:
        if found.folds is not None and (seeds or 0) > found.folds:
            typer.echo(
                f"winnow: {found.name} repeats over the {found.folds} folds of its data; with "
                f"`--seeds {seeds}` all {found.folds} are used.",
                err=True,
            )


def _list(experiments: "list[Experiment]", *, json: bool) -> None:
    if json:
        import json as to_json

        rows = [{"name": found.name, "title": found.title} for found in experiments]
        typer.echo(to_json.dumps(rows, ensure_ascii=False))
        return
    for found in experiments:
        typer.echo(f"{found.name:<14} {found.title}")


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

    from winnowgp.cli.progress import RunBar
    from winnowgp.experiments.runner import draw_experiment, run_experiment

    if only_draw:
        return draw_experiment(experiment, scope, folder)
    with RunBar(Console(stderr=True), experiment.name, shown=shown) as bar:
        try:
            return run_experiment(experiment, scope, folder, jobs=jobs, on_run=bar.update)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"rows of finished runs are in {folder}; the same command goes on from there."
            ) from None


def _say(found: "Reproduction", *, json: bool) -> None:
    if json:
        typer.echo(found.as_json())
        return
    typer.echo(f"{found.name}: {found.title}")
    if found.cuts:
        typer.echo(f"  quick: {found.cuts}")
    if found.missing:
        typer.echo(f"  {found.missing} run{'s' * (found.missing > 1)} still to be made")
    for line in found.claims:
        typer.echo(f"  - {line}")
    typer.echo(f"  rows: {found.results} ({found.rows} of this scope)")
    typer.echo(f"  figure: {found.figure}")
