"""`winnow demo`: the paper's first figure and a short table."""

from pathlib import Path
from typing import final

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from winnowgp.experiments.illustration import Illustrated, illustrate
from winnowgp.plots import draw_illustration, saved
from winnowgp.training import Progress


def run_demo(output: Path, *, quiet: bool, seed: int) -> None:
    """Fit, save the picture, and say what happened; `output` has been checked."""
    # The curve is small: a second thread would spend its time waiting for the first.
    torch.set_num_threads(1)
    console = Console(quiet=quiet)
    with _PhaseBars(console, quiet=quiet) as bars:
        result = illustrate(on_progress=bars.update, seed=seed)
    saved(draw_illustration(result.picture), output)
    console.print(_table(result))
    console.print(f"picture: {output}")


def _table(result: Illustrated) -> Table:
    table = Table(title="Inducing points, chosen by the model", title_justify="left")
    table.add_column("")
    table.add_column("points", justify="right")
    table.add_column("bound (nats)", justify="right")
    before, fitted = result.picture.before, result.fit
    table.add_row("all candidates", str(len(before.points)), f"{result.full_bound:.2f}")
    table.add_row(
        "expected under q(Z)", f"{fitted.selection.inclusion.sum().item():.1f}", "", style="dim"
    )
    table.add_row("kept and refitted", str(fitted.posterior.M), f"{fitted.bound:.2f}")
    return table


@final
class _PhaseBars:
    """A progress bar a phase, added when the phase begins."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        self._bars = Bars(
            TextColumn("{task.description:<11}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=quiet,
        )
        self._tasks = {}

    def __enter__(self) -> "_PhaseBars":
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def update(self, progress: Progress) -> None:
        """Show a step, with the expected number of points where it is being learnt."""
        if progress.phase not in self._tasks:
            self._tasks[progress.phase] = self._bars.add_task(
                progress.phase, total=progress.steps, note=""
            )
        note = f"{progress.objective:9.1f} nats"
        if progress.inclusion is not None:
            note += f", {progress.inclusion.sum().item():.1f} points expected"
        self._bars.update(self._tasks[progress.phase], completed=progress.step, note=note)
