"""Six tables, and what their owner could use: density, calibration, CPU seconds, memory.

    make peers                            # install the peers, run what has no row, write the pages
    python benchmarks/libraries.py --tables concrete --methods winnowgp catboost
    python benchmarks/libraries.py --methods winnowgp --again    # ours, of another source
    python benchmarks/libraries.py --tables protein --methods winnowgp --device cuda
    python benchmarks/libraries.py --page     # write tables and pictures, run nothing

Every method has the same splits, 90 % of the rows of a seeded permutation, standardised by the
training rows, and one thread; `peers/worker.py` has its settings and runs in a virtual environment
of its own. A fit that passes `--limit` CPU seconds is ended, and its row says so; one that is
expected to take longer, by fits of the same method to other tables, is not started, and one of more
than five minutes is fitted to one split (`planned_splits`). Rows that exist are not made again,
unless they failed with a lower limit. A later row of the same fit replaces an earlier one. Seconds
of different machines are not comparable: each row names its processor, and the page marks those of
another processor than most rows have.
"""

import argparse
import json
import os
import platform
import resource
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from math import log
from operator import itemgetter
from pathlib import Path
from statistics import stdev
from tempfile import TemporaryDirectory

import numpy as np

from calibration import LEVELS, calibration, coverage_tables, draw_histograms
from libraries_plots import draw
from measure import RESULTS, Row, grouped, markdown, mean, replace_sections
from right_number_problems import TABLES, split_table
from winnowgp.experiments.runs import Runs, versions

FILE = RESULTS / "peers.jsonl"
SMALL = tuple(RESULTS / f"small_tables_seed{seed}.jsonl" for seed in (12, 13))
SMALL_SIZES = {50: "under 50 rows", 200: "50 to 199 rows", 1000: "200 to 800 rows"}
"""Groups of small tables, by the number of rows that they do not reach."""
DOCS = Path(__file__).parents[1] / "docs"
PEERS = Path(__file__).parent / "peers"
SEEDS = {
    name: (20, 21, 22, 23, 24) if rows < 5000 else (20, 21, 22) for name, rows in TABLES.items()
}
"""Seeds of the splits; no setting was chosen on them."""
SWEEP = (32, 128, 512)
ENVIRONMENTS = {
    "winnowgp": None,
    **{f"gpflow-sgpr-{M}": "gpflow" for M in SWEEP},
    **{f"gpytorch-svgp-{M}": "gpytorch" for M in SWEEP},
    "gpytorch-exact": "gpytorch",
    "sklearn-gpr": "trees",
    "gpboost-vecchia": "gpboost",
    "gpboost-vif": "gpboost",
    "catboost": "trees",
    "catboost-stopped": "trees",
    "ngboost": "trees",
    "ngboost-stopped": "trees",
    "xgb-distribution": "trees",
    "lightgbm": "trees",
}
"""Methods, and the virtual environments in which they run; None for this interpreter."""
EXACT = ("gpytorch-exact", "sklearn-gpr")
EXACT_ROWS = 8000
"""Largest number of training rows of exact GPs, whose memory grows with its square."""
ERRORS = 2.0
"""A mean difference counts if it exceeds this number of standard errors over splits."""
LIMIT = 900
"""CPU seconds of a fit at most; one that is expected to take longer is not started."""
ONE_SPLIT = 300
"""CPU seconds of a fit from which on one split of a table is enough."""
UNITS = "table", "seed", "method"


def cases(tables: Sequence[str], methods: Sequence[str]) -> list[tuple[str, int, str]]:
    """Return table, seed and method of every fit: the first split of each table first."""
    seeds = sorted({seed for name in tables for seed in SEEDS[name]})
    return [
        (name, seed, method)
        for seed in seeds
        for name in tables
        for method in methods
        if seed in SEEDS[name] and not (method in EXACT and TABLES[name] > EXACT_ROWS / 0.9)
    ]


