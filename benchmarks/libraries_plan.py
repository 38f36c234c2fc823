"""Methods, splits and rows of the comparison with other libraries: which fits are made.

`libraries.py` makes the fits, `libraries_page.py` writes the tables.
"""

from collections.abc import Iterable, Sequence
from math import log

from measure import RESULTS, Row, mean
from right_number_problems import TABLES
from winnowgp.experiments.runs import Runs, versions

FILE = RESULTS / "peers.jsonl"
SEEDS = {
    name: (20, 21, 22, 23, 24) if rows < 5000 else (20, 21, 22) for name, rows in TABLES.items()
}
"""Seeds of the splits; no setting was chosen on them."""
SWEEP = (32, 128, 512)
GPU = "-gpu"
"""End of the names of methods that are fitted on a GPU."""
ENVIRONMENTS = {
    "winnowgp": None,
    f"winnowgp{GPU}": None,
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
OURS = ("winnowgp", f"winnowgp{GPU}")
EXACT = ("gpytorch-exact", "sklearn-gpr")
EXACT_ROWS = 8000
"""Largest number of training rows of exact GPs, whose memory grows with its square."""
LIMIT = 900
"""CPU seconds of a fit at most; one that is expected to take longer is not started."""
ONE_SPLIT = 300
"""CPU seconds of a fit from which on one split of a table is enough."""
UNITS = "table", "seed", "method"
Case = tuple[str, int, str]
"""Table, seed of the split, and method of a fit."""


def read_rows() -> list[Row]:
    """Return the last row of each fit; our fits on a GPU are a method of their own."""
    return latest(
        row | {"method": f"{row['method'].removesuffix(GPU)}{GPU}"} if "device" in row else row
        for row in Runs(FILE)
    )


def cases(tables: Sequence[str], methods: Sequence[str]) -> list[Case]:
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


def is_planned(
    case: Case, rows: Sequence[Row], *, seeds: Sequence[int] | None = None, limit: int
) -> bool:
    """Return whether a fit is made: one of the seeds, or of the planned splits if they are None."""
    table, seed, method = case
    planned = seeds or SEEDS[table][: planned_splits(rows, table, method, limit=limit)]
    return seed in planned


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
    if again and row["method"] in OURS and row.get("source") != versions()["source"]:
        return False
    return "error" not in row or row["limit"] >= limit
