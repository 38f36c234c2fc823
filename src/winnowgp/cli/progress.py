"""Progress bars of fits and experiments."""

from math import isfinite
from typing import Any, final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from winnowgp.report.sentences import counted
from winnowgp.training import Progress


@final
class PhaseBars:
    """One progress bar per training phase, added when the phase begins."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        self._bars = Bars(
            TextColumn("{task.description:<14}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=quiet,
        )
        self._tasks = {}
        self._current: str | None = None

    def __enter__(self) -> "PhaseBars":
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._current is not None and exception[:1] == (None,):
            self._end(self._current)
        self._bars.stop()

    def _end(self, phase: str | None) -> None:
        """Fill the bar of a phase that ended before its last step."""
        task = self._tasks[phase]
        self._bars.update(task, total=self._bars.tasks[task].completed)

    def update(self, progress: Progress) -> None:
        """Show a step, with the expected number of inducing points where it is learnt."""
        if self._current not in (None, progress.phase):
            self._end(self._current)
        self._current = progress.phase
        if progress.phase not in self._tasks:
            self._tasks[progress.phase] = self._bars.add_task(
                progress.phase, total=progress.steps, note=""
            )
        note = f"{progress.objective:9.1f} nats" if isfinite(progress.objective) else " " * 14
        if progress.inclusion is not None:
            expected = sum(inclusion.sum().item() for inclusion in progress.inclusion)
            note += f", {expected:.1f} inducing points expected"
        elif size := sum(map(len, progress.candidates)):
            note += f", {counted(size)}"
        self._bars.update(
            self._tasks[progress.phase], completed=progress.step, total=progress.steps, note=note
        )


@final
class RunBar:
    """One progress bar per experiment, with the settings and seconds of the newest run."""

    def __init__(self, console: Console, name: str, *, shown: bool) -> None:
        self._bar = Bars(
            TextColumn("{task.description:<14}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            disable=not shown,
        )
        self._task = self._bar.add_task(name, total=None, note="")

    def __enter__(self) -> "RunBar":
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def update(self, done: int, total: int, row: dict[str, Any]) -> None:
        """Show that a run ended; `total` may have changed."""
        labels = [str(v) for k, v in row.items() if k in ("kind", "data", "condition")]
        labels += [f"{k} {row[k]}" for k in ("alpha", "seed", "fold") if k in row]
        note = f"{' '.join(labels)}: {row['seconds']:.1f} s"
        self._bar.update(self._task, completed=done, total=total, note=note)
