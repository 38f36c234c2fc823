"""Tables and pictures of the comparison with other libraries, from its rows.

`python benchmarks/libraries.py --page` writes them into the documentation. Verdicts are rules on
differences of the same split: `verdict`.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import stdev

from calibration import coverage_tables, draw_histograms
from libraries_plan import (
    ENVIRONMENTS,
    GPU,
    LIMIT,
    OURS,
    UNITS,
    Case,
    cases,
    expected_seconds,
    is_planned,
    planned_splits,
)
from libraries_plots import draw
from measure import RESULTS, Row, grouped, markdown, mean, replace_sections
from right_number_problems import TABLES
from winnowgp.experiments.runs import Runs

SMALL = tuple(RESULTS / f"small_tables_seed{seed}.jsonl" for seed in (12, 13))
SMALL_SIZES = {50: "under 50 rows", 200: "50 to 199 rows", 1000: "200 to 800 rows"}
"""Groups of small tables, by the number of rows that they do not reach."""
DOCS = Path(__file__).parents[1] / "docs"
ERRORS = 2.0
"""A mean difference counts if it exceeds this number of standard errors over splits."""
SPLITS = 3
"""Number of splits from which on a difference is judged."""


def our_method(rows: Sequence[Row], table: str) -> str:
    """Return the method with which others are compared: our fits on a CPU, like theirs, or those on
    a GPU of tables where these have more splits."""
    good = [row["method"] for row in rows if row["table"] == table and "error" not in row]
    return max(OURS, key=good.count)


def comparable(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of splits that we have a row of; all rows of tables without one of ours.

    Densities of different splits of a table differ by more than those of methods, so that means
    over different splits must not stand side by side.
    """
    ours = _our_rows(rows)
    tables = {table for table, _ in ours}
    return [r for r in rows if r["table"] not in tables or (r["table"], r["seed"]) in ours]


def _our_rows(rows: Sequence[Row]) -> dict[tuple[str, int], Row]:
    """Return, by table and split, the fits that others are compared with."""
    own = {table: our_method(rows, table) for table in {row["table"] for row in rows}}
    return {
        (row["table"], row["seed"]): row
        for row in rows
        if row["method"] == own[row["table"]] and "error" not in row
    }


def differences(rows: Sequence[Row], column: str) -> dict[tuple[str, str], list[float]]:
    """Return, by table and method, the value of a column minus ours on each common split."""
    ours = _our_rows(rows)
    result: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        own = ours.get((row["table"], row["seed"]))
        if own is not None and own["method"] != row["method"] and column in row and column in own:
            gap = row[column] - own[column]
            result.setdefault((row["table"], row["method"]), []).append(gap)
    return result


def paired(rows: Sequence[Row], table: str, method: str, column: str) -> float:
    """Return the mean of a column; of methods that have fewer splits than ours, our mean plus the
    mean difference on common splits, because splits differ by more than methods."""
    ours = our_method(rows, table)
    own = {
        name: [
            r[column] for r in rows if (r["table"], r["method"]) == (table, name) and column in r
        ]
        for name in (ours, method)
    }
    gaps = differences(rows, column).get((table, method), [])
    if gaps and len(gaps) < len(own[ours]):
        return mean(own[ours]) + mean(gaps)
    return mean(own[method])


def verdict(gaps: Sequence[float]) -> str:
    """Return whether another method's values are higher or lower than ours, or level.

    >>> verdict([0.1, 0.12, 0.11]), verdict([-0.1, 0.1, 0]), verdict([-0.2, -0.21, -0.2])
    ('higher', 'level', 'lower')
    >>> verdict([0.3]), verdict([0.3, 0.3])
    ('one split', '2 splits')
    """
    if len(gaps) < SPLITS:
        return "one split" if len(gaps) == 1 else f"{len(gaps)} splits"
    error = stdev(gaps) / len(gaps) ** 0.5
    if abs(mean(gaps)) <= ERRORS * error:
        return "level"
    return "higher" if mean(gaps) > 0 else "lower"


def losses(rows: Sequence[Row]) -> str:
    """Return a Markdown table of where others are better: density and error by name, costs by
    number and the largest factor."""
    header = ["table", "higher density", "lower RMSE", "less time to fit", "less time to predict"]
    header += ["less memory"]
    lines = []
    for table in dict.fromkeys(row["table"] for row in rows):
        own = [row for row in rows if row["table"] == table]
        accuracy = [
            _better(own, column, sign) for column, sign in (("log_density", 1), ("rmse", -1))
        ]
        costs = [_cheaper(own, column) for column in ("cpu_s", "predict_s", "memory_mb")]
        lines.append([table, *accuracy, *costs])
    return markdown(header, lines)


