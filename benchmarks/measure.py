"""Timing, result files and text tables of the benchmarks.

Results are JSON Lines files in benchmarks/results, written and read by `winnowgp.experiments`.
"""

import re
import time
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from winnowgp.errors import InputError
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


def markdown(header: Iterable[str], lines: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table; columns whose name begins with ">" are right-aligned."""
    names = list(header)
    rules = ["---:" if name.startswith(">") else "---" for name in names]
    cells = [[name.removeprefix(">") for name in names], rules, *lines]
    return "\n".join(
        "|" + "|".join(f" {c} " if str(c) else " " for c in line) + "|" for line in cells
    )


def replace_section(page: str, name: str, content: str) -> str:
    """Return the page with new content between the two comments of a section."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    page, count = pattern.subn(lambda match: f"{match[1]}\n{content}\n\n{match[2]}", page)
    if count != 1:
        raise InputError(f"the page must have one section `<!-- {name} -->`; it has {count}.")
    return page


def replace_sections(path: Path, **contents: str) -> None:
    """Write new contents of sections, given by name, into a page."""
    page = path.read_text(encoding="utf-8")
    for name, content in contents.items():
        page = replace_section(page, name, content)
    path.write_text(page, encoding="utf-8")


def grouped(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Return the rows by the values of some columns, in the order in which these first occur."""
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[key] for key in keys)].append(row)
    return dict(groups)


def parser_of(
    documentation: str | None,
    *,
    seeds: Sequence[int],
    file: Path | None = None,
    methods: Sequence[str] = (),
    most: int | None = None,
) -> ArgumentParser:
    """Return a parser of what benchmarks of many fits share: seeds, processes, and the summary.

    Args:
        documentation: the docstring of the benchmark, whose first line describes it.
        seeds: the default seeds.
        file: the default result file, if it can be another one.
        methods: all methods, if they can be chosen.
        most: the default of the largest number of training rows, if it can be chosen.
    """
    parser = ArgumentParser(description=(documentation or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds))
    parser.add_argument("--jobs", type=int, default=1, help="fits that run at the same time")
    parser.add_argument("--summary", action="store_true", help="print the results and run nothing")
    if file is not None:
        parser.add_argument("--file", type=Path, default=file, help="the results, one row per fit")
    if methods:
        parser.add_argument("--methods", nargs="+", choices=methods, default=list(methods))
    if most is not None:
        parser.add_argument("--most", type=int, default=most, help="most training rows")
    return parser


def run_missing(
    runs: Runs,
    work: Callable[..., Row | None],
    cases: Iterable[tuple[Any, ...]],
    *,
    keys: Sequence[str],
    jobs: int,
) -> Iterator[Row]:
    """Run the cases that have no row yet in so many processes; yield rows as they are written.

    Args:
        runs: the result file.
        work: returns the row of a case; None if it cannot be run here.
        keys: columns of a row that are the values of its case.
    """
    done = set(grouped(runs, *keys))
    missing = [case for case in cases if case not in done]
    with ProcessPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(work, *case) for case in missing]):
            if (row := future.result()) is not None:
                yield runs.add(row)


def mean(values: Iterable[float]) -> float:
    """Return the arithmetic mean; NaN if there are no values."""
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else float("nan")
