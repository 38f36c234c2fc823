"""The rows of a table for a fit: which columns are inputs, and which rows are held out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from winnowgp.data import DataTable
from winnowgp.data.columns import ColumnKind, column_kinds, column_note, parse_numbers
from winnowgp.data.encoding import TableEncoder
from winnowgp.errors import FitWarning, InputError, NoInducingPointsWarning
from winnowgp.tabular.model import prediction_names
from winnowgp.tabular.splits import (
    Rows,
    Split,
    has_groups,
    held_out_split,
    random_split_warning,
    unseen_groups_warning,
)
from winnowgp.tabular.targets import (
    check_positive,
    check_proportions,
    constant_target_warning,
    few_rows_warning,
    implied_task,
    known_noise,
    likelihood_warning,
    numeric_target_kind,
    rows_with_target,
    task_of,
    training_targets,
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How the columns and rows of a table are read; `fit_table` describes the options."""

    test_size: float
    split_by: str | None
    id_column: str | None
    drop: Sequence[str]
    categorical: Sequence[str]
    decimal: str
    dates: str
    missing: str
    max_categories: int
    seed: int

    def __post_init__(self) -> None:
        # A string is a sequence of its characters, which may be names of columns as well.
        for argument in ("drop", "categorical"):
            if isinstance(names := getattr(self, argument), str):
                raise InputError(
                    f"`{argument}` must be a sequence of column names, such as {(names,)}; got the "
                    f"string {names!r}."
                )
            object.__setattr__(self, argument, tuple(names))

    @property
    def ignored(self) -> tuple[str, ...]:
        """Columns that are neither inputs nor targets."""
        return (*self.drop, *(() if self.id_column is None else (self.id_column,)))

    def require_columns(self, table: DataTable, targets: Sequence[str], *, argument: str) -> None:
        """Raise an error if the table lacks a column that is named.

        Args:
            argument: the argument that gave the targets, for the error message.
        """
        table.require_columns(targets, argument=argument)
        table.require_columns(self.ignored, argument="`drop` and `id_column`")
        table.require_columns(self.categorical, argument="`categorical`")

    def kinds(self, table: DataTable, names: Iterable[str]) -> dict[str, ColumnKind]:
        """Return what each of these columns holds."""
        return column_kinds(
            table, names, decimal=self.decimal, dates=self.dates, categorical=self.categorical
        )

    def split(self, table: DataTable) -> Split:
        """Return training rows, and those that are held out."""
        return held_out_split(
            table, self.test_size, split_by=self.split_by, seed=self.seed, dates=self.dates
        )

    def encoder(self, inputs: DataTable, kinds: dict[str, ColumnKind], train: Rows) -> TableEncoder:
        """Return the encoder of the inputs that the training rows determine."""
        return TableEncoder.learn(
            inputs,
            kinds=kinds,
            rows=train,
            missing=self.missing,
            max_categories=self.max_categories,
        )


@final
@dataclass(frozen=True, slots=True)
class TableRows:
    """The rows of a table that have a target, and what is known of them before a fit."""

    everything: DataTable
    """The table as it was given, with the rows of a test table."""
    table: DataTable
    inputs: DataTable
    encoder: TableEncoder
    y: NDArray[Any]
    """Numbers, or labels."""
    noise: NDArray[np.float64] | None
    """Known noise variances."""
    train: Rows
    test: Rows
    task: str
    why_task: str
    notes: dict[str, str]
    """What to know about the reading of each column."""
    grouped: bool
    """Whether whole groups are held out."""
    alarms: list[FitWarning]
    """They are issued after the fit, so that an error about the table is the only message."""
    constant: NoInducingPointsWarning | None
    """The one of these that says that the target is constant."""

    def known_noise(self, rows: Rows) -> dict[str, Any]:
        """Return the known noise of some rows as an argument, if there is any."""
        return {} if self.noise is None else {"noise_variance": self.noise[rows]}


