"""Make the runs of an experiment that are missing: in any order, in several processes, once."""

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import active_children, get_context, parent_process
from threading import Thread
from time import perf_counter, process_time

import torch

from winnowgp.errors import TrainingError
from winnowgp.experiments.experiment import Experiment, Scope
from winnowgp.experiments.runs import Row, Runs


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
