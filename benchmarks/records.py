"""Rows of measurements in JSONL files, and the clocks that go into them."""

import json
import os
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch

import winnowgp

RESULTS = Path(__file__).parent / "results"

Row = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Seconds:
    """How long something took: by the wall's clock, and of this process's CPU time."""

    wall: float
    cpu: float

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.wall + other.wall, self.cpu + other.cpu)

    def times(self, factor: float) -> "Seconds":
        """The same work `factor` times over."""
        return Seconds(factor * self.wall, factor * self.cpu)

    def row(self, prefix: str = "") -> Row:
        """Columns of a row."""
        return {f"{prefix}wall_s": round(self.wall, 4), f"{prefix}cpu_s": round(self.cpu, 4)}


def timed(work: Callable[[], T]) -> tuple[T, Seconds]:
    """What `work` returns, and how long it took."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return result, Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def versions() -> Row:
    """What the numbers depend on."""
    names = ("torch", "gpytorch", "numpy", "scikit-learn")
    return {
        "winnowgp": winnowgp.__version__,
        **{name: version(name) for name in names},
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }


class Records:
    """One file of rows, replaced whole each time a row is added: never seen half written."""

    def __init__(self, name: str) -> None:
        self.path = RESULTS / f"{name}.jsonl"
        self.rows: list[Row] = []
        self._versions = versions()

    def add(self, **columns: Any) -> Row:
        """Append a row, with versions, and save."""
        row = {**columns, "versions": self._versions}
        self.rows.append(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(f".{os.getpid()}.part")
        part.write_text("".join(json.dumps(r) + "\n" for r in self.rows), encoding="utf-8")
        part.replace(self.path)
        return row


def recorded(pattern: str) -> list[Row]:
    """All rows of the result files that match, in order of file name."""
    files = sorted(RESULTS.glob(f"{pattern}.jsonl"))
    return [
        json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()
    ]


def table(header: Iterable[str], lines: Iterable[Iterable[object]]) -> str:
    """Columns lined up; numbers as they come."""
    cells = [[str(c) for c in line] for line in [list(header), *[list(line) for line in lines]]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    )


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean; NaN of nothing."""
    listed = list(values)
    return sum(listed) / len(listed) if listed else float("nan")
