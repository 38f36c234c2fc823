"""Running experiments: missing runs in several processes, then the figure and its claims."""

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from threading import Thread
from time import perf_counter, process_time

import torch

from winnowgp.data.catalogue import find_table, table_folders
from winnowgp.errors import DataNotFoundError, InputError, TrainingError
from winnowgp.experiments.base import Experiment, Row, Scope
from winnowgp.experiments.runs import Runs
from winnowgp.report.summary import counted


def all_experiments() -> list[Experiment]:
    """Return every experiment, in the order of the paper's figures."""
    # Imported here: a worker process needs the experiment that it runs, and not the others.
    from winnowgp.experiments.gplvm import Gplvm
    from winnowgp.experiments.gradient_variance import GradientVariance
    from winnowgp.experiments.illustration import Illustration
    from winnowgp.experiments.kin8nm_deep import Kin8nmDeep
    from winnowgp.experiments.noise import Noise
    from winnowgp.experiments.real import Real
    from winnowgp.experiments.square_wave import SquareWave
    from winnowgp.experiments.synthetic import Synthetic

    return [
        Illustration(),
        Noise(),
        Synthetic(),
        Real(),
        SquareWave(),
        Kin8nmDeep(),
        Gplvm(),
        GradientVariance(),
    ]


def select_experiments(*names: str) -> list[Experiment]:
    """Return the experiments with some names, each once, or all of them for "all".

    >>> [experiment.title for experiment in select_experiments("noise")]
    ['figure 2: with more noise an accurate posterior needs fewer inducing points']
    """
    every = all_experiments()
    known = [experiment.name for experiment in every]
    for name in names:
        if name not in ("all", *known):
            raise InputError(
                f"the experiment must be all or one of {', '.join(known)}; got {name!r}."
            )
    return [experiment for experiment in every if {"all", experiment.name} & set(names)]


@dataclass(frozen=True, slots=True)
class Reproduction:
    """The outcome of an experiment."""

    name: str
    title: str
    results: str
    """Path of the file with the rows."""
    figure: str
    """Path of the figure."""
    rows: int
    """Number of rows that the figure and the claims use."""
    missing: int
    """Number of runs that are still to be made."""
    cuts: str
    """Differences of the settings of a quick scope from the full ones; empty for a full scope."""
    claims: list[str]
    """The paper's claims about the figure, and whether the rows agree."""

    def as_json(self) -> str:
        """Return the fields as a JSON object on one line."""
        return json.dumps(asdict(self), ensure_ascii=False)


def run_experiment(
    experiment: Experiment,
    scope: Scope,
    folder: Path,
    *,
    jobs: int | None = None,
    on_run: Callable[[int, int, Row], None] = lambda done, total, row: None,
) -> Reproduction:
    """Make the runs that are missing in a folder, draw the figure, and check the claims.

    Args:
        experiment: the experiment.
        scope: the part of it to run.
        folder: the folder for rows and figure.
        jobs: number of processes; None for one per core, or one on a GPU.
        on_run: called after each run with the number of finished runs, the number of known runs,
            and the newest row.
    """
    check_released([experiment], scope)
    check_tables([experiment], scope, folder)
    if jobs is None:
        jobs = (os.cpu_count() or 1) if scope.device == "cpu" else 1
    runs = Runs(_results_path(experiment, scope, folder))
    make_runs(experiment, runs, scope, jobs=jobs, on_run=on_run)
    return draw_experiment(experiment, scope, folder)


def draw_experiment(experiment: Experiment, scope: Scope, folder: Path) -> Reproduction:
    """Draw the figure and check the claims from the rows in a folder, without new runs."""
    check_released([experiment], scope)
    results = _results_path(experiment, scope, folder)
    status = run_status(experiment, Runs(results), scope)
    if not status.rows:
        raise InputError(f"{results} has no rows of these settings; run the experiment first.")
    try:
        claims = experiment.claims(status.rows)
        figure = experiment.draw(status.rows, results.with_suffix(".png"))
    except (LookupError, ArithmeticError, ValueError) as error:
        if not status.missing:
            raise
        raise InputError(
            f"{results} has too few rows to draw: {counted(len(status.missing), 'run')} missing; "
            "run the experiment again to complete them."
        ) from error
    return Reproduction(
        name=experiment.name,
        title=experiment.title,
        results=str(results),
        figure=str(figure),
        rows=len(status.rows),
        missing=len(status.missing),
        cuts=quick_differences(experiment, scope) if scope.quick else "",
        claims=claims,
    )