def _better(rows: Sequence[Row], column: str, sign: int) -> str:
    """Return the methods with a better mean than ours: the difference, and the verdict."""
    gaps = {method: gap for (_, method), gap in differences(rows, column).items()}
    better = [
        f"{method} ({mean(gap):+.3f}, {verdict(gap)})"
        for method, gap in gaps.items()
        if sign * mean(gap) > 0 and method not in OURS
    ]
    return ", ".join(better) or "none"


def _cheaper(rows: Sequence[Row], column: str) -> str:
    """Return how many of the other methods cost less than our fits on a CPU on common splits, and
    the factor of the least of them."""
    ours = {
        row["seed"]: row[column]
        for row in rows
        if row["method"] == OURS[0] and row.get(column) is not None
    }
    ratios: dict[str, list[float]] = {}
    for row in rows:
        if row["method"] not in OURS and row["seed"] in ours and row.get(column) is not None:
            ratios.setdefault(row["method"], []).append(row[column] / ours[row["seed"]])
    means = {method: mean(values) for method, values in ratios.items()}
    if not means:
        return "–"
    least = min(means, key=lambda method: means[method])
    cheaper = sum(ratio < 1 for ratio in means.values())
    return f"{cheaper} of {len(means)}" + (f" ({least}: {means[least]:.2g})" if cheaper else "")


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


def total_hours(rows: Sequence[Row], *, limit: int = LIMIT) -> tuple[float, float]:
    """Return the CPU hours of `make peers` with these rows, and with none, without a GPU.

    A fit without a row counts by `expected_seconds`, and one that is ended by the limit. With no
    rows, what is planned follows from the fits made before, as in `libraries.run_planned`.
    """
    every = cases(list(TABLES), [method for method in ENVIRONMENTS if not method.endswith(GPU)])
    known = {tuple(row[unit] for unit in UNITS): row for row in rows}

    def made(case: Case) -> Row:
        own = known.get(case, {})
        cost = own.get("cpu_s", expected_seconds(rows, case[0], case[2]))
        return {**dict(zip(UNITS, case, strict=True)), "cpu_s": min(cost, limit)}

    remaining = [
        made(case) for case in every if case not in known and is_planned(case, rows, limit=limit)
    ]
    fresh: list[Row] = []
    for case in every:
        if is_planned(case, fresh, limit=limit):
            fresh.append(made(case))
    left, whole = (sum(row["cpu_s"] for row in part) / 3600 for part in (remaining, fresh))
    return left, whole


def version_list(rows: Sequence[Row]) -> str:
    """Return the versions of the packages; of ours also source and tables."""
    found: dict[str, dict[str, None]] = {}
    tables: dict[str, dict[str, None]] = {}
    names: dict[str, str] = {"xgb": "xgboost-distribution", "sklearn": "scikit-learn"}
    for row in rows:
        first: str = row["method"].split("-")[0]
        package = names.get(first, first)
        if "source" in row:
            label = f"{row['version']} (source {row['source']})"
            tables.setdefault(label, {})[row["table"]] = None
        else:
            label = row["version"]
        found.setdefault(package, {})[label] = None

    def text(label: str) -> str:
        return f"{label} on {' and '.join(tables[label])}" if label in tables else label

    return "; ".join(f"{package} {', '.join(map(text, own))}" for package, own in found.items())


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
    ours = {table for table, _ in _our_rows(rows)}
    # Others have nothing to be compared with yet.
    shown = [name for name in TABLES if name in ours]
    draw(rows, shown, DOCS / "images", value=partial(paired, rows))
    order = list(ENVIRONMENTS)
    draw_histograms(groups, DOCS / "images" / "peers-pit.png", order)
    left, whole = total_hours(every)
    night = (
        f"By these rows, `make peers` takes {left:.1f} CPU hours for what is missing, and "
        f"{whole:.1f} on a machine without any row."
    )
    replace_sections(
        DOCS / "benchmarks" / "libraries.md",
        peers=f"{summary(rows)}\n\nVersions: {version_list(good)}.",
        losses=losses(sorted(good, key=_order)),
        progress=f"{progress(every)}\n\n{night}",
    )
    tables = coverage_tables(groups, order)
    replace_sections(DOCS / "benchmarks" / "calibration.md", calibration=tables)
