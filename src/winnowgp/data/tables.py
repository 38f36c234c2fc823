"""Tables with named columns of numbers, strings and dates, from data frames and dictionaries.

pandas, polars and pyarrow are recognised by name and never imported here: a frame of one of them
comes from a process that has imported it.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from winnowgp.data.notation import Notation
from winnowgp.errors import InputError

Column: TypeAlias = NDArray[Any]
"""Numbers in float64, NaN where missing; or an object array of strings, None for empty ones."""

TableLike: TypeAlias = Any
"""A `DataTable`, a data frame of pandas, polars or pyarrow, or a dictionary of sequences."""

MISSING_STRINGS = frozenset({"", "na", "n/a", "#n/a", "nan", "null", "none", "?", "<na>", "nat"})
"""Strings, in lower case, that are read as missing values."""

_LONGEST_MISSING = max(map(len, MISSING_STRINGS))
# Integers below this are exact in float64.
_EXACT = 2.0**53
_NOT_TABLES = (str, bytes, list, tuple, np.ndarray)


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
    def of(cls, table: "TableLike") -> "DataTable":
        """Convert a data frame of pandas, polars or pyarrow, or a dictionary of sequences."""
        if isinstance(table, DataTable):
            return table
        values = table_columns(table)
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

    def numbers(self, name: str, notation: Notation | None = None) -> NDArray[np.float64] | None:
        """Return a column as numbers, NaN where missing; None if a string is not a number.

        Args:
            notation: how strings write numbers, a decimal point and no separators by default.
        """
        column = self.values[name]
        if column.dtype != object:
            return column
        return (notation or Notation()).values(self.strings(name), "number")

    def strings(self, name: str, *, literal: bool = False) -> NDArray[np.object_]:
        """Return a column as strings, None where missing; integers have no decimal point.

        Args:
            literal: whether only empty strings are missing, and NA, null or ? are not.
        """
        column = _strings(self.values[name])
        if literal:
            return column
        return np.array([None if v is None or is_missing(v) else v for v in column], dtype=object)

    def missing(self, name: str, *, literal: bool = False) -> NDArray[np.bool_]:
        """Return a mask of the missing values of a column; see `strings`."""
        column = self.values[name]
        if column.dtype != object:
            return np.isnan(column)
        return np.array([v is None for v in self.strings(name, literal=literal)], dtype=bool)

    def n_unique(self, name: str) -> int:
        """Return the number of distinct values of a column that are not missing."""
        present = self.values[name][~self.missing(name)]
        return len(set(present) if present.dtype == object else np.unique(present))

    def with_columns(self, columns: Mapping[str, Column]) -> "DataTable":
        """Return the table with some columns replaced."""
        return DataTable({**self.values, **columns}, self.origin)

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
            close = get_close_matches(absent[0], self.names, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            if not close and all(_is_number(name) for name in self.names):
                hint = " The first line must name the columns; these are numbers."
            raise InputError(
                f"{argument} must name columns of the table; {_quoted(absent)} "
                f"{'is' if len(absent) == 1 else 'are'} not among {_quoted(self.names)}.{hint}"
            )


ROW_INDEX = ""
"""Name of a first column without one, in which pandas and R write numbers or labels of rows."""


def distinct_names(header: Iterable[str], path: Path) -> list[str]:
    """Strip the column names of a file, and raise an error if one is empty or repeated.

    The first of several columns may be a `ROW_INDEX`.
    """
    names = [name.strip() for name in header]
    for number, name in enumerate(names, start=1):
        if not name and (number > 1 or len(names) == 1):
            raise InputError(
                f"{path}: column {number} has no name; give every column one "
                "(pandas: `to_csv(..., index=False)`)."
            )
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        shown = ", ".join(repr(name[:60]) for name in repeated[:5])
        raise InputError(f"{path}: more than one column is called {shown}; rename them.")
    return names


def is_missing(text: str) -> bool:
    """Return whether a string means that the value is missing.

    >>> is_missing("NA"), is_missing("Namibia")
    (True, False)
    """
    return len(text) <= _LONGEST_MISSING and text.lower() in MISSING_STRINGS


def _strings(column: Column) -> NDArray[np.object_]:
    if column.dtype == object:
        return column
    return np.array([None if np.isnan(v) else format_number(v) for v in column], dtype=object)


def _joined(columns: list[Column]) -> Column:
    one_dtype = len({column.dtype for column in columns}) == 1
    return np.concatenate(columns if one_dtype else [_strings(column) for column in columns])


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _quoted(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:12])
    return shown + (f" and {len(names) - 12} more" if len(names) > 12 else "")


# Columns of data frames and dictionaries.


def table_columns(table: Any) -> dict[str, Column]:
    """Return the columns of a data frame, or of a dictionary of sequences, by name.

    Raises:
        InputError: it is not a table, or a column has no name of its own or no plain values.
    """
    columns = _named_columns(table)
    names = [str(name) for name, _ in columns]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise InputError(f"more than one column is called {repeated[0]!r}; rename them.")
    return {name: column_of(name, values) for name, (_, values) in zip(names, columns, strict=True)}


def _named_columns(table: Any) -> list[tuple[Any, Any]]:
    package = type(table).__module__.partition(".")[0]
    if package == "pyarrow":
        return list(zip(table.schema.names, table.columns, strict=True))
    if package == "polars":
        return [(series.name, series) for series in collected(table).get_columns()]
    if isinstance(table, Mapping):
        return list(table.items())
    if not isinstance(table, _NOT_TABLES) and callable(getattr(table, "items", None)):
        return list(table.items())  # a pandas.DataFrame, or what behaves as one
    raise InputError(
        "the table must be a `DataTable`, a data frame of pandas, polars or pyarrow, or a "
        f"dictionary of columns; got {type(table).__name__}."
    )


def collected(table: Any) -> Any:
    """Return a polars frame; a lazy one is computed."""
    return table.collect() if type(table).__name__ == "LazyFrame" else table


def column_of(name: str, values: Any) -> Column:
    """Convert numbers to float64, durations to days, and dates and all else to strings."""
    package = type(values).__module__.partition(".")[0]
    if package == "pyarrow":
        return arrow_column(name, values)
    if package == "polars" and not values.dtype.is_numeric():
        values = values.to_list()
    array = _array(values)
    if array.ndim != 1:
        raise InputError(f"column {name!r} must hold one value per row; got shape {array.shape}.")
    if array.dtype.kind == "M":
        return _iso_strings(array)
    if array.dtype.kind == "m":
        return array / np.timedelta64(1, "D")
    if array.dtype.kind == "f" or (array.dtype.kind in "iu" and _exact(array)):
        return array.astype(np.float64)
    return np.array([as_string(v) for v in array.tolist()], dtype=object)


def arrow_column(name: str, column: Any, *, place: str = "") -> Column:
    """Convert a column of pyarrow, whatever its type.

    Args:
        place: the start of an error message that names the file.
    """
    import pyarrow

    kind = column.type
    if pyarrow.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = column.type
    if pyarrow.types.is_nested(kind) or pyarrow.types.is_binary(kind):
        raise InputError(
            f"{place}column {name!r} has unsupported type {kind}; expected numbers, strings or "
            "dates. Convert it, or remove it."
        )
    if pyarrow.types.is_null(kind):
        return np.full(len(column), None, dtype=object)
    if pyarrow.types.is_floating(kind):
        # Nulls become NaN; a copy, as pyarrow's own memory is read-only and soon reused.
        return np.array(column.to_numpy(**_copied(column)), dtype=np.float64)
    if pyarrow.types.is_integer(kind) and _exact_arrow(column):
        return np.array(column.cast("float64").to_numpy(**_copied(column)))
    values = column.to_pylist()
    if pyarrow.types.is_decimal(kind):
        return np.array([np.nan if v is None else float(v) for v in values])
    return np.array([as_string(v) for v in values], dtype=object)


def format_number(value: float) -> str:
    """Write a number without a superfluous decimal point.

    >>> format_number(3.0), format_number(0.25)
    ('3', '0.25')
    """
    return str(int(value)) if value.is_integer() and abs(value) < _EXACT else repr(float(value))


def parse_string(text: str) -> str | None:
    """Strip blanks; return None if nothing is left."""
    return text.strip() or None


def as_string(value: Any) -> str | None:
    """Return a value as a string, None where missing; dates in ISO format, durations in days."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, float):
        return None if np.isnan(value) else format_number(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, timedelta):
        return format_number(value / timedelta(days=1))
    return parse_string(str(value))


