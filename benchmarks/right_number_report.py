"""Markdown tables of the results of `right_number.py`."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import inf, nan, sqrt
from typing import Any

from measure import Row, mean

TOLERANCE = 0.01
"""Default tolerance of the estimators, in nats per observation."""

DEGENERATE = 1e-5
"""Noise variance below which an exact GP of standardised targets counts as without noise.

The evidence of few rows can be highest there, where predictions are worse by many nats.
"""


def summary(part: str, rows: Sequence[Row]) -> str:
    """Return the results of a part as Markdown."""
    good = [row for row in rows if "points" in row]
    lines = [f"## {part}", "", _REPORTS[part](good) if good else "No fits."]
    sources = sorted({row["versions"]["source"] for row in rows})
    if len(sources) > 1:
        lines.append(f"\nThese fits are of {len(sources)} versions of the source.")
    for row in rows:
        if "points" not in row:
            lines.append(f"\n- {row['settings']}: {row.get('error') or row.get('skipped')}")
    return "\n".join([*lines, ""])


def markdown(header: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; the first column is left-aligned."""
    rule = "|---" + "|---:" * (len(header) - 1) + "|"
    body = ["| " + " | ".join(map(str, line)) + " |" for line in lines]
    return "\n".join(["| " + " | ".join(header) + " |", rule, *body])


