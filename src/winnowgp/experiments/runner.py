"""Running experiments in processes and drawing their figures."""

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
from winnowgp.experiments.base import Experiment, Row, Runs, Scope, counted, quick_cuts
from winnowgp.experiments.gplvm import Gplvm
from winnowgp.experiments.gradient_variance import Estimators
from winnowgp.experiments.illustration import Illustration
from winnowgp.experiments.kin8nm_deep import Kin8nmDeep
from winnowgp.experiments.noise import Noise
from winnowgp.experiments.real import Real
from winnowgp.experiments.square_wave import SquareWave
from winnowgp.experiments.synthetic import Synthetic

# The paper's experiments by name, in the order of their figures.


EXPERIMENTS: tuple[type[Experiment], ...] = (
    Illustration,
    Noise,
    Synthetic,
    Real,
    SquareWave,
    Kin8nmDeep,
    Gplvm,
    Estimators,
)


def named(*names: str) -> list[Experiment]:
    """The experiments of some names, each once, or every one for "all".

    >>> [experiment.title for experiment in named("noise")]
    ['figure 2: the more noise, the fewer points an accurate posterior needs']
    """
    known = [kind.name for kind in EXPERIMENTS]
    for name in names:
        if name not in ("all", *known):
            raise InputError(f"`name` must be all or one of {', '.join(known)}; got {name!r}.")
    return [kind() for kind in EXPERIMENTS if "all" in names or kind.name in names]


# Make the runs of an experiment that are missing: in any order, in several processes, once.


@dataclass(frozen=True, slots=True)
class Asked:
    """What a scope asks of an experiment, as far as it is known by now."""

    rows: list[Row]
    """Of runs that are made, in the order of their settings; rows of other settings are not."""
    missing: list[Row]
    """Settings of runs that are not."""


def asked(experiment: Experiment, runs: Runs, scope: Scope) -> Asked:
    """Which rows there are, and which are missing."""
    existing, rows = list(runs), []
    while True:
        # As they will come back from a file: tuples as lists.
        wanted = [_plain(settings) for settings in experiment.settings(scope, rows)]
        pairs = [(settings, _first(existing, settings)) for settings in wanted]
        found = [row for _, row in pairs if row is not None]
        if len(found) == len(rows):
            return Asked(found, [settings for settings, row in pairs if row is None])
        rows = found


def make_runs(
    experiment: Experiment,
    runs: Runs,
    scope: Scope,
    *,
    jobs: int = 1,
    on_run: Callable[[int, int, Row], None] = lambda done, total, row: None,
) -> list[Row]:
    """Make every run whose row is missing, each row written as soon as its run ends.

    A run that fails does not keep the others from being made; its error is raised after them. Runs
    that measure time (`Experiment.alone`) come last, one at a time in this process.

    Args:
        jobs: processes, of one thread each; with 1, this process and its threads.
        on_run: told how many runs are done, of how many are known, and the newest row.

    Returns:
        All rows that the scope asks for.
    """
    while (found := asked(experiment, runs, scope)).missing:
        done, total = len(found.rows), len(found.rows) + len(found.missing)
        failures: list[Exception] = []
        together = [settings for settings in found.missing if not experiment.alone(settings)]
        for made in _made(experiment, together or found.missing, scope, jobs if together else 1):
            if isinstance(made, Exception):
                failures.append(made)
                continue
            runs.add(made)
            done += 1
            on_run(done, total, made)
        if failures:
            failures[0].add_note(f"{len(failures)} of {total} runs failed; the others are written.")
            raise failures[0]
    return found.rows


def _plain(settings: Row) -> Row:
    return json.loads(json.dumps(settings, allow_nan=False))


def _first(rows: Sequence[Row], settings: Row) -> Row | None:
    absent = object()
    return next((r for r in rows if all(r.get(k, absent) == v for k, v in settings.items())), None)


def _made(
    experiment: Experiment, missing: Sequence[Row], scope: Scope, jobs: int
) -> Iterator[Row | Exception]:
    jobs = min(jobs, len(missing))
    if jobs == 1:
        yield from (_one(experiment, settings, scope) for settings in missing)
        return
    with _workers(jobs) as pool:
        futures: list[Future[Row | Exception]] = [
            pool.submit(_one, experiment, settings, scope) for settings in missing
        ]
        try:
            yield from (future.result() for future in as_completed(futures))
        except BrokenProcessPool as error:
            raise TrainingError(
                f"one of {jobs} processes was ended from outside, most often for want of memory; "
                "ask for fewer `jobs`. Rows that were made are kept."
            ) from error