def read_rows(
    table: DataTable,
    target: str,
    reading: Reading,
    *,
    task: str,
    likelihood: str,
    log_target: bool,
    noise_column: str | None,
    test_table: DataTable | None,
) -> TableRows:
    """Return the rows of a table for a fit; the arguments are those of `fit_table`."""
    _check_columns(table, target, reading, noise_column)
    if task == "auto" and target in reading.categorical:
        task = "classification"
    task = implied_task(task, likelihood, log_target=log_target)
    rows = table.N
    if test_table is not None:
        if reading.split_by is not None:
            raise InputError("`split_by` must be left out if there is a `test_table`.")
        table = _with_test_rows(table, test_table, optional=reading.ignored)
    # Before any row is left out, so that an error gives the row number in the table.
    everything = table
    apart = (target, *reading.ignored, *(() if noise_column is None else (noise_column,)))
    names = table.without(apart).names
    # Labels of classes stay as they are written.
    kinds = reading.kinds(table, names if task == "classification" else (*names, target))
    target_kind = numeric_target_kind(kinds.pop(target, None), table, target)
    notes = {n: column_note(table, n, kind) for n, kind in {**kinds, **target_kind}.items()}
    table = parse_numbers(table, {**kinds, **target_kind})
    table, number = rows_with_target(table, target, missing=reading.missing)
    task, why = task_of(table, target, task)
    _check_id(reading.id_column, table, target, task)
    inputs = table.without(apart)
    noise = None if noise_column is None else known_noise(table, noise_column, number)
    if test_table is not None:
        train, test = np.flatnonzero(number <= rows), np.flatnonzero(number > rows)
        _check_test_rows(train, test)
    else:
        train, test = reading.split(table)
    encoder = reading.encoder(inputs, kinds, train)
    if target in target_kind:
        encoder = replace(encoder, target=target_kind[target].notation)
    y = training_targets(table, target, task, train, number)
    if log_target:
        check_positive(y, target, number)
    if likelihood == "beta":
        check_proportions(y, target, number, percent=encoder.target.sign == "%")
    alarms: list[FitWarning | None] = [few_rows_warning(len(train))]
    constant = None if task == "classification" else constant_target_warning(y[train], target)
    alarms.append(constant)
    if task == "regression" and likelihood == "auto" and not log_target:
        alarms.append(likelihood_warning(y[train], target))
    split_by = reading.split_by
    if split_by is None and test_table is None and len(test):
        alarms.append(random_split_warning(inputs, encoder.dates))
    grouped = split_by is not None and has_groups(table, split_by, dates=reading.dates)
    if split_by is not None and grouped and split_by in inputs.values and len(test):
        alarms.append(unseen_groups_warning(split_by))
    return TableRows(
        everything,
        table,
        inputs,
        encoder,
        y,
        noise,
        train,
        test,
        task,
        why,
        notes,
        grouped,
        [alarm for alarm in alarms if alarm is not None],
        constant,
    )


def _check_columns(
    table: DataTable, target: str, reading: Reading, noise_column: str | None
) -> None:
    """Raise an error if a column is missing, or has two uses."""
    reading.require_columns(table, [target], argument="`target`")
    if target in reading.ignored:
        raise InputError(
            f"`target` must not be in `drop` nor be the `id_column`; got {target!r} as both."
        )
    if noise_column is None:
        return
    if noise_column in (target, *reading.ignored, *reading.categorical):
        raise InputError(
            "`noise_column` must not be the target, the `id_column`, in `drop` or in "
            f"`categorical`; got {noise_column!r} as both."
        )
    table.require_columns([noise_column], argument="`noise_column`")


def _check_id(id_column: str | None, table: DataTable, target: str, task: str) -> None:
    """Check that no column of predictions has the name of the id column."""
    classes = table.strings(target) if task == "classification" else ()
    if id_column in prediction_names(task, classes):
        raise InputError(
            f"`id_column` must not be the name of a column of predictions; got {id_column!r}. "
            "Rename it."
        )


def _with_test_rows(table: DataTable, test: DataTable, *, optional: tuple[str, ...]) -> DataTable:
    """Return the rows of both tables; the second one may lack columns that are not used."""
    lacking = [n for n in table.names if n not in optional and n not in test.values]
    if lacking:
        raise InputError(
            "`test_table` (`--test-file`) must have the target and all inputs; it lacks "
            f"{', '.join(map(repr, lacking[:12]))}."
        )
    absent = {name: np.full(test.N, None, dtype=object) for name in optional}
    values = {name: test.values.get(name, absent.get(name)) for name in table.names}
    return DataTable.joined([table, DataTable({n: v for n, v in values.items() if v is not None})])


def _check_test_rows(train: NDArray[Any], test: NDArray[Any]) -> None:
    if not len(train) or not len(test):
        raise InputError(
            "the table and the `test_table` must each have rows with a target; got "
            f"{len(train)} and {len(test)}."
        )
