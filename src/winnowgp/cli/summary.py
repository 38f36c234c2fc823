"""What commands show: progress bars, and summaries of models."""

from math import ceil, inf, isfinite, log10
from typing import TYPE_CHECKING, Any, final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Column, Table

from winnowgp.cli.options import with_options
from winnowgp.report.summary import (
    ColumnSummary,
    Quality,
    Summary,
    counted,
    rounded,
    selection_lines,
)

if TYPE_CHECKING:
    # Models can be described without importing the optimisers.
    from winnowgp.training import Progress


# Names of the phases of deep models, in the words of the documentation.
_PHASES = {"start": "initial models", "pre-train": "all candidates", "post-train": "selected"}


@final
class PhaseBars:
    """One progress bar per training phase, added when the phase begins; nothing before it."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        # Only the bar may shrink in narrow terminals.
        self._bars = Bars(
            TextColumn("{task.description:<14}"),
            BarColumn(),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=quiet,
        )
        self._tasks = {}
        self._current: str | None = None

    def __enter__(self) -> "PhaseBars":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._current is None:
            return
        if exception[:1] == (None,):
            self._end(self._current)
        self._bars.stop()

    def _end(self, phase: str | None) -> None:
        """Fill the bar of a phase that ended before its last step."""
        task = self._tasks[phase]
        self._bars.update(task, total=self._bars.tasks[task].completed)

    def update(self, progress: "Progress") -> None:
        """Show a step, with the expected number of inducing points where it is learnt."""
        if self._current is None:
            self._bars.start()
        elif self._current != progress.phase:
            self._end(self._current)
        self._current = progress.phase
        if progress.phase not in self._tasks:
            name = _PHASES.get(progress.phase, progress.phase)
            self._tasks[progress.phase] = self._bars.add_task(name, total=progress.steps, note="")
        note = f"{progress.objective:9.1f} nats" if isfinite(progress.objective) else " " * 14
        if progress.inclusion is not None:
            expected = sum(inclusion.sum().item() for inclusion in progress.inclusion)
            note += f", {expected:.1f} inducing points expected"
        elif size := sum(sizes := [len(points) for points in progress.candidates]):
            note += f", {counted(size)}" if len(sizes) == 1 else f", {_sum(sizes)} inducing points"
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


def _sum(sizes: list[int]) -> str:
    return " + ".join(map(str, sizes))


_KINDS = {"number": "number", "date": "date", "category": "category"}

# Inputs, and ignored columns, that are printed.
_MAX_COLUMNS = 40


def summary_json(summary: Summary, *, file: str) -> dict[str, Any]:
    """Return what `--json` prints of the summary of a model."""
    choice = summary["choice"]
    quality = summary["quality"]
    return {
        "file": file,
        "target": summary["target"],
        "task": summary["task"],
        "classes": summary["classes"],
        "rows": summary["rows"],
        "train_rows": summary["train_rows"],
        "inputs": [
            {
                "name": c["name"],
                "kind": c["kind"],
                "relevance": c["relevance"],
                "missing": c["missing"],
                "note": c.get("note", ""),
            }
            for c in summary["columns"]
        ],
        "ignored_columns": summary.get("ignored", []),
        "inducing_points": choice["points"],
        "layer_inducing_points": choice.get("layers"),
        "allocations": choice.get("allocations"),
        "shallow_comparison": choice.get("shallow"),
        "noise_inducing_points": choice.get("noise_points"),
        "hyper_posteriors": choice.get("hyper_posteriors"),
        "constant_weight": choice.get("constant_weight"),
        "subset_posterior": choice.get("subset_posterior"),
        "goal": choice["asked"],
        "alpha": choice["alpha"],
        "elbo_nats": choice["bound"],
        "kernel": choice["kernel"],
        "kernel_evidence_nats_per_observation": choice["kernel_evidence"],
        "log_evidence_nats": choice["evidence"],
        "log_evidence_method": choice["evidence_method"],
        "kl_nats": choice["kl"],
        "elbo_gap_nats_per_observation": choice["elbo_gap"],
        "predictive_gap_nats_per_observation": choice["predictive_gap"],
        "predictive_gap_standard_error": choice["predictive_gap_se"],
        "growth_limit": choice["growth_limit"],
        "last_doubling_gain_nats_per_observation": choice["last_gain"],
        "available_sizes": choice["sizes"],
        "resized_from": choice["resized_from"],
        "held_out": None if quality is None else held_out_json(quality),
        "alarms": summary["alarms"],
        "importance": summary["importance"],
        "timings": summary["timings"],
        "settings": summary["settings"],
    }


def held_out_json(quality: Quality) -> dict[str, Any]:
    """Return the number of rows, the metrics by name, and the coverage of intervals."""
    return {
        "rows": quality["rows"],
        **{metric["name"]: metric["value"] for metric in quality["metrics"]},
        "coverage": quality["coverage"],
    }


def titled_table(title: str, *names: str, left: str = "") -> Table:
    """Return a table without rows, whose columns are aligned to the right except for one."""
    table = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(name, justify="left" if name == left else "right")
    return table


def print_quality(quality: Quality, *, title: str) -> None:
    """Print the metrics beside those of a constant prediction."""
    scores = titled_table(title, "", "model", "constant")
    for metric in quality["metrics"]:
        scores.add_row(metric["name"], rounded(metric["value"]), rounded(metric["baseline"]))
    for level, share in quality["coverage"]:
        if level == 0.95:
            scores.add_row("within the 95 % interval", f"{100 * share:.1f} %", "")
    Console(markup=False).print(scores)


def print_summary(summary: Summary) -> None:
    """Print target, inputs, selection, and quality beside that of a constant prediction."""
    # Column names may hold brackets, as in `weight [kg]`, which are not rich's markup.
    console = Console(markup=False)
    quality = summary["quality"]
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("target", f"{summary['target']} ({summary['task']}: {summary['why_task']})")
    if "likelihood" in summary["settings"]:
        table.add_row("likelihood", _likelihood(summary["settings"]))
    table.add_row("inputs", _inputs(summary))
    table.add_row("rows", _rows(summary))
    if (column := summary["settings"].get("noise_column")) is not None:
        learnt = (
            f"learnt in addition: a standard deviation of {rounded(summary['noise_sd'] or 0, 3)}"
        )
        table.add_row("noise", f"variances in column {column!r}; {learnt}")
    for label, sentence in selection_lines(summary["choice"]):
        table.add_row(label, with_options(sentence))
    table.add_row(
        "time",
        f"fit {summary['timings']['fit_s']:.1f} s, "
        f"prediction {summary['timings']['predict_us']:.1f} µs per row",
    )
    console.print(table)
    console.print(_columns(summary))
    for alarm in summary["alarms"]:
        note = f"note: {with_options(alarm['message'])}"
        console.print(note, style="bold", soft_wrap=True, highlight=False)
    if quality is None:
        if summary["choice"]["resized_from"] is not None and _held_out(summary):
            console.print(
                "The quality of the resized model was not measured: the file does not contain the "
                "held-out rows."
            )
        return
    print_quality(quality, title=_quality_title(summary["settings"], quality["rows"]))


def _quality_title(settings: dict[str, str], rows: int) -> str:
    """Return which rows the quality was measured on."""
    if "batches" in settings:
        return f"{rows} rows of the last update, predicted before they were learnt"
    if "folds" in settings:
        return f"Rows of all {settings['folds']} folds"
    return "Held-out rows"


def _columns(summary: Summary) -> Table:
    """Return a table of what became of each column."""
    ignored = summary.get("ignored", [])
    table = Table(title="Columns", title_justify="left")
    table.add_column("column", overflow="fold")
    table.add_column("read as")
    table.add_column("values", overflow="fold")
    table.add_column("missing", justify="right")
    target = summary["target_summary"]
    notes = any(c.get("note") for c in (target, *summary["columns"]))
    if notes:
        table.add_column("note")
    rows = [(target, f"target, {_KINDS[target['kind']]}", _values(target))]
    rows += [(c, _KINDS[c["kind"]], _values(c)) for c in summary["columns"][:_MAX_COLUMNS]]
    rows += [(c, c["kind"], "") for c in ignored[:_MAX_COLUMNS]]
    for column, kind, values in rows:
        missing = str(column["missing"]) if column["missing"] else ""
        note = [str(column.get("note", ""))] if notes else []
        table.add_row(column["name"], kind, values, missing, *note)
    more = len(summary["columns"]) + len(ignored) + 1 - len(rows)
    if more:
        table.caption = f"and {more} more, which --json lists"
    return table


def _values(column: ColumnSummary) -> str:
    """Return the range of numbers and dates, or the most frequent categories."""
    if column["kind"] == "category":
        shown = ", ".join(category[:20] for category, _ in column["categories"][:3])
        return f"{column['different']}: {shown}{', …' if column['different'] > 3 else ''}"
    low, high = column["spread"][0], column["spread"][-1]
    if column["kind"] == "date":
        return f"{_date(low)} to {_date(high)}"
    return _range(low, high)


def _range(low: float, high: float) -> str:
    """Return two numbers with as many digits as show their difference.

    >>> _range(20.67218, 199.19), _range(1e9 + 0.28, 1e9 + 3.71), _range(3.0, 3.0)
    ('20.6722 to 199.19', '1000000000.28 to 1000000003.71', '3')
    """
    if low == high:
        return rounded(low, 6)
    width = high - low
    digits = 3 + ceil(log10(max(abs(low), abs(high)) / width)) if 0 < width < inf else 6
    return f"{rounded(low, max(digits, 6))} to {rounded(high, max(digits, 6))}"


def _date(days: float) -> str:
    from datetime import UTC, datetime, timedelta

    return str((datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=days)).date())


def _inputs(summary: Summary) -> str:
    names, order = [column["name"] for column in summary["columns"]], "in no order"
    if summary["choice"]["points"] == 0:
        order = "none of which the constant model uses"
    elif summary["importance"] is not None:
        names = [column["column"] for column in summary["importance"]["columns"]]
        order = "most important first"
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    shown = ", ".join(names[:8])
    return f"{shown}{more} ({order})" if len(names) > 1 else shown


def _likelihood(settings: dict[str, str]) -> str:
    log = ", of the logarithm of the target" if settings.get("log_target") == "True" else ""
    return f"{settings['likelihood']}{log}"


def _rows(summary: Summary) -> str:
    """Return how many rows were used for training, and how rows were held out."""
    settings, training = summary["settings"], f"{summary['train_rows']} for training"
    of = ""
    if "batches" in settings:
        training, of = f"{training} in {settings['batches']} batches", " of the first table"
    by = f" by {settings['split_by']!r}" if "split_by" in settings else ""
    if "folds" in settings:
        return f"{training}; held out in {settings['folds']} folds{by}"
    return f"{training}, {_held_out(summary)}{of} held out{by}"


def _held_out(summary: Summary) -> int:
    return summary["rows"] - summary["train_rows"]
