"""Tables of how seconds and memory grow, from the files of results alone."""

from collections.abc import Callable
from math import log
from statistics import mean

from records import Row, recorded, table


def work_mib(row: Row) -> float:
    """Memory that is not that of imports."""
    return row["peak_mib"] - row["imports_mib"]


def whole_s(row: Row) -> float:
    """Of a fit. Finding the units is part of it, and timed on its own."""
    return row["wall_s"] + row["standardised_s"]


COLUMNS: dict[str, Callable[[Row], object]] = {
    "source": lambda row: row["source"],
    "rows": lambda row: f"{row['rows']:,}",
    "points": lambda row: row["points"],
    "candidates": lambda row: row["points"],
    "precision": lambda row: row["precision"],
    "seed": lambda row: row["seed"],
    "processes": lambda row: row["ranks"],
    "kept": lambda row: row["kept"],
    "s": lambda row: f"{row['wall_s']:.4g}",
    "whole s": lambda row: f"{whole_s(row):.4g}",
    "CPU s": lambda row: f"{row['cpu_s']:.4g}",
    "peak MiB": lambda row: f"{row['peak_mib']:.0f}",
    "of it work": lambda row: f"{work_mib(row):.0f}",
    "GPU MiB": lambda row: f"{row['gpu_mib']:.0f}",
    "bound": lambda row: f"{row['bound']:.11g}",
    "statistics s": lambda row: f"{row['statistics_cpu_s']:.4g}",
    "choice s": lambda row: f"{row['selection_cpu_s']:.3g}",
    "all flips ms": lambda row: f"{1000 * row['flips_cpu_s']:.1f}",
}


def shown(rows: list[Row], *names: str) -> str:
    """Some columns of some rows."""
    return table(names, [[COLUMNS[name](row) for name in names] for row in rows])


def exponent(rows: list[Row], x: str, y: str) -> float:
    """Slope of log y over log x, by least squares."""
    a, b = ([log(row[name]) for row in rows] for name in (x, y))
    middle, height = sum(a) / len(a), sum(b) / len(b)
    across = sum((s - middle) * (t - height) for s, t in zip(a, b, strict=True))
    return across / sum((s - middle) ** 2 for s in a)


def report() -> None:
    """Everything that has been measured."""
    for name, told in TOLD.items():
        found = recorded(f"scale/{name}")
        if found:
            print(told(found), end="\n\n")


def by_rows(found: list[Row]) -> str:
    """Against N."""
    names = ("rows", "s", "CPU s", "peak MiB", "of it work")
    more = ("statistics s", "choice s", "all flips ms")
    words = "One bound and its gradient from Parquet, 128 points, one thread\n"
    words += shown(found, *names, *more)
    if len(found) == 1:
        return words
    few, many = found[0], found[-1]
    return (
        f"{words}\nCPU seconds grow as N^{exponent(found, 'rows', 'cpu_s'):.3f}, in the last step "
        f"as N^{exponent(found[-2:], 'rows', 'cpu_s'):.3f}. Of {many['rows']:,} and "
        f"{few['rows']:,} rows: peak memory {many['peak_mib'] / few['peak_mib']:.2f} times "
        f"({work_mib(many) / work_mib(few):.2f} without imports), time of a choice "
        f"{many['selection_cpu_s'] / few['selection_cpu_s']:.2f} times."
    )


def by_points(found: list[Row]) -> str:
    """Against K."""
    words = f"The same of {found[0]['rows']:,} rows\n"
    words += shown(found, "points", "s", "CPU s", "peak MiB", "choice s")
    if len(found) > 1:
        slopes = (exponent(found[-2:], "points", y) for y in ("cpu_s", "selection_cpu_s"))
        words += "\nIn the last step CPU seconds grow as K^{:.2f}, those of a choice as K^{:.2f}."
        words = words.format(*slopes)
    return words


