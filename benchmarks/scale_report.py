"""Tables and the figure of benchmarks/scale.py, from its result files alone."""

from collections.abc import Callable
from math import inf, log
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from measure import Row, read_results, table
from winnowgp.plots.style import COLOURS, save_figure, styled

FIGURE = Path(__file__).parents[1] / "docs" / "images" / "scale.png"
MARKS: dict[str, Any] = {"marker": "o", "markersize": 4, "linewidth": 1.4}


def work_mib(row: Row) -> float:
    """Return peak memory without that of the imports."""
    return row["peak_mib"] - row["imports_mib"]


def whole_s(row: Row) -> float:
    """Return the time of a fit with standardising, which is timed separately."""
    return row["wall_s"] + row["standardised_s"]


COLUMNS: dict[str, Callable[[Row], object]] = {
    "source": lambda row: row["source"],
    "rows": lambda row: f"{row['rows']:,}",
    "points": lambda row: row["points"],
    "inputs": lambda row: row["inputs"],
    "candidates": lambda row: row["points"],
    "precision": lambda row: row["precision"],
    "seed": lambda row: row["seed"],
    "processes": lambda row: row["ranks"],
    "selected": lambda row: row["kept"],
    "s": lambda row: f"{row['wall_s']:.4g}",
    "whole s": lambda row: f"{whole_s(row):.4g}",
    "CPU s": lambda row: f"{row['cpu_s']:.4g}",
    "peak MiB": lambda row: f"{row['peak_mib']:.0f}",
    "without imports": lambda row: f"{work_mib(row):.0f}",
    "GPU MiB": lambda row: f"{row['gpu_mib']:.0f}",
    "bound": lambda row: f"{row['bound']:.11g}",
    "statistics s": lambda row: f"{row['statistics_cpu_s']:.4g}",
    "selection s": lambda row: f"{row['selection_cpu_s']:.3g}",
    "marginal gains ms": lambda row: f"{1000 * row['flips_cpu_s']:.1f}",
}


def shown(rows: list[Row], *names: str) -> str:
    """Return a table of some columns."""
    return table(names, [[COLUMNS[name](row) for name in names] for row in rows])


def exponent(rows: list[Row], x: str, y: str) -> float:
    """Return the slope of log y over log x by least squares."""
    a, b = ([log(row[name]) for row in rows] for name in (x, y))
    middle, height = sum(a) / len(a), sum(b) / len(b)
    across = sum((s - middle) * (t - height) for s, t in zip(a, b, strict=True))
    return across / sum((s - middle) ** 2 for s in a)


def report() -> None:
    """Print a table for every result file."""
    for name, describe in REPORTS.items():
        rows = read_results(f"scale/{name}")
        if rows:
            print(describe(rows), end="\n\n")


def by_rows(rows: list[Row]) -> str:
    """Describe time and memory against the number of rows."""
    names = ("rows", "s", "CPU s", "peak MiB", "without imports")
    more = ("statistics s", "selection s", "marginal gains ms")
    text = "One bound and its gradient from Parquet, 128 inducing points, one thread\n"
    text += shown(rows, *names, *more)
    if len(rows) == 1:
        return text
    few, many = rows[0], rows[-1]
    return (
        f"{text}\nCPU seconds grow as N^{exponent(rows, 'rows', 'cpu_s'):.3f}, in the last step "
        f"as N^{exponent(rows[-2:], 'rows', 'cpu_s'):.3f}. Of {many['rows']:,} and "
        f"{few['rows']:,} rows: peak memory {many['peak_mib'] / few['peak_mib']:.2f} times "
        f"({work_mib(many) / work_mib(few):.2f} without imports), time of a selection "
        f"{many['selection_cpu_s'] / few['selection_cpu_s']:.2f} times."
    )


def by_points(rows: list[Row]) -> str:
    """Describe time and memory against the number of inducing points."""
    text = f"The same for {rows[0]['rows']:,} rows\n"
    text += shown(rows, "points", "s", "CPU s", "peak MiB", "selection s")
    if len(rows) > 1:
        slopes = (exponent(rows[-2:], "points", y) for y in ("cpu_s", "selection_cpu_s"))
        text += "\nIn the last step CPU seconds grow as K^{:.2f}, those of a selection as K^{:.2f}."
        text = text.format(*slopes)
    return text


