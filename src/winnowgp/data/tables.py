"""Tables with named columns of numbers, strings and dates."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from winnowgp.errors import InputError

Column: TypeAlias = NDArray[Any]
"""Numbers in float64, NaN where missing; or an object array of strings, None where missing."""

MISSING_STRINGS = frozenset({"", "na", "n/a", "nan", "null", "none", "?", "<na>", "nat"})
"""Strings, in lower case, that are read as missing values."""

# Integers below this are exact in float64.
_EXACT = 2.0**53


@dataclass(frozen=True, slots=True)
class Origin:
    """The position of a block of rows in its file, for error messages.

    >>> Origin(before=100).describe(0)
    'row 101'
    >>> Origin(before=100, groups=(60, 120)).describe(0)
    'row 101 (row group 1, counted from 0)'
    """

    before: int
    """Number of rows of the file before the block."""
    groups: tuple[int, ...] = ()
    """Number of rows up to the end of each row group of a Parquet file."""

    def describe(self, row: int) -> str:
        """Return the name of a row of the block: its number in the file, counted from 1."""
        row += self.before
        group = f" (row group {bisect_right(self.groups, row)}, counted from 0)"
        return f"row {row + 1}{group if self.groups else ''}"

    def after(self, rows: int) -> "Origin":
        """Return the origin of the block without its first `rows` rows."""
        return Origin(self.before + rows, self.groups)


@dataclass(frozen=True, slots=True)
class DataTable:
    """Named columns of equal length, some of whose values may be missing.

    >>> table = DataTable.of({"size": [1, 2, None], "colour": ["red", "NA", "blue"]})
    >>> table.N, table.strings("colour").tolist()
    (3, ['red', None, 'blue'])
    """

    values: dict[str, Column]
    origin: Origin | None = None
    """Position of the rows in their file; None if they are not a part of one."""

    @classmethod
    def of(cls, table: Mapping[str, Any] | Any) -> "DataTable":
        """Convert a data frame, or a dictionary of sequences."""
        values = {str(name): _column(str(name), table[name]) for name in table.keys()}  # noqa: SIM118
        lengths = {name: len(column) for name, column in values.items()}
        if len(set(lengths.values())) > 1:
            raise InputError(f"all columns must have one length; got {lengths}.")
        return cls(values)

    @classmethod
    def joined(cls, blocks: Sequence["DataTable"]) -> "DataTable":
        """Return the rows of several tables with the same columns, one after another.

        A column with numbers in some blocks and strings in others becomes strings.
        """
        if len(blocks) == 1:
            return blocks[0]
        return cls(
            {name: _joined([b.values[name] for b in blocks]) for name in blocks[0].names},
            blocks[0].origin,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns, in order."""
        return tuple(self.values)

    @property
    def N(self) -> int:
        """Number of rows."""
        return len(next(iter(self.values.values()))) if self.values else 0

    def numbers(self, name: str) -> NDArray[np.float64] | None:
        """Return a column as numbers, NaN where missing; None if a string is not a number."""
        column = self.values[name]
        if column.dtype != object:
            return column
        try:
            return np.array(
                [np.nan if v is None else parse_number(v) for v in column], dtype=np.float64
            )
        except ValueError:
            return None

    def strings(self, name: str) -> NDArray[np.object_]:
        """Return a column as strings, None where missing; integers have no decimal point."""
        return _strings(self.values[name])

    def missing(self, name: str) -> NDArray[np.bool_]:
        """Return a mask of the missing values of a column."""
        column = self.values[name]
        if column.dtype != object:
            return np.isnan(column)
        return np.array([value is None for value in column], dtype=bool)

    def n_unique(self, name: str) -> int:
        """Return the number of distinct values of a column that are not missing."""
        present = self.values[name][~self.missing(name)]
        return len(set(present) if present.dtype == object else np.unique(present))

    def parse_numbers(self, names: Iterable[str]) -> "DataTable":
        """Convert those of these columns that hold numbers as strings."""
        parsed = {n: values for n in names if (values := self.numbers(n)) is not None}
        return DataTable({**self.values, **parsed}, self.origin)

    def without(self, names: Iterable[str]) -> "DataTable":
        """Return the table without these columns."""
        dropped = set(names)
        return DataTable({n: v for n, v in self.values.items() if n not in dropped}, self.origin)

    def part(self, rows: slice | NDArray[Any]) -> "DataTable":
        """Return some rows, by a slice, indices or a mask; a slice keeps its position in a file."""
        origin = None
        if isinstance(rows, slice) and self.origin is not None:
            origin = self.origin.after(rows.indices(self.N)[0])
        return DataTable({name: column[rows] for name, column in self.values.items()}, origin)

    def describe_row(self, row: int) -> str:
        """Return the name of a row for an error message, counted from 1 in its file."""
        return f"row {row + 1}" if self.origin is None else self.origin.describe(row)

    def require_columns(self, names: Sequence[str], *, argument: str) -> None:
        """Raise an error that lists the columns if a name is not among them.

        Args:
            argument: the argument that gave the names, for the error message.
        """
        absent = [name for name in names if name not in self.values]
        if absent:
            raise InputError(
                f"{argument} must name columns of the table; {_quoted(absent)} "
                f"{'is' if len(absent) == 1 else 'are'} not among {_quoted(self.names)}."
            )