def days(dates: Any) -> NDArray[np.float64]:
    """Return dates as days since 1970, NaN where missing; those without a time zone are UTC.

    >>> days(np.array(["1970-01-02", "NaT"], dtype="datetime64[ns]")).tolist()
    [1.0, nan]
    """
    array = np.asarray(dates)
    if array.dtype.kind == "M":
        # Split, because nanoseconds since 1970 have more digits than a float.
        whole = array.astype("datetime64[D]")
        part = (array - whole) / np.timedelta64(1, "D")
        return np.where(np.isnat(array), np.nan, whole.astype(np.int64) + part)
    return np.array([_day(value) for value in array.tolist()], dtype=np.float64)


def _day(value: Any) -> float:
    if value is None or value != value:  # NaN and NaT
        return float("nan")
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp() / 86_400
    if isinstance(value, date):
        return float(value.toordinal() - date(1970, 1, 1).toordinal())
    return float(value)


def _array(values: Any) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except ValueError:  # entries of different lengths
        return np.asarray(values, dtype=object)


def _iso_strings(dates: NDArray[Any]) -> Column:
    """Write dates to the second, or to the microsecond if one of them has a fraction."""
    whole = bool((np.isnat(dates) | (dates == dates.astype("datetime64[s]"))).all())
    text = np.datetime_as_string(dates, unit="s" if whole else "us")
    return np.array([None if t == "NaT" else str(t) for t in text], dtype=object)


def _exact(integers: NDArray[Any]) -> bool:
    return not len(integers) or max(abs(int(integers.min())), abs(int(integers.max()))) < _EXACT


def _exact_arrow(integers: Any) -> bool:
    from pyarrow.compute import call_function

    extremes = call_function("min_max", [integers]).as_py().values()
    return all(abs(value) < _EXACT for value in extremes if value is not None)


def _copied(column: Any) -> dict[str, bool]:
    """Return the argument that lets an array be converted; a chunked array always is."""
    return {} if type(column).__name__ == "ChunkedArray" else {"zero_copy_only": False}