def by_columns(rows: list[Row]) -> str:
    """Describe time against the number of inputs."""
    text = f"The same for {rows[0]['rows']:,} rows in memory and {rows[0]['points']} points\n"
    text += shown(rows, "inputs", "s", "CPU s", "peak MiB")
    slopes = exponent(rows, "inputs", "cpu_s"), exponent(rows[-2:], "inputs", "cpu_s")
    return text + "\nCPU seconds grow as D^{:.2f}, in the last step as D^{:.2f}.".format(*slopes)


def by_kernels(rows: list[Row]) -> str:
    """Describe the time of other kernels relative to RBF."""
    best: dict[str, float] = {}
    clock = "wall_s" if rows[0]["gpu"] else "cpu_s"
    for row in rows:
        best[row["kernel"]] = min(row[clock], best.get(row["kernel"], inf))
    lines = [[name, f"{1000 * s:.1f}", f"{s / best['rbf']:.2f}"] for name, s in best.items()]
    text = f"{rows[0]['rows']:,} rows, {rows[0]['points']} points, {rows[0]['gpu'] or 'one thread'}"
    return f"{text}\n{table(('kernel', 'ms', 'relative to RBF'), lines)}"


def by_ranks(rows: list[Row]) -> str:
    """Describe the speed-up by a second process."""
    best = {of: min(r["wall_s"] for r in rows if r["ranks"] == of) for of in (1, 2)}
    return (
        f"The same for {rows[0]['rows']:,} rows in processes of one thread each (CPU time of the "
        f"first)\n{shown(rows, 'processes', 's', 'CPU s', 'bound')}\n"
        f"Two processes are {best[1] / best[2]:.2f} times as fast as one."
    )


def by_minibatches(rows: list[Row]) -> str:
    """Describe the speed-up of minibatch steps by a second process."""
    text = [f"A step of minibatches, {rows[0]['points']} points, processes of one thread each"]
    for batch in sorted({row["batch"] for row in rows}):
        for name in ("layers", "classes"):
            best = {
                of: min(
                    row[f"{name}_wall_s"]
                    for row in rows
                    if (row["batch"], row["ranks"]) == (batch, of)
                )
                for of in (1, 2)
            }
            text.append(
                f"{batch:,} rows, {name}: {1000 * best[1]:.1f} ms in one process, "
                f"{1000 * best[2]:.1f} in two, {best[1] / best[2]:.2f} times as fast"
            )
    return "\n".join(text)


def of_fits(rows: list[Row]) -> str:
    """Describe whole fits."""
    names = ("rows", "candidates", "selected", "whole s", "CPU s", "peak MiB", "without imports")
    return f"Whole fits with selection from Parquet, two threads\n{shown(rows, *names)}"


def of_gpu(rows: list[Row]) -> str:
    """Describe the measurements on one GPU."""
    kinds = {kind: [r for r in rows if r["kind"] == kind] for kind in {r["kind"] for r in rows}}
    text = [f"On {rows[0]['gpu'] or 'a CPU'}"]
    names = ("rows", "points", "precision")
    more = ("bound", "GPU MiB", "peak MiB")
    if evaluations := kinds.get("evaluation"):
        text += ["One bound and its gradient", shown(evaluations, "source", *names, "s", *more)]
    if fits := kinds.get("fit"):
        text += [
            "Whole fits with selection",
            shown(fits, "seed", *names, "whole s", *more, "selected"),
        ]
        text += of_precisions(fits)
    for row in kinds.get("protein", []):
        text.append(
            row.get("skipped")
            or f"protein, {row['rows']:,} rows: {row['first_wall_s']} s, a second time "
            f"{row['second_wall_s']} s; {row['kept']} points."
        )
    return "\n".join(text)


