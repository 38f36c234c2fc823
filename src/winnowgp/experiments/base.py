"""Experiments: their rows, claims and catalogue."""

import hashlib
import json
import os
import platform
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

import winnowgp
from winnowgp.plots.regression import Curve

# Results of experiments as tidy JSON lines, one row a run, that a later start goes on with.


Row = dict[str, Any]


def source_digest(root: Path) -> str:
    """Twelve hexadecimal digits that change with any Python file below a folder, or its place."""
    found = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        body = hashlib.sha256(path.read_bytes()).hexdigest()
        found.update(f"{path.relative_to(root).as_posix()} {body}\n".encode())
    return found.hexdigest()[:12]


# Taken when the code is: files that are edited while runs are made do not make them.
SOURCE = source_digest(Path(winnowgp.__file__).parent)


@final
class Runs:
    """A file of rows. Each is written at once, whole, so that whatever ends a run loses none.

    Args:
        path: the file; made when the first row is added.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[Row]:
        if not self.path.exists():
            return
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                # The last line of a run that was ended while it wrote.
                continue

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row, with the versions behind it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        full = {**row, "versions": versions()}
        line = json.dumps(full, separators=(",", ":")) + "\n"
        # A run that was ended while it wrote left its last line open.
        torn = self.path.exists() and self.path.read_bytes()[-1:] not in (b"", b"\n")
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" * torn + line)
            file.flush()
            os.fsync(file.fileno())


def versions() -> Row:
    """What the numbers depend on besides their settings; never what makes two runs the same."""
    names = ("torch", "gpytorch")
    return {
        "winnowgp": winnowgp.__version__,
        "source": SOURCE,
        **{name: version(name) for name in names},
        "python": platform.python_version(),
    }


# An experiment: runs that are told apart by their settings, and a figure drawn from their rows.


@dataclass(frozen=True, slots=True)
class Scope:
    """How much of an experiment is wanted, and where."""

    quick: bool = False
    """A minute or two on two cores: fewer seeds, steps and rows."""
    seeds: int | None = None
    """Repetitions; None for as many as the experiment usually has."""
    device: str = "cpu"


class Experiment(ABC):
    """One figure of the paper.

    A run is made from its settings alone, so that runs can be made in any order, in several
    processes, and not again where their row exists.
    """

    name: ClassVar[str]
    """As `winnow reproduce` takes it."""
    title: ClassVar[str]
    """One line: the figure, and what it shows."""
    tables: ClassVar[tuple[str, ...]] = ()
    """Data sets that must be on this machine, as `load_table` names them."""
    folds: ClassVar[int | None] = None
    """Of the data, where repetitions are folds: there are no more. None where they are seeds."""

    @abstractmethod
    def settings(self, scope: Scope, rows: Sequence[Row]) -> list[Row]:
        """Of every run that can be made now. Asked again once those are made: runs whose settings
        depend on the results of others come then.

        Whatever changes a result is among its settings (numbers of steps, sizes, strengths): a row
        is used again only where all of them agree. The device is not.

        Args:
            rows: those whose settings were asked for and that exist already.
        """

    @abstractmethod
    def measured(self, settings: Row, scope: Scope) -> Row:
        """Make one run; the columns that its results add to its settings."""

    def alone(self, settings: Row) -> bool:
        """Whether a run measures time. Such runs are made after all others, one at a time: what
        shares the machine with others takes as long as they let it."""
        return False

    @abstractmethod
    def draw(self, rows: Sequence[Row], path: Path) -> Path:
        """The figure, from rows alone."""

    def claims(self, rows: Sequence[Row]) -> list[str]:
        """What the paper says of this figure, and whether these rows agree, a line each."""
        return []


def claim(said: str, *, agrees: bool, found: str) -> str:
    """A line of `claims`.

    >>> claim("fewer points with more noise", agrees=True, found="17, 12 and 6")
    'agrees: fewer points with more noise (17, 12 and 6)'
    """
    return f"{'agrees' if agrees else 'does not agree'}: {said} ({found})"


def counted(number: int, thing: str) -> str:
    """So many of a thing.

    >>> counted(1, "run"), counted(3, "run")
    ('1 run', '3 runs')
    """
    return f"{number} {thing}{'' if number == 1 else 's'}"


# Rows of a kind.


def alike(rows: Sequence[Row], *columns: str) -> list[list[Row]]:
    """Rows that agree in some columns, in the order in which they came.

    >>> alike([{"a": 1, "b": 0}, {"a": 2}, {"a": 1, "b": 5}], "a")
    [[{'a': 1, 'b': 0}, {'a': 1, 'b': 5}], [{'a': 2}]]
    """
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(column) for column in columns), []).append(row)
    return list(found.values())


# Numbers of figures as rows hold them: short, and made of lists.


_COLUMNS = ("grid", "mean", "sd", "points", "heights")


def rounded(values: Float[Tensor, "..."], digits: int = 3) -> list[Any]:
    """Nested lists of numbers with a few decimals.

    >>> rounded(torch.tensor([[1.23456, 2.0]], dtype=torch.float64))
    [[1.235, 2.0]]
    """
    # Not torch.round(decimals=...): 1.235 must be the double nearest to it, and short in JSON.
    if values.dim() > 1:
        return [rounded(part, digits) for part in values]
    return [round(value, digits) for value in values.tolist()]


def numbers(values: Sequence[Any]) -> Float[Tensor, "..."]:
    """The way back."""
    return torch.tensor(values, dtype=torch.float64)


def curve_row(curve: Curve) -> Row:
    """A curve for a row."""
    return {name: rounded(getattr(curve, name)) for name in _COLUMNS}


def curve_of(row: Row) -> Curve:
    """The curve that a row holds."""
    return Curve(**{name: numbers(row[name]) for name in _COLUMNS})


# What a quick look leaves out, read off the settings themselves.


_MOST = 4


def quick_cuts(experiment: Experiment, scope: Scope) -> str:
    """How the settings of a quick scope differ from those of a full one, in one line."""
    quick, full = experiment.settings(scope, []), experiment.settings(Scope(), [])
    parts = [f"{counted(len(quick), 'run')} instead of {len(full)}"]
    less, more = _values(quick), _values(full)
    for name, values in less.items():
        if name in more and set(values) != set(more[name]):
            parts.append(f"{name} {_said(values)} instead of {_said(more[name])}")
    return "; ".join(parts)


def _values(settings: list[Row]) -> dict[str, list[str]]:
    """The different values of each setting; those inside another by both names."""
    found: dict[str, dict[str, None]] = {}
    for row in settings:
        for name, value in row.items():
            parts = value.items() if isinstance(value, dict) else [("", value)]
            for part, inner in parts:
                found.setdefault(f"{name} {part}".strip(), {})[_word(inner)] = None
    return {name: list(values) for name, values in found.items()}


def _word(value: object) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _said(values: list[str]) -> str:
    shown = values if len(values) <= _MOST else [*values[:2], "...", values[-1]]
    return ", ".join(shown)


# CPU seconds that can be compared: what is timed has one thread.


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes with one thread inside, and with as many as before after."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# What the two ways of choosing points are called, wherever both are shown.


PROCEDURE_NAMES = {"paper": "the paper's procedure", "fast": "the fast schedule"}