@contextmanager
def _workers(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that end with this one, and at once when what they do is no longer wanted."""
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
    # Ctrl-C reaches every process of a terminal; the first one decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """However the parent ended: what a worker finds out after that, nobody would write."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _one(experiment: Experiment, settings: Row, scope: Scope) -> Row | Exception:
    wall, cpu = perf_counter(), process_time()
    try:
        results = experiment.measured(settings, scope)
        if both := settings.keys() & results.keys():
            raise AssertionError(f"results that are settings already: {', '.join(sorted(both))}")
    except Exception as error:
        error.add_note(f"It came of the run {json.dumps(settings)}.")
        return error
    seconds = {"seconds": perf_counter() - wall, "cpu_seconds": process_time() - cpu}
    rounded = {name: round(value, 3) for name, value in seconds.items()}
    return {**settings, "device": scope.device, **rounded, **results}


# An experiment from first run to figure, in a folder.


@dataclass(frozen=True, slots=True)
class Reproduction:
    """What came of an experiment."""

    name: str
    title: str
    results: str
    """The file of rows."""
    figure: str
    """The picture that was drawn of them."""
    rows: int
    """That the figure and the claims rest on."""
    missing: int
    """Runs still to be made."""
    cuts: str
    """What a quick look left out; empty for a full one."""
    claims: list[str]
    """What the paper says of the figure, and whether these rows agree."""

    def as_json(self) -> str:
        """One object on one line."""
        return json.dumps(asdict(self), ensure_ascii=False)


def reproduced(
    experiment: Experiment,
    scope: Scope,
    folder: Path,
    *,
    jobs: int | None = None,
    on_run: Callable[[int, int, Row], None] = lambda done, total, row: None,
) -> Reproduction:
    """Make the runs that are missing in `folder`, then draw and judge.

    Args:
        jobs: runs at once; None for one a core, or one on a GPU.
    """
    check_tables([experiment], scope, folder)
    if jobs is None:
        jobs = (os.cpu_count() or 1) if scope.device == "cpu" else 1
    make_runs(
        experiment, Runs(_results(experiment, scope, folder)), scope, jobs=jobs, on_run=on_run
    )
    return drawn(experiment, scope, folder)


def check_tables(experiments: Sequence[Experiment], scope: Scope, folder: Path) -> None:
    """Refuse to begin where runs that are still to be made need data sets that are not here."""
    lacking = {each.name: _lacking(each, scope, folder) for each in experiments}
    tables = list(dict.fromkeys(table for names in lacking.values() for table in names))
    if not tables:
        return
    files = ", ".join(f"{table}.csv.gz" for table in tables)
    folders = ", ".join(map(str, table_folders()))
    needy = ", ".join(name for name, names in lacking.items() if names)
    free = " ".join(name for name, names in lacking.items() if not names)
    raise DataNotFoundError(
        f"{needy}: no {files} in {folders}; put what is missing there, or point WINNOWGP_DATA at "
        "the folder that holds it (`winnow data` says where each comes from). Nothing was run."
        + (f" Without them: winnow reproduce {free}" if free else "")
    )


def _lacking(experiment: Experiment, scope: Scope, folder: Path) -> list[str]:
    """Its data sets that are not on this machine, if there is anything left to run on them."""
    runs = Runs(_results(experiment, scope, folder))
    if not experiment.tables or not asked(experiment, runs, scope).missing:
        return []
    return [table for table in experiment.tables if not _present(table)]


def _present(table: str) -> bool:
    try:
        find_table(table)
    except DataNotFoundError:
        return False
    return True


def drawn(experiment: Experiment, scope: Scope, folder: Path) -> Reproduction:
    """Draw and judge the rows there are, and make none."""
    results = _results(experiment, scope, folder)
    found = asked(experiment, Runs(results), scope)
    if not found.rows:
        raise InputError(f"{results} has no rows of these settings; make the runs first.")
    try:
        claims = experiment.claims(found.rows)
        figure = experiment.draw(found.rows, results.with_suffix(".png"))
    except (LookupError, ArithmeticError, ValueError) as error:
        if not found.missing:
            raise
        raise InputError(
            f"{results} has too few rows to draw: {counted(len(found.missing), 'run')} missing; "
            "make the rest first."
        ) from error
    return Reproduction(
        name=experiment.name,
        title=experiment.title,
        results=str(results),
        figure=str(figure),
        rows=len(found.rows),
        missing=len(found.missing),
        cuts=quick_cuts(experiment, scope) if scope.quick else "",
        claims=claims,
    )


def _results(experiment: Experiment, scope: Scope, folder: Path) -> Path:
    """Quick rows never lie among full ones."""
    return folder / f"{experiment.name}{'-quick' if scope.quick else ''}.jsonl"