def of_arithmetic(rows: list[Row]) -> str:
    """Describe the shares of the float64 peak."""
    text = [f"On {rows[0]['gpu'] or 'a CPU'}"]
    for row in rows:
        text.append(
            f"{row['rows']:,} rows, {row['points']} points: a product of matrices of "
            f"{row['product']} reaches {row['peak_tflops']} TFLOP/s in float64, the statistics "
            f"{row['double_statistics_share']:.1%} of that in {row['double_statistics_wall_s']} s, "
            f"bound and gradient {row['double_gradient_share']:.1%} in "
            f"{row['double_gradient_wall_s']} s; mixed in {row['mixed_gradient_wall_s']} s."
        )
    return "\n".join(text)


def of_precisions(fits: list[Row]) -> list[str]:
    """Compare fits in mixed and in double precision."""
    of = {name: [row for row in fits if row["precision"] == name] for name in ("double", "mixed")}
    if not all(of.values()):
        return []
    text = []
    for name, rows in of.items():
        bounds = [row["bound"] for row in rows]
        text.append(
            f"{name}: {mean(map(whole_s, rows)):.2f} s, bounds {min(bounds):.0f} to "
            f"{max(bounds):.0f}"
        )
    ratio = mean(map(whole_s, of["double"])) / mean(map(whole_s, of["mixed"]))
    apart = max(abs(row["own_bound"] / row["double_bound"] - 1) for row in of["mixed"])
    return [
        *text,
        f"Mixed fits are {ratio:.2f} times as fast. Where they end, mixed and double bounds differ "
        f"by {apart:.1e} of their size at most.",
    ]


REPORTS: dict[str, Callable[[list[Row]], str]] = {
    "rows": by_rows,
    "points": by_points,
    "columns": by_columns,
    "kernels": by_kernels,
    "kernels_gpu": by_kernels,
    "ranks": by_ranks,
    "minibatches": by_minibatches,
    "fits": of_fits,
    "gpu": of_gpu,
    "arithmetic": of_arithmetic,
}


def draw() -> Path:
    """Replace the figure of the documentation."""
    with styled():
        return save_figure(scale_figure(), FIGURE)


def scale_figure() -> Figure:
    """Draw time and memory against rows, and time against inducing points."""
    figure = Figure(figsize=(9, 3))
    time, memory, size = figure.subplots(1, 3)
    rows, points, fits = (read_results(f"scale/{name}") for name in ("rows", "points", "fits"))
    lines = {"bound and gradient": "", "statistics": "statistics_", "selection": "selection_"}
    for ax, measured, x in ((time, rows, "rows"), (size, points, "points")):
        for (name, prefix), colour in zip(
            lines.items(), ("posterior", "second", "inclusion"), strict=True
        ):
            _line(ax, measured, x, f"{prefix}cpu_s", label=name, color=COLOURS[colour])
        ax.set(xscale="log", yscale="log", ylabel="CPU seconds")
    time.set(xlabel="rows", title="128 inducing points")
    size.set_xlabel("inducing points")
    time.legend(loc="upper left")
    K = [row["points"] for row in points]
    size.set_xticks(K, [str(k) for k in K])
    size.set_xticks([], minor=True)
    size.set_title(f"{points[0]['rows']:,} rows")
    for name, measured, colour in (
        ("bound and gradient", rows, "posterior"),
        ("whole fit", fits, "points"),
    ):
        if measured:
            _line(memory, measured, "rows", "peak_mib", label=name, color=COLOURS[colour])
    style: dict[str, Any] = {"color": COLOURS["data"], "linewidth": 1, "linestyle": ":"}
    memory.axhline(rows[0]["imports_mib"], label="imports only", **style)
    memory.set(xscale="log", xlabel="rows", ylabel="peak memory (MiB)", ylim=(0, None))
    memory.set_title("memory, rows in a file")
    memory.legend(loc="best")
    return figure


def _line(ax: Axes, rows: list[Row], x: str, y: str, *, label: str, color: str) -> None:
    ax.plot([r[x] for r in rows], [r[y] for r in rows], label=label, color=color, **MARKS)
