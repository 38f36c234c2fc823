"""Columns of data frames and dictionaries.

pandas, polars and pyarrow are recognised by name and never imported here: a frame of one of them
comes from a process that has imported it.
"""

from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from winnowgp.errors import InputError

Column: TypeAlias = NDArray[Any]
"""Numbers in float64, NaN where missing; or an object array of strings, None for empty ones."""

# Integers below this are exact in float64.
_EXACT = 2.0**53
_NOT_TABLES = (str, bytes, list, tuple, np.ndarray)


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