def expected_seconds(rows: Iterable[Row], table: str, method: str) -> float:
    """Return the CPU seconds of a fit, in proportion to the most similar fits that have been made.

    Sparse GPs and trees take a time in proportion to the rows, exact GPs to their third power, and
    minibatches the same for any number; inducing points count by their square. Without any fit of
    the method the time is not known: 0.
    """
    base, size = _size(method)
    power = 3 if method in EXACT else 0 if base == "gpytorch-svgp" else 1
    costs: dict[float, list[float]] = {}
    for row in rows:
        other, M = _size(row["method"])
        if other == base and "cpu_s" in row:
            factor = (TABLES[table] / TABLES[row["table"]]) ** power * (size / M) ** 2
            costs.setdefault(factor, []).append(factor * row["cpu_s"])
    if not costs:
        return 0.0
    return mean(costs[min(costs, key=lambda factor: abs(log(factor)))])


def planned_splits(rows: Sequence[Row], table: str, method: str, *, limit: int = LIMIT) -> int:
    """Return the number of splits that a method is fitted to: one or none if fits take long."""
    if method in EXACT and TABLES[table] > EXACT_ROWS / 0.9:
        return 0
    seconds = expected_seconds(rows, table, method)
    if seconds > limit:
        return 0
    return 1 if seconds > ONE_SPLIT else len(SEEDS[table])


def _size(method: str) -> tuple[str, int]:
    """Return the method without its number of inducing points, and the number.

    >>> _size("gpflow-sgpr-128"), _size("gpboost-vif")
    (('gpflow-sgpr', 128), ('gpboost-vif', 1))
    """
    base, _, size = method.rpartition("-")
    return (base, int(size)) if size.isdigit() else (method, 1)


def latest(rows: Iterable[Row]) -> list[Row]:
    """Return the last row of each fit."""
    return list({tuple(row[unit] for unit in UNITS): row for row in rows}.values())


def is_final(row: Row, *, limit: int, again: bool) -> bool:
    """Return whether a fit need not be repeated.

    Args:
        limit: CPU seconds of a fit; one that failed with fewer is repeated.
        again: repeat ours if the source has changed.
    """
    if again and row["method"] == "winnowgp" and row.get("source") != versions()["source"]:
        return False
    return "error" not in row or row["limit"] >= limit


def run(
    name: str, seed: int, method: str, limit: int, python: str | None, device: str
) -> Row | None:
    """Return the row of one fit; None if the method is not installed.

    Args:
        limit: CPU seconds after which the fit is ended.
        python: interpreter of all methods; None for their own environments.
        device: "cpu", or "cuda" for methods that use it.
    """
    environment = ENVIRONMENTS[method]
    if python is None:
        own = PEERS / f".venv-{environment}" / "bin" / "python"
        python = sys.executable if environment is None else str(own)
        if not Path(python).exists():
            print(f"{method}: {own} does not exist; `make peers` installs it.", file=sys.stderr)
            return None
    problem = split_table(name, seed=seed).standardised()
    case: Row = {"table": name, "seed": seed, "method": method, "N": problem.N}
    case |= {"test": len(problem.y_test), "limit": limit, "processor": processor()}
    base, _, size = method.rpartition("-")
    options = ["--size", size] if size.isdigit() else []
    with TemporaryDirectory() as folder:
        split, predictions = Path(folder) / "split.npz", Path(folder) / "predictions.npz"
        np.savez(
            split,
            X=problem.X,
            y=problem.y,
            X_test=problem.X_test,
            y_test=problem.y_test,
            levels=np.array(LEVELS),
        )
        worker = [python, PEERS / "worker.py", base if options else method, split, predictions]
        done = subprocess.run(
            [*map(str, worker), "--seed", str(seed), "--device", device, *options],
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=None if device == "cuda" else lambda: _limit_cpu(limit),
            env={**os.environ, "PYTHONWARNINGS": "ignore"}
            | ({"CUDA_VISIBLE_DEVICES": "0"} if device == "cuda" else {}),
        )
        if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            return case | {"error": f"more than {limit} CPU s, or killed"}
        if done.returncode < 0:
            print(f"{method} on {name}: ended by signal {-done.returncode}", file=sys.stderr)
            return None
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            if "No module named" in last:
                print(f"{method}: {last}", file=sys.stderr)
                return None
            return case | {"error": last[:200]}
        found = dict(np.load(predictions))
    return case | json.loads(str(found.pop("row"))) | scores(found, problem.y_test)