def grouped(rows: Sequence[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Return the rows by the values of some settings, in order of appearance."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        values = tuple(row["settings"].get(name) for name in names)
        groups.setdefault(values, []).append(row)
    return groups


def average(rows: Sequence[Row], name: str) -> float:
    """Return the mean of a column over the rows that have it; NaN if none has."""
    return mean(row[name] for row in rows if row.get(name) is not None)


def _number(value: float, digits: int = 4) -> str:
    return "–" if value != value else f"{value:.{digits}f}"


def _mean(rows: Sequence[Row], name: str, digits: int = 4) -> str:
    return _number(average(rows, name), digits)


def _with_error(rows: Sequence[Row], name: str) -> str:
    """Return a mean with the standard error that those of the rows imply."""
    known = [row for row in rows if row.get(name) is not None]
    if not known:
        return "–"
    errors = [nan if (se := row.get(f"{name}_se")) is None else se for row in known]
    error = sqrt(sum(e**2 for e in errors)) / len(errors)
    return f"{_mean(known, name)} ± {_number(error)}"


def _range(rows: Sequence[Row], name: str = "points") -> str:
    values = [row[name] for row in rows]
    low, high = min(values), max(values)
    return f"{low}" if low == high else f"{low} to {high}"


def _counts(rows: Sequence[Row], name: str) -> str:
    count = Counter(str(row[name] or "none") for row in rows)
    if len(count) == 1:
        return next(iter(count))
    return ", ".join(f"{value} ({number})" for value, number in count.most_common())


def _share(rows: Sequence[Row], test: Callable[[Row], bool]) -> str:
    return f"{sum(map(test, rows))} of {len(rows)}"


def _tables(rows: Sequence[Row]) -> str:
    header = (
        "table",
        "device",
        "tolerance",
        "N",
        "fits",
        "points",
        "kernel",
        "limit",
        "last doubling",
    )
    header += ("wall s", "CPU s", "RMSE", "log density", "own units", "exact", "exact, own units")
    header += ("exact − sparse, test", "held-out gap", "ELBO gap", "KL lower", "KL upper")
    lines = [
        (
            name,
            device,
            tolerance or TOLERANCE,
            _range(group, "N"),
            len(group),
            _range(group),
            _counts(group, "kernel"),
            _counts(group, "growth_limit"),
            _mean(group, "last_doubling_gain"),
            _mean(group, "wall_s", 1),
            _mean(group, "cpu_s", 1),
            _mean(group, "rmse"),
            _mean(group, "log_density"),
            _mean(group, "own_log_density"),
            _mean(group, "exact_log_density"),
            _mean(group, "exact_own_log_density"),
            _with_error(group, "fresh_gap"),
            _with_error(group, "held_out_gap"),
            _mean(group, "elbo_gap"),
            _mean(group, "kl_lower"),
            _mean(group, "kl_upper"),
        )
        for (name, device, tolerance), group in grouped(rows, "name", "device", "tolerance").items()
    ]
    return markdown(header, lines)


def kl_is_true(row: Row) -> bool:
    """Return whether the reported KL is within 0.005 nats per observation or 20 % of the oracle.

    Both ends of an interval must be.
    """
    kl = row["oracle_kl"]
    ends = (row["kl_lower"], row["kl_upper"])
    return all(e is not None and abs(e - kl) <= max(0.005, 0.2 * kl) for e in ends)


def true_gap(row: Row) -> float:
    """Return the nats per observation by which the ELBO is below the exact GP's evidence."""
    return row["oracle_exact_evidence"] - row["oracle_elbo"]


def gap_is_true(row: Row) -> bool:
    """Return whether the reported ELBO gap is within 0.005 nats or 20 % of the true one."""
    true = true_gap(row)
    return abs(row["elbo_gap"] - true) <= max(0.005, 0.2 * abs(true))


def _truth(rows: Sequence[Row]) -> str:
    header = ("data", "rows", "fits", "points", "KL true", "largest error of KL")
    header += ("gap true", "reported gap within tolerance", "or limit named", "true gap within it")
    header += ("evidence ≥ truth − 0.01", "least evidence − truth")
    header += ("exact GPs without noise", "held-out gap", "gap on fresh rows")
    header += ("at own hyper-parameters", "held-out − fresh, z")
    lines = [
        _truth_line(f"{name}, {D} columns" if D else name, str(N), group)
        for (name, D, N), group in grouped(rows, "name", "D", "rows").items()
    ]
    table = markdown(header, [*lines, _truth_line("all", "", rows)])
    wrong = [
        f"- {row['settings']}: {reason}" for row in rows for reason in (_complaint(row),) if reason
    ]
    note = (
        "Gaps of predictions leave out the fits whose exact GP, the reference, is without noise; "
        "all other columns include them."
    )
    return "\n".join([table, "", note, "", f"{len(wrong)} fits with a false report:", "", *wrong])


def _truth_line(name: str, N: str, rows: Sequence[Row]) -> tuple[object, ...]:
    drawn = [row for row in rows if row.get("true_evidence") is not None]
    sound = [row for row in rows if row["exact_noise"] > DEGENERATE]
    gains = [row["own_evidence"] - row["true_evidence"] for row in drawn]
    errors = [
        max(abs((inf if row[end] is None else row[end]) - row["oracle_kl"]) for end in _ENDS)
        for row in rows
    ]
    return (
        name,
        N,
        len(rows),
        _range(rows),
        _share(rows, kl_is_true),
        _number(max(errors)),
        _share(rows, gap_is_true),
        _share(rows, lambda row: row["elbo_gap"] <= TOLERANCE),
        _share(rows, _kept_or_limited),
        _share(rows, lambda row: true_gap(row) <= TOLERANCE),
        _share(drawn, lambda row: row["own_evidence"] >= row["true_evidence"] - 0.01),
        _number(min(gains, default=nan)),
        len(rows) - len(sound),
        _with_error(sound, "held_out_gap"),
        _with_error(sound, "fresh_gap"),
        _with_error(sound, "own_fresh_gap"),
        _z_score(sound),
    )


_ENDS = ("kl_lower", "kl_upper")


def _kept_or_limited(row: Row) -> bool:
    return row["elbo_gap"] <= TOLERANCE or row["growth_limit"] is not None


def _z_score(rows: Sequence[Row]) -> str:
    """Return the mean difference of held-out and fresh gaps in standard errors of the mean.

    The errors come from the scatter over fits, so that they include what differs between draws.
    """
    d = [
        row["held_out_gap"] - row["fresh_gap"]
        for row in rows
        if row.get("held_out_gap") is not None and row.get("fresh_gap") is not None
    ]
    if len(d) < 2:
        return "–"
    centre = mean(d)
    error = sqrt(sum((x - centre) ** 2 for x in d) / (len(d) - 1) / len(d))
    return f"{centre:+.4f}, {centre / error if error else nan:+.1f}"


def _complaint(row: Row) -> str:
    complaints = []
    if not kl_is_true(row):
        ends = " to ".join(_number(nan if row[end] is None else row[end]) for end in _ENDS)
        complaints.append(f"KL {row['oracle_kl']:.4f}, reported {ends}")
    if not gap_is_true(row):
        complaints.append(f"gap {true_gap(row):.4f}, reported {row['elbo_gap']:.4f}")
    if not _kept_or_limited(row):
        complaints.append(f"gap {row['elbo_gap']:.4f}, no limit named")
    if (true := row.get("true_evidence")) is not None and row["own_evidence"] < true - 0.01:
        complaints.append(f"evidence {row['own_evidence']:.4f} below {true:.4f} at the truth")
    return "; ".join(complaints)


def _rare(rows: Sequence[Row]) -> str:
    header = ("draws", "effect", "fits", "without points", "points", "log density", "linear model")
    header += (
        "constant",
        "truth",
        "above linear",
        "mean gain over linear",
        "over constant",
        "CPU s",
    )
    lines = [
        (
            name,
            "yes" if effect else "no",
            len(group),
            sum(row["points"] == 0 for row in group),
            _range(group),
            _mean(group, "log_density"),
            _mean(group, "linear_log_density"),
            _mean(group, "constant_log_density"),
            _mean(group, "true_log_density"),
            _share(group, lambda row: row["gain_over_linear"] > 0),
            _with_error(group, "gain_over_linear"),
            _with_error(group, "gain_over_constant"),
            _mean(group, "cpu_s", 1),
        )
        for (effect, name), group in grouped(rows, "effect", "name").items()
    ]
    wrong = [
        f"- {row['settings']}: {row['points']} points, {row['events']:g} events, "
        f"gain over the constant {row['gain_over_constant']:.4f}"
        for row in rows
        if (row["points"] == 0) == row["settings"]["effect"]
    ]
    return "\n".join([markdown(header, lines), "", "Not as they should be:", "", *wrong])


def _columns(rows: Sequence[Row]) -> str:
    header = ("function", "irrelevant columns", "fits", "points", "ELBO per observation", "R²")
    header += ("mean change of the ELBO", "least change", "within the tolerance", "CPU s")
    start = {
        (s["name"], s["seed"], s["draw"], s["device"]): row["elbo"]
        for row in rows
        for s in (row["settings"],)
        if s["irrelevant"] == 0
    }

    def change(row: Row) -> float:
        s = row["settings"]
        before = start.get((s["name"], s["seed"], s["draw"], s["device"]), nan)
        return row["elbo"] - before

    lines = []
    groups = grouped(rows, "name", "irrelevant").items()
    for (name, irrelevant), group in sorted(groups, key=lambda item: item[0]):
        changes = [change(row) for row in group if change(row) == change(row)]
        lines.append(
            (
                name,
                irrelevant,
                len(group),
                _range(group),
                _mean(group, "elbo"),
                f"{_mean(group, 'r2')} (least {min(row['r2'] for row in group):.4f})",
                _number(mean(changes)),
                _number(min(changes, default=nan)),
                f"{sum(c >= -TOLERANCE for c in changes)} of {len(changes)}",
                _mean(group, "cpu_s", 1),
            )
        )
    return markdown(header, lines)


def _sizes(rows: Sequence[Row]) -> str:
    header = ("table", "M", "splits", "log density", "fresh fit", "difference", "lowest")
    header += (
        "its standard error in a split",
        "ELBO",
        "fresh fit",
        "dense ELBO − reported, largest",
    )
    fits: dict[tuple[str, int], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["settings"]["name"]):
        for size in row["sizes"]:
            fits.setdefault((row["settings"]["name"], size["M"]), []).append(size)
    lines = []
    for (name, M), sizes in fits.items():
        differences = [size["log_density"] - size["fresh_log_density"] for size in sizes]
        errors = [size["fresh_gap_se"] for size in sizes if "fresh_gap_se" in size]
        lines.append(
            (
                name,
                M,
                len(sizes),
                _mean(sizes, "log_density"),
                _mean(sizes, "fresh_log_density"),
                f"{sum(differences) / len(differences):+.4f}",
                f"{min(differences):+.4f}",
                _number(sum(errors) / len(errors)) if errors else "",
                _mean(sizes, "elbo"),
                _mean(sizes, "fresh_elbo"),
                f"{max(abs(size['oracle_elbo'] - size['elbo']) for size in sizes):.1e}",
            )
        )
    return markdown(header, lines)


def _synthetic(rows: Sequence[Row]) -> str:
    header = ("condition", "fits per value", "values", "mean points", "falls")
    lines = []
    for (name,), group in grouped(rows, "name").items():
        levels = sorted(grouped(group, "intensity").items())
        points = [average(level, "points") for _, level in levels]
        lines.append(
            (
                name,
                min(len(level) for _, level in levels),
                ", ".join(f"{value:g}" for (value,), _ in levels),
                ", ".join(f"{value:.1f}" for value in points),
                "yes" if all(a > b for a, b in pairwise(points)) else "no",
            )
        )
    return markdown(header, lines)


def _peers(rows: Sequence[Row]) -> str:
    header = ("table", "fits", "points", "CPU s", "GPflow CPU s", "ratio", "ELBO", "GPflow ELBO")
    header += ("log density, own units", "GPflow")
    lines = [
        (
            name,
            len(group),
            _range(group),
            _mean(group, "cpu_s", 1),
            _mean(group, "gpflow_cpu_s", 1),
            _number(average(group, "cpu_s") / average(group, "gpflow_cpu_s"), 2),
            _mean(group, "elbo"),
            _mean(group, "gpflow_elbo"),
            _mean(group, "own_log_density"),
            _mean(group, "gpflow_own_log_density"),
        )
        for (name,), group in grouped(rows, "name").items()
    ]
    return markdown(header, lines)


_REPORTS: dict[str, Callable[[Sequence[Row]], str]] = {
    "tables": _tables,
    "truth": _truth,
    "rare": _rare,
    "columns": _columns,
    "sizes": _sizes,
    "synthetic": _synthetic,
    "peers": _peers,
}
