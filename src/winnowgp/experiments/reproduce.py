"""Make the runs of an experiment that are missing, then its figure."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from time import perf_counter

import torch

from winnowgp.experiments.experiment import Experiment, Scope
from winnowgp.experiments.runs import Row, Runs


def make_runs(
    experiment: Experiment,
    runs: Runs,
    scope: Scope,
    *,
    jobs: int = 1,
    on_run: Callable[[int, int, Row], None] = lambda done, total, row: None,
) -> None:
    """Make every run whose row is missing, each row written as soon as its run ends.

    Args:
        jobs: processes, of one thread each.
        on_run: told how many runs are done, of how many, and the newest row.
    """
    while missing := _missing(experiment, runs, scope):
        done = len(list(runs))
        total = done + len(missing)
        for row in _made(experiment, missing, scope, jobs):
            runs.add(row)
            done += 1
            on_run(done, total, row)


def _missing(experiment: Experiment, runs: Runs, scope: Scope) -> list[Row]:
    return [s for s in experiment.settings(scope, list(runs)) if not runs.find(**s)]


def _made(experiment: Experiment, missing: Sequence[Row], scope: Scope, jobs: int) -> Iterator[Row]:
    if jobs == 1:
        yield from (_one(experiment, settings, scope) for settings in missing)
        return
    # Forked children would inherit the locks of threads that they do not have.
    context = get_context("spawn")
    with ProcessPoolExecutor(
        jobs, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        futures = [pool.submit(_one, experiment, settings, scope) for settings in missing]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _one(experiment: Experiment, settings: Row, scope: Scope) -> Row:
    start = perf_counter()
    results = experiment.measured(settings, scope)
    seconds = perf_counter() - start
    return {**settings, **results, "seconds": round(seconds, 3), "device": scope.device}