def distinct_names(header: Iterable[str], path: Path) -> list[str]:
    """Strip the column names of a file, and raise an error if one is empty or repeated."""
    names = [name.strip() for name in header]
    for number, name in enumerate(names, start=1):
        if not name:
            raise InputError(
                f"{path}: column {number} has no name; give every column one "
                "(pandas: `to_csv(..., index=False)`)."
            )
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        shown = ", ".join(repr(name[:60]) for name in repeated[:5])
        raise InputError(f"{path}: more than one column is called {shown}; rename them.")
    return names


def format_number(value: float) -> str:
    """Write a number without a superfluous decimal point.

    >>> format_number(3.0), format_number(0.25)
    ('3', '0.25')
    """
    return str(int(value)) if value.is_integer() and abs(value) < _EXACT else repr(float(value))


def parse_number(text: str) -> float:
    """Parse a number; unlike `float`, refuse underscores, as in 1_000."""
    if "_" in text:
        raise ValueError(text)
    return float(text)


def parse_string(text: str) -> str | None:
    """Strip blanks; return None if the string means that the value is missing."""
    stripped = text.strip()
    return None if stripped.lower() in MISSING_STRINGS else stripped


def _strings(column: Column) -> NDArray[np.object_]:
    if column.dtype == object:
        return column
    return np.array([None if np.isnan(v) else format_number(v) for v in column], dtype=object)


def _joined(columns: list[Column]) -> Column:
    one_dtype = len({column.dtype for column in columns}) == 1
    return np.concatenate(columns if one_dtype else [_strings(column) for column in columns])


def _column(name: str, values: Any) -> Column:
    """Convert numbers to float64, dates to ISO strings and everything else to strings."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise InputError(f"column {name!r} must hold one value per row; got shape {array.shape}.")
    if array.dtype.kind == "M":
        text = np.datetime_as_string(array, unit="s")
        return np.array([None if t == "NaT" else str(t) for t in text], dtype=object)
    if array.dtype.kind == "f" or (array.dtype.kind in "iu" and _exact(array)):
        return array.astype(np.float64)
    return np.array([_string(v) for v in array.tolist()], dtype=object)


def _exact(integers: NDArray[Any]) -> bool:
    return not len(integers) or max(abs(int(integers.min())), abs(int(integers.max()))) < _EXACT


def _string(value: Any) -> str | None:
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, float):
        return None if np.isnan(value) else format_number(value)
    if isinstance(value, bool):
        return str(value).lower()
    return parse_string(str(value))


def _quoted(names: Sequence[str], most: int = 12) -> str:
    shown = ", ".join(repr(name) for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
