"""Bound against CPU seconds with M inducing points: winnowgp, GPflow's SGPR, GPyTorch's SGPR, SVGP.

    python benchmarks/fits.py --gpflow benchmarks/peers/.venv-gpflow/bin/python
    python benchmarks/fits.py --report                # print the results
    python benchmarks/fits.py --plot curves.png       # draw them

All methods have the same splits and an ARD squared-exponential kernel. For each cell (data, seed,
M) they run one after another, each in a process of its own with one thread, and record the bound
and CPU seconds after every step; fits that are already in the result file are not repeated. Seeds
11 to 13 are reported; 0 to 10 are for tuning. Results are in benchmarks/results/fits; earlier
versions' are in `fits_earlier` (seeds 8 to 10) and `fits_tuned` (seeds 5 to 7).

GPflow starts at cluster centres and takes up to 2,000 L-BFGS iterations; its seconds include the
compilation of its graph. GPyTorch starts there too, and uses Adam. winnowgp's seconds are those of
`fit` with `max_points`, and its curve has a point for each step on all rows. Both clocks of a ratio
stop at the same bound.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from measure import RESULTS, Row, markdown, table
from right_number_problems import TABLES, split_table
from winnowgp import fit
from winnowgp.data import Dataset
from winnowgp.estimators.kernels import kernel_from
from winnowgp.experiments.runs import Runs
from winnowgp.models import SparseGP
from winnowgp.training import FastSchedule, MaxPoints
from winnowgp.training.callbacks import Progress

DATA = ("concrete", "kin8nm", "protein", "kin40k")
POINTS = (64, 128, 256, 512)
SEEDS = (11, 12, 13)
PEERS = ("winnowgp", "gpflow-sgpr", "gpytorch-sgpr", "gpytorch-svgp")
# GPflow's numbers of L-BFGS iterations that are compared with.
ITERATIONS = (300, 2000)
# Nats per observation that are no difference between two local optima.
NEAR = 1e-3
# Larger tables are cut to so many rows, 90 % of them for training.
ROWS = 10_000
# Largest number of points of a curve that are stored.
STORED = 100
SCRIPTS = Path(__file__).parent / "peers"


def training_rows(name: str, *, seed: int) -> Dataset:
    """Return the standardised training rows that all methods use."""
    problem = split_table(name, seed=seed, train=int(0.9 * min(TABLES[name], ROWS))).standardised()
    return Dataset.of(torch.from_numpy(problem.X), torch.from_numpy(problem.y))


def fit_winnowgp(name: str, M: int, *, seed: int) -> Row:
    """Fit winnowgp and return a row with its curve."""
    train = training_rows(name, seed=seed)
    # GPyTorch's first kernel imports SymPy; no method's imports count.
    model = SparseGP(kernel_from("rbf", train.D), train.X[:0])
    curve: list[tuple[float, float]] = []
    start = time.process_time()

    def record(progress: Progress) -> None:
        # Smaller models, which the fit keeps as well, are optimised after its own.
        own = progress.phase == "optimisation" and len(progress.candidates[0]) == M
        if own and progress.rows is None:
            curve.append((time.process_time() - start, progress.objective))

    result = fit(
        model,
        train,
        schedule=FastSchedule(MaxPoints(M)),
        callbacks=record,
        generator=torch.Generator().manual_seed(seed),
    )
    return {
        "peer": "winnowgp",
        "dataset": name,
        "M": M,
        "seed": seed,
        "n_train": train.N,
        "elbo": result.elbo,
        "cpu_seconds": time.process_time() - start,
        "curve": curve,
    }


def run(arguments: argparse.Namespace) -> None:
    """Fit every cell that is not in the result file, alternating between the methods."""
    results = Runs(RESULTS / "fits" / f"{arguments.name}.jsonl")
    known = {_key(row) for row in results}
    commands = {
        "winnowgp": (sys.executable, __file__, "--one"),
        "gpflow-sgpr": (
            arguments.gpflow,
            SCRIPTS / "gpflow_sgpr.py",
            "--maxiter",
            arguments.iterations,
        ),
        "gpytorch-sgpr": (sys.executable, SCRIPTS / "gpytorch_sgpr.py"),
        "gpytorch-svgp": (sys.executable, SCRIPTS / "gpytorch_svgp.py"),
    }
    for M in arguments.points:
        for name in arguments.data:
            for seed in arguments.seeds:
                for peer in arguments.peers:
                    if (peer, name, M, seed) in known or commands[peer][0] is None:
                        continue
                    row = _separately(*commands[peer], name=name, M=M, seed=seed)
                    curve = row.pop("curve", [])
                    short = peer == "gpflow-sgpr" and len(curve) >= arguments.iterations
                    row |= {
                        "curve": thinned(curve),
                        "after": _marks(curve, arguments.iterations if short else ITERATIONS[-1]),
                    }
                    results.add(row)
                    print(f"{peer} {name} M={M} seed={seed}: ", end="")
                    print(f"{row['elbo']} nats, {row['cpu_seconds']:.1f} s", flush=True)


def _separately(*command: object, name: str, M: int, seed: int) -> Row:
    """Run one fit in a process of its own, with one thread."""
    options = ["--data-dir", os.environ["WINNOWGP_DATA"], "--dataset", name]
    options += ["--points", str(M), "--seed", str(seed), "--rows", str(ROWS)]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.jsonl"
        subprocess.run(
            [*map(str, command), *options, "--out", str(out)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            stderr=subprocess.DEVNULL,
            check=True,
        )
        return json.loads(out.read_text(encoding="utf-8"))


def thinned(curve: list[tuple[float, float]]) -> list[list[float]]:
    """Return about `STORED` points of a curve, evenly spaced in the logarithm of the step."""
    ratio = max(len(curve), 2) ** (1 / STORED)
    kept = {0, len(curve) - 1, *(round(ratio**i) for i in range(STORED))}
    return [[round(s, 3), round(elbo, 3)] for i, (s, elbo) in enumerate(curve) if i in kept]


def _marks(curve: list[tuple[float, float]], limit: int) -> dict[str, list[float]]:
    """Return CPU seconds and bound after some numbers of steps, or where fewer converged.

    Args:
        limit: largest number of steps that were allowed; marks beyond it are not known.
    """
    known = [n for n in ITERATIONS if curve and n <= limit]
    return {str(n): list(curve[min(n, len(curve)) - 1]) for n in known}


def _key(row: Row) -> tuple[Any, ...]:
    return row["peer"], row["dataset"], row["M"], row["seed"]


def seconds_to(row: Row, elbo: float) -> float:
    """Return the CPU seconds after which a curve has passed a bound; infinite if it never does."""
    return min((seconds for seconds, value in row["curve"] if value >= elbo), default=math.inf)


def seconds_of_both(ours: Row, peer: Row, iterations: int, *, margin: float) -> tuple[float, float]:
    """Return the CPU seconds after which winnowgp and GPflow have passed the same bound.

    Args:
        iterations: number of GPflow's iterations that the bound is of.
        margin: nats per observation by which the bound is lower.
    """
    seconds, elbo = peer["after"][str(iterations)]
    bound = elbo - margin * ours["n_train"]
    # The bounds of a curve are rounded, those after some iterations are not.
    return seconds_to(ours, bound), min(seconds_to(peer, bound), seconds)


def cells(rows: list[Row]) -> Iterator[tuple[Row, Row]]:
    """Iterate over the fits of winnowgp and GPflow of the same cell."""
    known = {_key(row): row for row in rows}
    for row in rows:
        other = known.get(("gpflow-sgpr", *_key(row)[1:]))
        if row["peer"] == "winnowgp" and other is not None and other["elbo"] is not None:
            yield row, other


def report(name: str) -> None:
    """Print a table of the cells, and the geometric means of the ratios of seconds."""
    rows = list(Runs(RESULTS / "fits" / f"{name}.jsonl"))
    header = ["data", "M", "seed", "ours", "s", "fit s"]
    for iterations in ITERATIONS:
        header += [f"GPflow {iterations}", "s", "we pass at", "ratio"]
        header += ["we near at", "s", "ratio"]
    header.append("final gap/obs")
    lines, whole_fits = [], dict[int, list[float]]()
    passed, near = dict[int, list[float]](), dict[int, list[float]]()
    for ours, peer in sorted(cells(rows), key=lambda pair: _key(pair[0])[1:]):
        reached = seconds_to(ours, ours["elbo"] - 0.1)
        line = [ours["dataset"], ours["M"], ours["seed"], f"{ours['elbo']:.1f}", f"{reached:.1f}"]
        line.append(f"{ours['cpu_seconds']:.1f}")
        for iterations in ITERATIONS:
            if str(iterations) not in peer["after"]:
                line += [""] * 7
                continue
            seconds, elbo = peer["after"][str(iterations)]
            whole_fits.setdefault(iterations, []).append(ours["cpu_seconds"] / seconds)
            line += [f"{elbo:.1f}"]
            for ratios, margin in ((passed, 0.0), (near, NEAR)):
                own, theirs = seconds_of_both(ours, peer, iterations, margin=margin)
                ratios.setdefault(iterations, []).append(own / theirs)
                both = [own, theirs] if margin else [theirs, own]
                line += [*(f"{s:.1f}" for s in both), f"{own / theirs:.2f}"]
        whole = str(ITERATIONS[-1]) in peer["after"]
        gap = (ours["elbo"] - peer["elbo"]) / ours["n_train"]
        line.append(f"{gap:+.4f}" if whole else "")
        lines.append(line)
    print(table(header, lines))
    for iterations, ratios in passed.items():
        _summarise(f"GPflow's bound after {iterations} iterations", ratios)
        _summarise(f"{NEAR} nats per observation below it", near[iterations])
        longer = [ratio for ratio in whole_fits[iterations] if ratio > 1]
        print(f"the whole fit takes longer than these iterations in {len(longer)} cells", end="")
        print(f", {max(longer):.2f} times at most" if longer else "")
    print()
    _ranges(name)
    _report_gpytorch(rows)


def _ranges(name: str) -> None:
    """Print the ranges over seeds of each table and number of points as Markdown."""
    groups: dict[tuple[str, int], list[tuple[Row, Row]]] = {}
    for ours, peer in cells(list(Runs(RESULTS / "fits" / f"{name}.jsonl"))):
        groups.setdefault((ours["dataset"], ours["M"]), []).append((ours, peer))
    header = ["table", ">M", ">seeds"]
    for iterations in ITERATIONS:
        header += [f">GPflow, {iterations:,} iterations, s", ">winnowgp passes, ratio", ">near"]
    lines = []
    for data in DATA:
        for M in POINTS:
            pairs = groups.get((data, M), [])
            if not pairs:
                continue
            line: list[object] = [data, M, len(pairs)]
            for iterations in ITERATIONS:
                known = [(own, peer) for own, peer in pairs if str(iterations) in peer["after"]]
                seconds = [peer["after"][str(iterations)][0] for _, peer in known]
                line.append(_range(seconds, ".0f"))
                for margin in (0.0, NEAR):
                    both = (seconds_of_both(*pair, iterations, margin=margin) for pair in known)
                    line.append(_range([own / theirs for own, theirs in both], ".2f"))
            gaps = [
                (own["elbo"] - peer["elbo"]) / own["n_train"]
                for own, peer in pairs
                if str(ITERATIONS[-1]) in peer["after"]
            ]
            lines.append([*line, _range(gaps, "+.4f")])
    print(markdown([*header, ">final gap"], lines))


def _range(values: list[float], style: str) -> str:
    """Return the least and the largest value; "never" for an infinite one."""
    words = ["never" if math.isinf(value) else f"{value:{style}}" for value in sorted(values)]
    return " to ".join(dict.fromkeys((words[0], words[-1]))) if words else ""


def _summarise(what: str, ratios: list[float]) -> None:
    """Print in how many cells a bound was passed, and in which share of GPflow's seconds."""
    passed = [ratio for ratio in ratios if ratio < math.inf]
    if passed:
        mean = math.exp(sum(map(math.log, passed)) / len(passed))
        slower = sum(ratio > 1 for ratio in passed)
        print(
            f"{what}: passed in {len(passed)} of {len(ratios)} cells, in {mean:.2f} of its seconds "
            f"to there (geometric mean), {min(passed):.2f} to {max(passed):.2f}, "
            f"later than GPflow in {slower}"
        )


