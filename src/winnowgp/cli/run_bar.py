"""Progress of an experiment on the terminal."""

from typing import Any, final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@final
class RunBar:
    """One bar of runs, with what the newest one was and took."""

    def __init__(self, console: Console, name: str, *, shown: bool) -> None:
        self._bar = Progress(
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
        """Show that a run ended; more may become known then."""
        words = [str(v) for k, v in row.items() if k in ("kind", "data", "condition")]
        words += [f"{k} {row[k]}" for k in ("alpha", "seed", "fold") if k in row]
        note = f"{' '.join(words)}: {row['seconds']:.1f} s"
        self._bar.update(self._task, completed=done, total=total, note=note)
