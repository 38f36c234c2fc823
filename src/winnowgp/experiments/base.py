"""The interface of an experiment, and the functions that experiments share."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.experiments.runs import Row
from winnowgp.gradients import ScoreFunction
from winnowgp.plots import Curve
from winnowgp.plots.style import COLOURS

PROCEDURE_NAMES = {"paper": "the paper's procedure", "fast": "the fast schedule"}
RELEASED_NAMES = {"released": "the released settings"}
"""Runs of the paper's procedure with the settings of the scripts that its authors released."""
PROCEDURE_COLOURS = {
    "paper": COLOURS["posterior"],
    "fast": COLOURS["inclusion"],
    "released": COLOURS["posterior"],
}


@dataclass(frozen=True, slots=True)
class Scope:
    """The part of an experiment that is run, and the device."""

    quick: bool = False
    """Run a smaller version, with fewer seeds, steps and rows, in a minute or two on two cores."""
    seeds: int | None = None
    """Number of repetitions; None for the default of the experiment."""
    device: str = "cpu"
    released: bool = False
    """Run the paper's procedure with the released settings instead of the printed ones."""


class Experiment(ABC):
    """One figure of the paper, drawn from the rows of independent runs.

    A run depends on its settings alone. Runs can therefore be made in any order and in several
    processes, and a run whose row exists is not repeated.
    """

    name: ClassVar[str]
    """The name that `winnow reproduce` takes."""
    title: ClassVar[str]
    """One line: the figure, and what it shows."""
    tables: ClassVar[tuple[str, ...]] = ()
    """Data sets that the runs need, by the names that `load_table` takes."""
    folds: ClassVar[int | None] = None
    """Number of folds if repetitions are folds, an upper limit of `Scope.seeds`; None for seeds."""
    has_released: ClassVar[bool] = False
    """Whether there are runs with the released settings."""

    @abstractmethod
    def settings(self, scope: Scope, rows: Sequence[Row]) -> list[Row]:
        """Return the settings of every run that can be made, given the runs that exist.

        Runs may depend on the results of others: the method is called again after those are made.
        A row is reused only if all of its settings agree, so everything that changes a result is
        a setting (numbers of steps, sizes, strength of the prior). The device is not.

        Args:
            scope: the part of the experiment to run.
            rows: rows of the runs in this scope that exist already.
        """

    @abstractmethod
    def run(self, settings: Row, scope: Scope) -> Row:
        """Make one run and return its results, which are added to its settings."""

    def runs_alone(self, settings: Row) -> bool:
        """Return whether a run measures time; it is then made after all others and by itself."""
        return False

    @abstractmethod
    def draw(self, rows: Sequence[Row], path: Path) -> Path:
        """Draw the figure from rows alone and return its path."""

    def claims(self, rows: Sequence[Row]) -> list[str]:
        """Return the paper's claims about this figure, and whether the rows agree with each."""
        return []


def process_options(settings: Row) -> dict[str, Any]:
    """Return the options of `PaperSchedule` for the point process that some settings name."""
    options: dict[str, Any] = {}
    if "subsets" in settings:
        options["gradient"] = ScoreFunction(settings["subsets"])
    names = {
        "process_learning_rate": "inclusion_learning_rate",
        "start_inclusion": "initial_inclusion",
    }
    return options | {names[name]: settings[name] for name in names if name in settings}


def claim(statement: str, *, agrees: bool, evidence: str) -> str:
    """Return one line of `Experiment.claims`.

    >>> claim("fewer points with more noise", agrees=True, evidence="17, 12 and 6")
    'agrees: fewer points with more noise (17, 12 and 6)'
    """
    return f"{'agrees' if agrees else 'does not agree'}: {statement} ({evidence})"


def group_rows(rows: Sequence[Row], *columns: str) -> list[list[Row]]:
    """Group rows that agree in some columns; groups and rows keep their order.

    >>> group_rows([{"a": 1, "b": 0}, {"a": 2}, {"a": 1, "b": 5}], "a")
    [[{'a': 1, 'b': 0}, {'a': 1, 'b': 5}], [{'a': 2}]]
    """
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(column) for column in columns), []).append(row)
    return list(groups.values())


def to_lists(values: Float[Tensor, "..."], digits: int = 3) -> list[Any]:
    """Return a tensor as nested lists of numbers with a few decimals.

    >>> to_lists(torch.tensor([[1.23456, 2.0]], dtype=torch.float64))
    [[1.235, 2.0]]
    """
    # Not torch.round(decimals=...): 1.235 must be the nearest double, which is short in JSON.
    if values.dim() > 1:
        return [to_lists(slice_, digits) for slice_ in values]
    return [round(value, digits) for value in values.tolist()]


def to_tensor(values: Sequence[Any]) -> Float[Tensor, "..."]:
    """Return nested lists as a tensor in double precision."""
    return torch.tensor(values, dtype=torch.float64)


_CURVE_COLUMNS = ("grid", "mean", "sd", "points", "heights")


def curve_to_row(curve: Curve) -> Row:
    """Return a curve as columns of a row."""
    return {name: to_lists(getattr(curve, name)) for name in _CURVE_COLUMNS}


def curve_from_row(row: Row) -> Curve:
    """Return the curve that `curve_to_row` stored."""
    return Curve(**{name: to_tensor(row[name]) for name in _CURVE_COLUMNS})