def check_released(experiments: Sequence[Experiment], scope: Scope) -> None:
    """Raise an error if the scope asks for released settings of an experiment without them."""
    lacking = [each.name for each in experiments if scope.released and not each.has_released]
    if lacking:
        known = ", ".join(each.name for each in all_experiments() if each.has_released)
        raise InputError(
            f"{', '.join(lacking)}: no released settings are known; `--as released` is for {known}."
        )


def check_tables(experiments: Sequence[Experiment], scope: Scope, folder: Path) -> None:
    """Raise an error if a run that is still to be made needs a data set that is not found."""
    lacking = {each.name: _missing_tables(each, scope, folder) for each in experiments}
    tables = list(dict.fromkeys(table for names in lacking.values() for table in names))
    if not tables:
        return
    files = ", ".join(f"{table}.csv.gz" for table in tables)
    folders = ", ".join(map(str, table_folders()))
    blocked = ", ".join(name for name, names in lacking.items() if names)
    runnable = " ".join(name for name, names in lacking.items() if not names)
    raise DataNotFoundError(
        f"{blocked}: no {files} in {folders}; copy the missing files there, or point "
        "WINNOWGP_DATA at the folder that has them (`winnow data` lists their sources). "
        "Nothing was run." + (f" Without them: winnow reproduce {runnable}" if runnable else "")
    )


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The runs of a scope, as far as they are known."""

    rows: list[Row]
    """Rows of finished runs in the order of their settings; rows of other settings are left out."""
    missing: list[Row]
    """Settings of the runs that are still to be made."""


def run_status(experiment: Experiment, runs: Runs, scope: Scope) -> RunStatus:
    """Return which runs of a scope exist and which are missing."""
    existing, rows = list(runs), []
    while True:
        # JSON turns tuples into lists; compare settings as they are read from a file.
        wanted = [
            json.loads(json.dumps(settings, allow_nan=False))
            for settings in experiment.settings(scope, rows)
        ]
        pairs = [(settings, _first_match(existing, settings)) for settings in wanted]
        matches = [row for _, row in pairs if row is not None]
        if len(matches) == len(rows):
            return RunStatus(matches, [settings for settings, row in pairs if row is None])
        rows = matches


def make_runs(
    experiment: Experiment,
    runs: Runs,
    scope: Scope,
    *,
    jobs: int = 1,
    on_run: Callable[[int, int, Row], None] = lambda done, total, row: None,
) -> list[Row]:
    """Make every run whose row is missing, and write each row as soon as its run ends.

    A run that fails does not stop the others; its error is raised after them. Runs that measure
    time (`Experiment.runs_alone`) come last, one at a time in this process.

    Args:
        experiment: the experiment.
        runs: the file of its rows.
        scope: the part of the experiment to run.
        jobs: number of processes with one thread each; 1 for this process and its threads.
        on_run: called after each run with the number of finished runs, the number of known runs,
            and the newest row.

    Returns:
        All rows of the scope.
    """
    while (status := run_status(experiment, runs, scope)).missing:
        done, total = len(status.rows), len(status.rows) + len(status.missing)
        failures: list[Exception] = []
        together = [each for each in status.missing if not experiment.runs_alone(each)]
        batch, processes = (together, jobs) if together else (status.missing, 1)
        for outcome in _outcomes(experiment, batch, scope, processes):
            if isinstance(outcome, Exception):
                failures.append(outcome)
                continue
            runs.add(outcome)
            done += 1
            on_run(done, total, outcome)
        if failures:
            failures[0].add_note(f"{len(failures)} of {total} runs failed; the others are written.")
            raise failures[0]
    return status.rows


def quick_differences(experiment: Experiment, scope: Scope) -> str:
    """Return in one line how the settings of a quick scope differ from the full ones."""
    quick = experiment.settings(scope, [])
    full = experiment.settings(Scope(released=scope.released), [])
    differences = [f"{counted(len(quick), 'run')} instead of {len(full)}"]
    quick_values, full_values = _setting_values(quick), _setting_values(full)
    for name, values in quick_values.items():
        if name in full_values and set(values) != set(full_values[name]):
            lists = (_abbreviated(each) for each in (values, full_values[name]))
            differences.append(f"{name} {' instead of '.join(lists)}")
    return "; ".join(differences)


def _setting_values(settings: Sequence[Row]) -> dict[str, list[str]]:
    """Return the distinct values of each setting; a nested setting has both names."""
    values: dict[str, dict[str, None]] = {}
    for row in settings:
        for name, value in row.items():
            for inner_name, inner in value.items() if isinstance(value, dict) else [("", value)]:
                text = f"{inner:g}" if isinstance(inner, int | float) else str(inner)
                values.setdefault(f"{name} {inner_name}".strip(), {})[text] = None
    return {name: list(texts) for name, texts in values.items()}


def _abbreviated(texts: Sequence[str]) -> str:
    return ", ".join(texts if len(texts) <= 4 else [*texts[:2], "...", texts[-1]])


def _results_path(experiment: Experiment, scope: Scope, folder: Path) -> Path:
    """Return the file of rows; quick and full rows, printed and released ones are apart."""
    suffix = "-released" * scope.released + "-quick" * scope.quick
    return folder / f"{experiment.name}{suffix}.jsonl"


def _missing_tables(experiment: Experiment, scope: Scope, folder: Path) -> list[str]:
    """Return the data sets that are not found, if there are runs left that need them."""
    runs = Runs(_results_path(experiment, scope, folder))
    if not experiment.tables or not run_status(experiment, runs, scope).missing:
        return []
    missing = []
    for table in experiment.tables:
        try:
            find_table(table)
        except DataNotFoundError:
            missing.append(table)
    return missing


def _first_match(rows: Sequence[Row], settings: Row) -> Row | None:
    absent = object()
    return next((r for r in rows if all(r.get(k, absent) == v for k, v in settings.items())), None)


def _outcomes(
    experiment: Experiment, missing: Sequence[Row], scope: Scope, jobs: int
) -> Iterator[Row | Exception]:
    """Make runs and yield a row or an error for each, in the order in which they end."""
    jobs = min(jobs, len(missing))
    if jobs == 1:
        yield from (_run_outcome(experiment, settings, scope) for settings in missing)
        return
    with _workers(jobs) as pool:
        futures: list[Future[Row | Exception]] = [
            pool.submit(_run_outcome, experiment, settings, scope) for settings in missing
        ]
        try:
            yield from (future.result() for future in as_completed(futures))
        except BrokenProcessPool as error:
            raise TrainingError(
                f"one of {jobs} worker processes was killed, most often because memory ran out; "
                "use fewer `jobs`. The rows of finished runs are written."
            ) from error


@contextmanager
def _workers(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool whose processes end with this one, and at once on an error."""
    others = set(active_children())
    # Forked children would inherit the locks of threads that they do not have.
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_start_worker)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(active_children()) - others:
            child.terminate()
        raise
    pool.shutdown()


def _start_worker() -> None:
    torch.set_num_threads(1)
    # Ctrl-C reaches every process of a terminal; the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """End the worker when its parent ends for any reason: its results would be lost."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_outcome(experiment: Experiment, settings: Row, scope: Scope) -> Row | Exception:
    wall, cpu = perf_counter(), process_time()
    try:
        results = experiment.run(settings, scope)
        if both := settings.keys() & results.keys():
            raise AssertionError(f"results that are settings already: {', '.join(sorted(both))}")
    except Exception as error:
        error.add_note(f"The settings of the run were {json.dumps(settings)}.")
        return error
    seconds = {"seconds": perf_counter() - wall, "cpu_seconds": process_time() - cpu}
    rounded = {name: round(value, 3) for name, value in seconds.items()}
    return {**settings, "device": scope.device, **rounded, **results}
