"""The number of inducing points of default fits: is it right, and is its report true?

    python benchmarks/right_number.py --what tables --seeds 0 1 --jobs 2
    python benchmarks/right_number.py --what tables --device cuda --only kin40k,protein
    python benchmarks/right_number.py --what truth rare columns --jobs 16 --minutes 30
    python benchmarks/right_number.py --summary                # print the results as Markdown

The parts (`--what`):

- tables: default fits of 90 % of the rows of each table in $WINNOWGP_DATA, beside the exact GP.
- truth: what fits report of draws from known GPs and of parts of tables, against a dense oracle.
- rare: rare classes and counts, with and without an effect of the inputs.
- columns: functions of few columns beside irrelevant ones.
- sizes: models that `resized` returns, against fresh fits of as many points.
- synthetic: points against noise, smoothness and clustering, in the paper's settings.
- peers: CPU time against GPflow's SGPR with as many points (`make peers` installs GPflow).

Each fit runs in a process of its own with one thread. Its row is appended to PART.jsonl in
benchmarks/results/right_number (`--folder`) when it ends; fits with a row are not repeated. Fits
of few rows come first. `--seeds` are those of splits, draws and fits.
"""

import argparse
import json
import multiprocessing
import os
import time
import traceback
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from measure import RESULTS, Row
from right_number_fits import gpflow_python, run_fit
from right_number_problems import PARTS, Settings, settings_of
from right_number_report import summary
from winnowgp.experiments.runs import Runs

FOLDER = RESULTS / "right_number"
"""Folder of the result files, if `--folder` is not given."""
EXACT_ROWS = {"cpu": 3000, "cuda": 20_000}
"""Rows up to which the exact GP is fitted, by device."""


def runs_of(part: str, folder: Path) -> Runs:
    """Return the result file of a part."""
    return Runs(folder / f"{part}.jsonl")


def key(settings: Settings) -> str:
    """Return a string that identifies a fit."""
    return json.dumps(settings, sort_keys=True)


def latest_rows(part: str, folder: Path) -> list[Row]:
    """Return the last row of each fit of a part, failed ones only if no other row exists."""
    rows: dict[str, Row] = {}
    for row in runs_of(part, folder):
        name = key(row["settings"])
        if "error" not in row or name not in rows:
            rows[name] = row
    return list(rows.values())


def pending(arguments: argparse.Namespace) -> list[Settings]:
    """Return the settings of the fits that are to run, those of few rows first."""
    chosen: list[Settings] = []
    for part in arguments.what:
        if part == "peers" and gpflow_python() is None:
            print("peers: skipped, GPflow cannot be imported; `make peers` installs it.")
            continue
        settings = settings_of(
            part,
            seeds=arguments.seeds,
            device=arguments.device,
            only=[name for name in arguments.only.split(",") if name],
            exact_rows=EXACT_ROWS[arguments.device],
        )
        if arguments.tolerance is not None:
            settings = [{**case, "tolerance": arguments.tolerance} for case in settings]
        done = {
            key(row["settings"])
            for row in latest_rows(part, arguments.folder)
            if "error" not in row
        }
        left = [s for s in settings if key(s) not in done]
        print(f"{part}: {len(left)} of {len(settings)} fits to run")
        chosen += left
    return sorted(chosen, key=lambda settings: settings["rows"])


def _work(settings: Settings, results: Connection) -> None:
    """Run one fit in this process, and send its row."""
    torch.set_num_threads(1)
    try:
        results.send(run_fit(settings, exact_rows=EXACT_ROWS[settings["device"]]))
    except Exception as error:
        trace = traceback.format_exc(limit=-3)
        results.send({"error": f"{type(error).__name__}: {error}", "traceback": trace})


def in_process(settings: Settings, *, deadline: float) -> Row | None:
    """Run one fit in a new process and return its row; None if it is too late to start.

    A process that is killed, such as one without memory, costs its own fit only.
    """
    if time.monotonic() > deadline:
        return None
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(settings, sender))
    process.start()
    sender.close()
    try:
        row = receiver.recv()
    except EOFError:
        process.join()
        row = {"error": f"the process ended with exit code {process.exitcode}"}
    process.join()
    return row


def run(arguments: argparse.Namespace) -> None:
    """Run the fits that have no row yet, and append a row as each of them ends."""
    deadline = time.monotonic() + 60 * arguments.minutes
    # Read by the libraries when the processes of the fits load them.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    torch.set_num_threads(1)
    fits, ended, late = pending(arguments), 0, 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        futures = {
            pool.submit(in_process, settings, deadline=deadline): settings for settings in fits
        }
        for future in as_completed(futures):
            settings, row = futures[future], future.result()
            if row is None:
                late += 1
                continue
            ended += 1
            runs = runs_of(settings["what"], arguments.folder)
            runs.add({"settings": settings, "jobs": arguments.jobs, **row})
            print(f"{ended}/{len(fits)} {_line(settings, row)}", flush=True)
    if late:
        print(f"{late} fits were not started within {arguments.minutes:g} minutes; run it again.")


def _line(settings: Settings, row: Row) -> str:
    words = " ".join(f"{name}={value}" for name, value in settings.items() if name != "device")
    if "points" not in row:
        return f"{words}: {row.get('error') or row.get('skipped')}"
    limit = row["growth_limit"]
    return f"{words}: {row['points']} points, {row['cpu_s']:.1f} CPU s, limit {limit}"


def main() -> None:
    """Parse the command line; run fits, or print their summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--what", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--jobs", type=int, default=1, help="fits that run at the same time")
    parser.add_argument("--only", default="", help="names of tables or draws, comma-separated")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder of the result files")
    parser.add_argument("--tolerance", type=float, help="tolerance of the fits; the default one")
    parser.add_argument("--minutes", type=float, default=1e6, help="start no fits after this time")
    parser.add_argument("--summary", action="store_true", help="print the results and run nothing")
    arguments = parser.parse_args()
    if not arguments.summary:
        run(arguments)
        return
    for part in arguments.what:
        if rows := latest_rows(part, arguments.folder):
            print(summary(part, rows))


if __name__ == "__main__":
    main()
