"""One level of what makes points less informative: the rows of all models there, compared."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import numpy as np
from scipy.stats import rankdata

from winnowgp.experiments.experiment import claim
from winnowgp.experiments.procedures import PROCEDURE_NAMES
from winnowgp.experiments.runs import Row

NAMES = {
    "fixed": "fixed number, as many updates",
    **PROCEDURE_NAMES,
    "auto": f"{PROCEDURE_NAMES['fast']} with α left to it",
}
CHOOSING = ("paper", "fast", "auto")
MARGIN = 0.01
"""Nats a row within which two bounds count as level: what the default gives up on purpose."""


@final
@dataclass(frozen=True, slots=True)
class Level:
    """Rows that differ in kind and seed alone.

    A row of the kind `fixed` has `sizes`, one or several numbers of points; any other has `kept`,
    the numbers of points in the sets it keeps, and `expected`, E|Z|. Each has a bound or a
    divergence for every size, in a column.
    """

    group: str
    """What varies: a condition, or a data set to which noise is added."""
    value: float
    """How strongly."""
    N: int
    rows: tuple[Row, ...]

    def numbers(self, kind: str) -> dict[int, float]:
        """How many points a procedure chose, by seed: E|Z| under its process, or as many as it
        kept where a search ended with one set."""
        return {
            row["seed"]: row["expected"] if kind == "paper" else row["kept"][0]
            for row in self.of_kind(kind)
        }

    def of_kind(self, kind: str) -> list[Row]:
        """Rows of one kind, seeds in order."""
        found = [row for row in self.rows if row["kind"] == kind]
        return sorted(found, key=lambda row: row["seed"])

    def curve(self, column: str, *, seed: int) -> tuple[list[int], list[float]]:
        """A column against the fixed number of points."""
        rows = [row for row in self.of_kind("fixed") if row["seed"] == seed]
        pairs = sorted(p for row in rows for p in zip(row["sizes"], row[column], strict=True))
        return [size for size, _ in pairs], [value for _, value in pairs]

    def curves(self, column: str) -> tuple[list[int], list[list[float]]]:
        """The same for every seed whose curve is complete."""
        seeds = sorted({row["seed"] for row in self.of_kind("fixed")})
        found = [self.curve(column, seed=seed) for seed in seeds]
        widest = max((sizes for sizes, _ in found), key=len, default=[])
        return widest, [values for sizes, values in found if sizes == widest]

    def above_curve(self, kind: str, column: str) -> list[float]:
        """A procedure's sets less the curve of the same seed, interpolated at the same number of
        points, in nats; the mean over its sets that lie within the curve, by seed."""
        means = []
        for row in self.of_kind(kind):
            sizes, values = self.curve(column, seed=row["seed"])
            if sizes:
                within = [
                    value - float(np.interp(size, sizes, values))
                    for size, value in zip(row["kept"], row[column], strict=True)
                    if sizes[0] <= size <= sizes[-1]
                ]
                means += [sum(within) / len(within)] if within else []
        return means


def grouped(levels: Sequence[Level]) -> Iterator[tuple[str, list[Level]]]:
    """Levels of each group, from least to most."""
    for group in dict.fromkeys(level.group for level in levels):
        mine = [level for level in levels if level.group == group]
        yield group, sorted(mine, key=lambda level: level.value)


def falling_claim(said: str, levels: Sequence[Level], kind: str) -> list[str]:
    """Whether the mean number of points falls at every step from level to level.

    Of the seeds that have a run at every level; no line while there is none.
    """
    numbers = [level.numbers(kind) for level in levels]
    seeds = set.intersection(*(set(each) for each in numbers))
    paths = [[each[seed] for each in numbers] for seed in sorted(seeds)]
    if not paths:
        return []
    means = [sum(each) / len(each) for each in zip(*paths, strict=True)]
    steps = [step for path in paths for step, _ in enumerate(path)]
    correlation = _rank_correlation(steps, [number for path in paths for number in path])
    found = (
        f"{_listed(means)} points on average; rank correlation {correlation:.2f}; at every step "
        f"in {sum(_falls(path) for path in paths)} of {len(paths)} seeds"
    )
    return [claim(f"{said}, {NAMES[kind]}", agrees=_falls(means), found=found)]


def curve_claim(
    said: str, levels: Sequence[Level], kind: str, column: str, *, sign: int
) -> list[str]:
    """Whether a procedure's sets are level with the curve of fixed numbers, or better.

    No line where none of its sets can be compared.

    Args:
        sign: 1 if more is better, −1 if less is.
    """
    differences = [(level, level.above_curve(kind, column)) for level in levels]
    gains = [(level, sign * sum(each) / len(each)) for level, each in differences if each]
    if not gains:
        return []
    worse = [level for level, gain in gains if gain < -MARGIN * level.N]
    better = [level for level, gain in gains if gain > MARGIN * level.N]
    per_row = [gain / level.N for level, gain in gains]
    found = (
        f"better by more than {MARGIN} nats a row at {len(better)}, worse at {len(worse)} of "
        f"{len(gains)} settings; better by {min(per_row):+.3f} to {max(per_row):+.3f} nats a row"
    )
    if worse:
        where = ", ".join(f"{level.group} {level.value:.3g}" for level in worse)
        found += f"; worse at {where}"
    if len(gains) < len(levels):
        found += f"; {len(levels) - len(gains)} outside the curve"
    return [claim(f"{said}, {NAMES[kind]}", agrees=not worse, found=found)]


def _rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's, and nought where one of them never changes."""
    a, b = (rankdata(values) for values in (first, second))
    return 0.0 if min(np.ptp(a), np.ptp(b)) == 0 else float(np.corrcoef(a, b)[0, 1])


def _falls(values: Sequence[float]) -> bool:
    """As far as can be seen in what is printed."""
    return all(round(b, 1) < round(a, 1) for a, b in pairwise(values))


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)