def by_ranks(found: list[Row]) -> str:
    """Against processes."""
    best = {of: min(r["wall_s"] for r in found if r["ranks"] == of) for of in (1, 2)}
    return (
        f"The same of {found[0]['rows']:,} rows in processes of one thread each (CPU: of the "
        f"first)\n{shown(found, 'processes', 's', 'CPU s', 'bound')}\n"
        f"Two processes are {best[1] / best[2]:.2f} times as fast as one."
    )


def of_minibatches(found: list[Row]) -> str:
    """Steps against processes."""
    words = [f"A step of minibatches, {found[0]['points']} points, processes of one thread each"]
    for batch in sorted({row["batch"] for row in found}):
        for name in ("layers", "classes"):
            best = {
                of: min(
                    row[f"{name}_wall_s"]
                    for row in found
                    if (row["batch"], row["ranks"]) == (batch, of)
                )
                for of in (1, 2)
            }
            words.append(
                f"{batch:,} rows, {name}: {1000 * best[1]:.1f} ms in one process, "
                f"{1000 * best[2]:.1f} in two, {best[1] / best[2]:.2f} times as fast"
            )
    return "\n".join(words)


def of_fits(found: list[Row]) -> str:
    """Whole fits."""
    names = ("rows", "candidates", "kept", "whole s", "CPU s", "peak MiB", "of it work")
    return f"Whole fits with selection from Parquet, two threads\n{shown(found, *names)}"


def of_gpu(found: list[Row]) -> str:
    """One device."""
    kinds = {kind: [r for r in found if r["kind"] == kind] for kind in {r["kind"] for r in found}}
    words = [f"On {found[0]['gpu'] or 'a CPU'}"]
    for row in kinds.get("arithmetic", []):
        words.append(
            f"{row['rows']:,} rows, {row['points']} points: a product of matrices of "
            f"{row['product']} reaches {row['peak_tflops']} TFLOP/s in float64, the statistics "
            f"{row['double_statistics_share']:.0%} of that in {row['double_statistics_wall_s']} s, "
            f"bound and gradient {row['double_gradient_share']:.0%} in "
            f"{row['double_gradient_wall_s']} s; mixed in {row['mixed_gradient_wall_s']} s."
        )
    names = ("rows", "points", "precision")
    more = ("bound", "GPU MiB", "peak MiB")
    if rows := kinds.get("evaluation"):
        words += ["One bound and its gradient", shown(rows, "source", *names, "s", *more)]
    if rows := kinds.get("fit"):
        words += [
            "Whole fits with selection",
            shown(rows, "seed", *names, "whole s", *more, "kept"),
        ]
        words += of_precisions(rows)
    for row in kinds.get("protein", []):
        words.append(
            row.get("skipped")
            or f"protein, {row['rows']:,} rows: {row['first_wall_s']} s, a second time "
            f"{row['second_wall_s']} s; {row['kept']} points."
        )
    return "\n".join(words)


def of_precisions(fits: list[Row]) -> list[str]:
    """Mixed fits against those in double precision."""
    of = {name: [row for row in fits if row["precision"] == name] for name in ("double", "mixed")}
    if not all(of.values()):
        return []
    words = []
    for name, rows in of.items():
        bounds = [row["bound"] for row in rows]
        words.append(
            f"{name}: {mean(map(whole_s, rows)):.2f} s, bounds {min(bounds):.0f} to "
            f"{max(bounds):.0f}"
        )
    ratio = mean(map(whole_s, of["double"])) / mean(map(whole_s, of["mixed"]))
    apart = max(abs(row["own_bound"] / row["double_bound"] - 1) for row in of["mixed"])
    return [
        *words,
        f"Mixed fits are {ratio:.2f} times as fast. Where they end, mixed and double bounds differ "
        f"by {apart:.1e} of their size at most.",
    ]


TOLD: dict[str, Callable[[list[Row]], str]] = {
    "rows": by_rows,
    "points": by_points,
    "ranks": by_ranks,
    "minibatches": of_minibatches,
    "fits": of_fits,
    "gpu": of_gpu,
}
