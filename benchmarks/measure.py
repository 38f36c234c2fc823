"""Timing, result files and text tables of the benchmarks.

Results are JSON Lines files in benchmarks/results, written and read by `winnowgp.experiments`.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from winnowgp.experiments.runs import Row, Runs

RESULTS = Path(__file__).parent / "results"

T = TypeVar("T")


def new_results(name: str) -> Runs:
    """Return a result file, which the first new row starts anew."""
    return Runs(RESULTS / f"{name}.jsonl", replace=True)


def read_results(pattern: str) -> list[Row]:
    """Return all rows of the result files that match a pattern, in the order of file names."""
    return [row for path in sorted(RESULTS.glob(f"{pattern}.jsonl")) for row in Runs(path)]


@dataclass(frozen=True, slots=True)
class Seconds:
    """Wall-clock time, and CPU time of this process."""

    wall: float
    cpu: float

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.wall + other.wall, self.cpu + other.cpu)

    def times(self, factor: float) -> "Seconds":
        """Return the time of the same work repeated `factor` times."""
        return Seconds(factor * self.wall, factor * self.cpu)

    def row(self, prefix: str = "") -> Row:
        """Return both times as columns of a row."""
        return {f"{prefix}wall_s": round(self.wall, 4), f"{prefix}cpu_s": round(self.cpu, 4)}


def timed(work: Callable[[], T]) -> tuple[T, Seconds]:
    """Return the result of a function and the time that it took."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return result, Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def table(header: Iterable[str], lines: Iterable[Iterable[object]]) -> str:
    """Return a text table with right-aligned columns."""
    cells = [[str(c) for c in line] for line in [list(header), *[list(line) for line in lines]]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    )


def mean(values: Iterable[float]) -> float:
    """Return the arithmetic mean; NaN if there are no values."""
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else float("nan")
