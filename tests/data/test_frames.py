"""Data frames as tables, and dates in inputs."""

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pandas
import polars
import pyarrow
import pytest

from winnowgp.data import DataTable
from winnowgp.data.tables import days
from winnowgp.errors import InputError
from winnowgp.estimators.rows import dates_as_days

COLUMNS: dict[str, list[Any]] = {
    "n": [1, None, 3],
    "f": [0.5, None, 2.0],
    "w": ["a", None, " NA"],
    "b": [True, False, None],
    "d": [datetime(1970, 1, 2), None, datetime(1970, 1, 3, 12)],
    "day": [date(1970, 1, 2), None, date(1970, 1, 3)],
    "z": [datetime(1970, 1, 2, tzinfo=UTC), None, None],
    "long": [timedelta(days=1), timedelta(hours=12), None],
    "dec": [Decimal("1.50"), None, Decimal(2)],
}


def polars_frame() -> Any:
    return polars.DataFrame(COLUMNS)


FRAMES = {
    "pandas": lambda: pandas.DataFrame(COLUMNS),
    "pandas of arrow": lambda: pyarrow.table(COLUMNS).to_pandas(types_mapper=pandas.ArrowDtype),
    "pyarrow table": lambda: pyarrow.table(COLUMNS),
    "pyarrow batch": lambda: pyarrow.table(COLUMNS).to_batches()[0],
    "polars": polars_frame,
    "polars, lazy": lambda: polars_frame().lazy(),
    "dictionary": lambda: COLUMNS,
}


@pytest.mark.parametrize("kind", FRAMES)
def test_table_of_any_frame_has_the_same_values(kind: str) -> None:
    table = DataTable.of(FRAMES[kind]())
    assert table.names == tuple(COLUMNS)
    for name, expected in {
        "n": [1, np.nan, 3],
        "f": [0.5, np.nan, 2],
        "long": [1, 0.5, np.nan],
        "dec": [1.5, np.nan, 2],
    }.items():
        np.testing.assert_array_equal(table.numbers(name), expected)
    assert table.strings("w").tolist() == ["a", None, None]
    assert table.strings("w", literal=True).tolist() == ["a", None, "NA"]
    assert table.strings("b").tolist() == ["true", "false", None]
    first, missing, last = table.strings("d").tolist()
    assert (first[:10], missing, last) == ("1970-01-02", None, "1970-01-03T12:00:00")
    assert table.strings("day").tolist()[0][:10] == "1970-01-02"
    assert table.strings("z").tolist()[0].endswith("+00:00")


def test_table_of_a_table_is_the_same() -> None:
    table = DataTable.of({"a": [1]})
    assert DataTable.of(table) is table


@pytest.mark.parametrize("other", [None, "a.csv", [1, 2], np.zeros((2, 2)), 3])
def test_table_of_something_else_raises_input_error(other: Any) -> None:
    with pytest.raises(InputError, match="data frame of pandas, polars or pyarrow"):
        DataTable.of(other)


def test_table_of_a_frame_with_repeated_names_raises_input_error() -> None:
    with pytest.raises(InputError, match="more than one column is called 'a'"):
        DataTable.of(pandas.DataFrame([[1, 2]], columns=["a", "a"]))


def test_table_of_nested_values_raises_input_error() -> None:
    with pytest.raises(InputError, match="'a' has unsupported type list"):
        DataTable.of(pyarrow.table({"a": [[1], [2]]}))


def test_table_keeps_fractions_of_seconds() -> None:
    dates = np.array(["2024-01-01T00:00:00.1", "NaT"], dtype="datetime64[ms]")
    table = DataTable.of({"d": dates})
    assert table.strings("d").tolist() == ["2024-01-01T00:00:00.100000", None]


@pytest.mark.parametrize("unit", ["D", "h", "s", "ms", "us", "ns"])
def test_dates_as_days_does_not_depend_on_the_unit(unit: str) -> None:
    dates = np.array([["2024-01-01", "1969-12-31"], ["NaT", "2024-01-02"]], dtype="datetime64[D]")
    expected = [[19723, -1], [np.nan, 19724]]
    np.testing.assert_array_equal(dates_as_days(dates.astype(f"datetime64[{unit}]")), expected)


def test_days_keep_the_time_of_day() -> None:
    dates = np.array(["2024-01-01T06:00", "1969-12-31T18:00"], dtype="datetime64[ns]")
    np.testing.assert_array_equal(days(dates), [19723.25, -0.25])


def test_dates_as_days_of_frames_keeps_other_columns_and_names() -> None:
    oslo = pandas.Series(pandas.to_datetime(["2024-01-01"])).dt.tz_localize("Europe/Oslo")
    frame = pandas.DataFrame({"t": pandas.to_datetime(["2024-01-01"]), "x": [2.0], "z": oslo})
    encoded = dates_as_days(frame)
    assert list(encoded.columns) == ["t", "x", "z"]
    np.testing.assert_allclose(encoded.to_numpy(), [[19723, 2, 19723 - 1 / 24]], rtol=1e-14)
    assert frame["t"].dtype.kind == "M"  # the frame of the user stays
    objects = np.array([[pandas.Timestamp("2024-01-01"), 2.0], [None, 3.0]], dtype=object)
    np.testing.assert_array_equal(dates_as_days(objects)[:, 0].astype(float), [19723, np.nan])
    plain = np.ones((2, 2))
    assert dates_as_days(plain) is plain
    numbers = frame[["x"]]
    assert dates_as_days(numbers) is numbers


def test_dates_as_days_of_polars() -> None:
    frame = polars.DataFrame({"t": [date(2024, 1, 1), None], "x": [1.0, 2.0]})
    encoded = dates_as_days(frame)
    assert encoded.columns == ["t", "x"]
    np.testing.assert_array_equal(encoded["t"].to_numpy(), [19723, np.nan])
