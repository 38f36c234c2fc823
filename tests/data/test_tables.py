"""Tables with named columns of numbers and strings."""

import numpy as np
import pandas
import pytest

from winnowgp.data import DataTable
from winnowgp.data.encoding import TableEncoder
from winnowgp.errors import InputError

TABLE = DataTable.of(
    {
        "size": ["1", "2.5", "", "4e0"],
        "colour": ["red", "blue", "red", "NA"],
        "day": ["1970-01-03", "1970-01-02T12:00:00", "1970-01-01", "1970-01-01T00:00:00Z"],
        "code": [3, 3, 7, 3],
    }
)


def test_table_integers_too_large_for_float64_stay_exact() -> None:
    table = DataTable.of({"id": np.array([2**60, 2**60 + 1])})
    assert table.strings("id").tolist() == [str(2**60), str(2**60 + 1)]


def test_table_counts_missing_and_unique_values() -> None:
    table = DataTable.of({"text": ["1", "1.0", "", "b"], "size": [1.0, 1.0, np.nan, 2.0]})
    for name, different in (("text", 3), ("size", 2)):
        assert table.missing(name).tolist() == [False, False, True, False]
        assert table.n_unique(name) == different


def test_table_columns_of_different_lengths_raise_input_error() -> None:
    with pytest.raises(InputError, match="one length"):
        DataTable.of({"a": [1], "b": [1, 2]})


def test_table_of_a_data_frame_keeps_its_types() -> None:
    frame = pandas.DataFrame(
        {
            "n": pandas.array([1, None, 3], dtype="Int64"),
            "w": ["a", None, "b"],
            "b": [True, False, True],
            "d": pandas.to_datetime(["1970-01-02", None, "1970-01-03"]),
        }
    )
    table = DataTable.of(frame)
    assert [c.kind for c in TableEncoder.learn(table).columns] == [
        "number",
        "category",
        "category",
        "date",
    ]
    assert table.strings("b").tolist() == ["true", "false", "true"]
    assert table.strings("w").tolist() == ["a", None, "b"]
    np.testing.assert_array_equal(table.numbers("n"), [1, np.nan, 3])
