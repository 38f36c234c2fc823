"""An experiment: runs that are told apart by their settings, and a figure drawn from their rows."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from winnowgp.experiments.runs import Row


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