def _report_gpytorch(rows: list[Row]) -> None:
    known = {_key(row): row for row in rows}
    lines = []
    for row in sorted(rows, key=_key):
        ours = known.get(("winnowgp", *_key(row)[1:]))
        if row["peer"].startswith("gpytorch") and ours is not None:
            cells = [row["peer"], row["dataset"], row["M"], row["seed"]]
            if row["elbo"] is None:
                lines.append([*cells, row.get("error", "")[:40], "", "", ""])
                continue
            gap = (ours["elbo"] - row["elbo"]) / row["n_train"]
            passed = seconds_to(ours, row["elbo"])
            cells += [f"{row['elbo']:.1f}", f"{row['cpu_seconds']:.1f}", f"{passed:.1f}"]
            lines.append([*cells, f"{gap:+.4f}"])
    if lines:
        header = ("peer", "data", "M", "seed", "ELBO", "s", "we pass at", "ours above/obs")
        print("\n" + table(header, lines))


def plot(name: str, path: Path) -> None:
    """Draw nats per observation below the best bound of a cell against CPU seconds."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    rows = list(Runs(RESULTS / "fits" / f"{name}.jsonl"))
    known = {(row["dataset"], row["M"]) for row in rows if row["peer"] == "winnowgp"}
    rows = [row for row in rows if (row["dataset"], row["M"]) in known]
    names = [data for data in DATA if any(row["dataset"] == data for row in rows)]
    points = sorted({row["M"] for row in rows})
    fig, axes = plt.subplots(
        len(names), len(points), figsize=(3 * len(points), 2.4 * len(names)), squeeze=False
    )
    for (i, data), (j, M) in ((a, b) for a in enumerate(names) for b in enumerate(points)):
        ax, cell = axes[i, j], [r for r in rows if (r["dataset"], r["M"]) == (data, M)]
        ax.set_visible(bool(cell))
        for row in cell:
            same = [r["elbo"] for r in cell if r["seed"] == row["seed"] and r["elbo"] is not None]
            if row["elbo"] is None:
                continue
            seconds = [s for s, _ in row["curve"]]
            gaps = [(max(same) - v) / row["n_train"] for _, v in row["curve"]]
            first = row["seed"] == cell[0]["seed"]
            ax.loglog(
                seconds,
                [max(gap, 1e-4) for gap in gaps],
                color=f"C{PEERS.index(row['peer'])}",
                linewidth=1,
                label=row["peer"] if first else None,
            )
        ax.set(title=f"{data}, M = {M}", xlim=(0.5, 250), ylim=(8e-5, 1))
    lines = {line.get_label(): line for ax in axes.flat for line in ax.get_lines()}
    drawn = [peer for peer in PEERS if peer in lines]
    fig.legend([lines[peer] for peer in drawn], drawn, loc="upper center", ncols=4, fontsize=7)
    fig.supxlabel("CPU seconds")
    fig.supylabel("nats per observation below the best bound")
    fig.tight_layout(rect=(0, 0, 1, 0.97))
    fig.savefig(path, dpi=100)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", nargs="+", choices=DATA, default=DATA)
    parser.add_argument("--points", type=int, nargs="+", default=POINTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS)
    parser.add_argument(
        "--gpflow", help="Python executable with GPflow; without it GPflow is skipped"
    )
    parser.add_argument(
        "--iterations",
        type=int,
        default=ITERATIONS[-1],
        help="largest number of GPflow's iterations; with fewer, larger ones are not compared",
    )
    parser.add_argument("--name", default="fits", help="name of the result file")
    parser.add_argument("--report", action="store_true", help="print results without measuring")
    parser.add_argument("--plot", type=Path, help="draw results to a file without measuring")
    if "--one" in sys.argv:
        _main_one(parser)
        return
    arguments = parser.parse_args()
    if arguments.plot is not None:
        plot(arguments.name, arguments.plot)
        return
    if not arguments.report:
        run(arguments)
    report(arguments.name)


def _main_one(parser: argparse.ArgumentParser) -> None:
    """Fit one cell and write its row, with the options of the other methods' scripts."""
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    for option in ("--dataset", "--seed", "--rows", "--data-dir", "--out"):
        parser.add_argument(option, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    row = fit_winnowgp(arguments.dataset, arguments.points[0], seed=int(arguments.seed))
    Path(arguments.out).write_text(json.dumps(row), encoding="utf-8")


if __name__ == "__main__":
    main()