def _limit_cpu(seconds: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))


def scores(predictions: dict[str, np.ndarray], y: np.ndarray) -> Row:
    """Return log density, RMSE and calibration, in standard deviations of the training targets."""
    row: Row = {"rmse": float(np.sqrt(np.mean((predictions["mean"] - y) ** 2)))}
    if "log_density" in predictions:
        row["log_density"] = float(predictions["log_density"].mean())
    return row | calibration(predictions["quantiles"], y)


def processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), "")


def comparable(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of splits that we have a row of; all rows of tables without one of ours.

    Densities of different splits of a table differ by more than those of methods, so that means
    over different splits must not stand side by side.
    """
    ours = {(r["table"], r["seed"]) for r in rows if r["method"] == "winnowgp"}
    tables = {table for table, _ in ours}
    return [r for r in rows if r["table"] not in tables or (r["table"], r["seed"]) in ours]


def differences(rows: Sequence[Row], column: str) -> dict[tuple[str, str], list[float]]:
    """Return, by table and method, the value of a column minus ours on each common split."""
    ours = {
        (row["table"], row["seed"]): row[column]
        for row in rows
        if row["method"] == "winnowgp" and column in row
    }
    result: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        key = row["table"], row["seed"]
        if row["method"] != "winnowgp" and key in ours and column in row:
            result.setdefault((row["table"], row["method"]), []).append(row[column] - ours[key])
    return result


def paired(rows: Sequence[Row], table: str, method: str, column: str) -> float:
    """Return the mean of a column; of methods that have fewer splits than ours, our mean plus the
    mean difference on common splits, because splits differ by more than methods."""
    own = {
        name: [
            r[column] for r in rows if (r["table"], r["method"]) == (table, name) and column in r
        ]
        for name in ("winnowgp", method)
    }
    gaps = differences(rows, column).get((table, method), [])
    if gaps and len(gaps) < len(own["winnowgp"]):
        return mean(own["winnowgp"]) + mean(gaps)
    return mean(own[method])


def verdict(gaps: Sequence[float]) -> str:
    """Return whether another method's density is higher or lower than ours, or level.

    >>> verdict([0.1, 0.12, 0.11]), verdict([-0.1, 0.1]), verdict([-0.2, -0.21]), verdict([0.3])
    ('higher', 'level', 'lower', 'one split')
    """
    if len(gaps) < 2:
        return "one split"
    error = stdev(gaps) / len(gaps) ** 0.5
    if abs(mean(gaps)) <= ERRORS * error:
        return "level"
    return "higher" if mean(gaps) > 0 else "lower"


def losses(rows: Sequence[Row]) -> list[str]:
    """Return where another method has a higher mean density than ours, or fits in less time."""
    lines = []
    gaps = differences(rows, "log_density")
    for table in dict.fromkeys(table for table, _ in gaps):
        better = {method: each for (name, method), each in gaps.items() if name == table}
        worse = [f"{m} ({mean(g):+.3f}, {verdict(g)})" for m, g in better.items() if mean(g) > 0]
        times = {m: g for (name, m), g in differences(rows, "cpu_s").items() if name == table}
        faster = [method for method, each in times.items() if mean(each) < 0]
        line = f"- **{table}**: higher density than ours: {', '.join(worse) or 'none'}."
        if times:
            line += f" Less CPU time to fit: {', '.join(faster) or 'none'}."
        lines.append(line)
    return lines


def summary(rows: Sequence[Row]) -> str:
    """Return a heading and a Markdown table for each data table: a line per method, means over
    splits."""
    gaps, lines = differences(rows, "log_density"), {}
    usual = Counter(row["processor"] for row in rows).most_common(1)[0][0]
    header = ["method", ">splits", ">test log density", ">minus ours", ">RMSE", ">90 % hold"]
    header += [">fit, CPU s", ">predict, CPU s", ">memory, MB", ">points"]
    for (table, method), own in grouped(sorted(rows, key=_order), "table", "method").items():
        good = [row for row in own if "error" not in row]
        each = lines.setdefault(f"### {table}: {own[0]['N']:,} training rows", [])
        if not good:
            each.append([f"`{method}`", 0, *[""] * 4, cost(own, usual), *[""] * 3])
            continue

        def shown(column: str, digits: int, good: list[Row] = good) -> str:
            values = [row[column] for row in good if row.get(column) is not None]
            return f"{mean(values):.{digits}f}" if values else ""

        each.append(
            [
                f"`{method}`",
                len(good),
                shown("log_density", 3),
                _difference(gaps.get((table, method), [])),
                shown("rmse", 3),
                shown("coverage_90", 3),
                cost(own, usual),
                shown("predict_s", 2),
                shown("memory_mb", 0),
                shown("size", 0),
            ]
        )
    return "\n\n".join(f"{title}\n\n{markdown(header, each)}" for title, each in lines.items())


def _difference(gaps: Sequence[float]) -> str:
    """Return the mean of the differences, in bold if it is higher or lower than zero."""
    if not gaps:
        return ""
    text = f"{mean(gaps):+.3f}"
    return f"**{text}**" if verdict(gaps) in ("higher", "lower") else text


def _order(row: Row) -> tuple[int, int]:
    return list(TABLES).index(row["table"]), list(ENVIRONMENTS).index(row["method"])


def cost(rows: Sequence[Row], usual: str) -> str:
    """Return the mean CPU seconds of fits, or the seconds of a GPU; why fits failed, if all did.

    Args:
        rows: fits of one table by one method.
        usual: the processor of most fits; seconds of another one have a star.
    """
    good = [row for row in rows if "error" not in row]
    if not good:
        return rows[-1]["error"]
    if any("device" in row for row in good):
        return f"{mean(row['wall_s'] for row in good if 'device' in row):.0f} on a GPU"
    star = "*" if any(row["processor"] != usual for row in good) else ""
    return f"{mean(row['cpu_s'] for row in good):.1f}{star}"


def progress(rows: Sequence[Row], *, limit: int = LIMIT) -> str:
    """Return a Markdown table of how many of the planned splits each method has been fitted to."""
    good = Counter((row["table"], row["method"]) for row in rows if "error" not in row)
    ended = {(row["table"], row["method"]) for row in rows if "error" in row}

    def cell(table: str, method: str) -> str:
        seconds = expected_seconds(rows, table, method)
        planned = planned_splits(rows, table, method, limit=limit)
        done = good[table, method]
        if done:
            return f"{done} of {max(done, planned)}"
        if (table, method) in ended:
            return f"ended after {limit // 60} CPU min"
        if seconds > limit:
            return f"too long: about {seconds / 60:.0f} CPU min"
        if not planned:
            return "–"
        return (
            f"not yet run: about {max(seconds / 60, 1):.0f} CPU min" if seconds else "not yet run"
        )

    lines = [[method, *(cell(table, method) for table in TABLES)] for method in ENVIRONMENTS]
    return markdown(["method", *TABLES], lines)


def version_list(rows: Sequence[Row]) -> str:
    """Return the versions of the packages; of ours the source, which its rows name."""
    found: dict[str, dict[str, None]] = {}
    names: dict[str, str] = {"xgb": "xgboost-distribution", "sklearn": "scikit-learn"}
    for row in rows:
        first: str = row["method"].split("-")[0]
        package = names.get(first, first)
        label = f"{row['version']} (source {row['source']})" if "source" in row else row["version"]
        found.setdefault(package, {})[label] = None
    return "; ".join(f"{package} {', '.join(labels)}" for package, labels in found.items())


def small_rows() -> list[Row]:
    """Return the fits of small tables by `small_tables.py`, grouped by size in place of a table."""
    names = {"default": "winnowgp", "exact GP": "exact GP (RBF)"}
    return [
        row
        | {"method": names[row["method"]]}
        | {"table": next(text for most, text in SMALL_SIZES.items() if row["N"] < most)}
        for row in sorted((row for path in SMALL for row in Runs(path)), key=itemgetter("N"))
        if row["method"] in names
    ]


def write_pages(rows: list[Row]) -> None:
    """Write tables and pictures into the documentation."""
    every, rows = rows, comparable(rows)
    good = [row for row in rows if "error" not in row]
    groups = grouped([*sorted(good, key=_order), *small_rows()], "table", "method")
    ours = {row["table"] for row in rows if row["method"] == "winnowgp"}
    # Others have nothing to be compared with yet.
    shown = [name for name in TABLES if name in ours]
    draw(rows, shown, DOCS / "images", value=partial(paired, rows))
    draw_histograms(groups, DOCS / "images" / "peers-pit.png")
    replace_sections(
        DOCS / "benchmarks" / "libraries.md",
        peers=f"{summary(rows)}\n\nVersions: {version_list(good)}.",
        losses="\n".join(losses(good)),
        progress=progress(every),
    )
    replace_sections(DOCS / "benchmarks" / "calibration.md", calibration=coverage_tables(groups))


def _planned_seeds(
    case: tuple[str, int, str], runs: Runs, arguments: argparse.Namespace
) -> tuple[int, ...]:
    """Return the splits of a table that a method is fitted to; all of them on a GPU."""
    table, _, method = case
    if arguments.device == "cuda":
        return SEEDS[table]
    count = planned_splits(latest(runs), table, method, limit=arguments.limit)
    return SEEDS[table][:count]


def main() -> None:
    """Parse the command line; run fits that have no row yet, or write the pages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tables", nargs="+", default=list(TABLES), choices=list(TABLES))
    parser.add_argument(
        "--methods", nargs="+", default=list(ENVIRONMENTS), choices=list(ENVIRONMENTS)
    )
    parser.add_argument("--seeds", type=int, nargs="+", help="of the splits; all by default")
    parser.add_argument("--limit", type=int, default=LIMIT, help="CPU seconds of a fit at most")
    parser.add_argument("--jobs", type=int, default=1, help="fits that run at the same time")
    parser.add_argument("--python", help="interpreter that has all methods")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of torch")
    parser.add_argument("--again", action="store_true", help="repeat ours of another source")
    parser.add_argument("--page", action="store_true", help="write the pages, run nothing")
    arguments = parser.parse_args()
    runs = Runs(FILE)
    if arguments.page:
        write_pages(latest(runs))
        return
    options = {"limit": arguments.limit, "again": arguments.again}
    done = set(grouped((row for row in latest(runs) if is_final(row, **options)), *UNITS))
    todo = [
        (*case, arguments.limit, arguments.python, arguments.device)
        for case in cases(arguments.tables, arguments.methods)
        if case not in done
        and case[1] in (arguments.seeds or _planned_seeds(case, runs, arguments))
    ]
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for future in as_completed([pool.submit(run, *case) for case in todo]):
            if (row := future.result()) is not None:
                runs.add(row)
                shown = (row.get(name) for name in ("log_density", "cpu_s", "error"))
                print(*(row[unit] for unit in UNITS), *shown, flush=True)


if __name__ == "__main__":
    main()
