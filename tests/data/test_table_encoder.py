"""Tables to matrices, the same way every time."""

from typing import Any

import numpy as np
import pytest

from winnowgp.data import DataTable, TableEncoder
from winnowgp.errors import InputError, ModelFileError

TABLE = DataTable.of(
    {
        "size": ["1", "2.5", "", "4e0"],
        "colour": ["red", "blue", "red", "NA"],
        "day": ["1970-01-03", "1970-01-02T12:00:00", "1970-01-01", "1970-01-01T00:00:00Z"],
        "code": [3, 3, 7, 3],
    }
)


def test_each_column_is_recognised() -> None:
    encoder = TableEncoder.learn(TABLE, missing="impute")
    assert [c.kind for c in encoder.columns] == ["number", "words", "date", "number"]
    assert encoder.features == (
        "size",
        "size missing",
        "colour=red",
        "colour=blue",
        "day",
        "code",
    )


def test_the_matrix_is_what_it_is_said_to_be() -> None:
    expected = [
        [1.0, 0, 1, 0, 2.0, 3],
        [2.5, 0, 0, 1, 1.5, 3],
        [2.5, 1, 1, 0, 0.0, 7],  # the median of 1, 2.5 and 4
        [4.0, 0, 0, 0, 0.0, 3],
    ]
    encoder = TableEncoder.learn(TABLE, missing="impute")
    np.testing.assert_array_equal(encoder.encode(TABLE), expected)
    back = TableEncoder.from_dict(encoder.to_dict())
    np.testing.assert_array_equal(back.encode(TABLE), expected)


def test_later_tables_are_seen_with_the_eyes_of_the_first() -> None:
    encoder = TableEncoder.learn(TABLE, missing="impute")
    later = DataTable.of(
        {
            "more": ["x"],
            "code": ["8"],
            "day": [None],
            "colour": ["green"],
            "size": [float("nan")],
        }
    )
    # An empty date is the median of the first table's, 0.75 days; nobody flagged it then.
    np.testing.assert_array_equal(encoder.encode(later), [[2.5, 1, 0, 0, 0.75, 8]])
    assert encoder.unseen(later) == {"colour": ["green"]}


def test_numbers_can_be_words_if_they_were_words_before() -> None:
    encoder = TableEncoder.learn(DataTable.of({"code": ["7", "7b"]}))
    np.testing.assert_array_equal(encoder.encode(DataTable.of({"code": [7, 8]})), [[1, 0], [0, 0]])


def test_whole_numbers_too_large_for_a_float_stay_exact() -> None:
    table = DataTable.of({"id": np.array([2**60, 2**60 + 1])})
    assert table.strings("id").tolist() == [str(2**60), str(2**60 + 1)]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"a": ["1", ""]}, "'a' has 1 missing values, the first in row 2"),
        ({"a": ["x", None]}, "'a' has 1 missing values, the first in row 2"),
        ({"a": ["1", "inf"]}, "'a' has inf in row 2"),
        ({"a": ["1", "-2e300"]}, "row 2; numbers must be finite"),
        ({"a": [None, None]}, "'a' is empty"),
        ({"a": [str(i) + "x" for i in range(40)]}, "40 different strings, such as '0x'"),
        ({"a": [f"{i},5" for i in range(40)]}, "decimal commas"),
        ({"a": ["1,5", "2", "", "-0,25"]}, "'a' holds strings, such as '1,5'.*decimal commas"),
        (
            {"a": [f"a{i}" for i in range(40)], "b": [f"b{i}" for i in range(40)]},
            "2 columns have more than 30 different strings.*--drop 'a,b'",
        ),
        ({}, "no columns are left"),
    ],
)
def test_what_cannot_be_used_is_said(table: dict[str, Any], message: str) -> None:
    columns = DataTable.of(table)
    with pytest.raises(InputError, match=message):
        TableEncoder.learn(columns).encode(columns)


@pytest.mark.parametrize(
    ("later", "message"),
    [
        ({"day": ["1970-01-01"], "size": ["1"]}, "lacks columns.*'colour'"),
        ({"colour": ["a"], "day": ["1970-01-01"], "size": ["big"]}, "held numbers.*'big' in row 1"),
        ({"colour": ["a"], "day": ["1970-01-01"], "size": ["1,5"]}, "held numbers.*decimal commas"),
        ({"colour": ["a"], "day": ["monday"], "size": ["1"]}, "held dates.*'monday'"),
    ],
)
def test_a_later_table_that_does_not_fit_is_refused(later: dict[str, Any], message: str) -> None:
    encoder = TableEncoder.learn(TABLE.without(["code"]), missing="impute")
    with pytest.raises(InputError, match=message):
        encoder.encode(DataTable.of(later))


def test_commas_that_are_no_decimals_are_words() -> None:
    encoder = TableEncoder.learn(DataTable.of({"a": ["1,5", "2,x"]}))
    assert encoder.columns[0].categories == ("1,5", "2,x")


GOOD = TableEncoder.learn(TABLE, missing="impute").to_dict()


@pytest.mark.parametrize(
    "change",
    [
        {"name": 3},
        {"name": None},
        {"kind": "eval"},
        {"kind": ["number"]},
        {"kind": "words"},
        {"typical": "2.5"},
        {"typical": float("inf")},
        {"typical": True},
        {"typical": None},
        {"flagged": 1},
        {"words": ["a"]},
        {"words": None},
        {"more": 1},
    ],
)
def test_a_number_s_encoding_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    column = {**GOOD["columns"][0], **change}
    with pytest.raises(ModelFileError, match="describes"):
        TableEncoder.from_dict({**GOOD, "columns": [column]})


@pytest.mark.parametrize(
    "change",
    [
        {"words": []},
        {"words": ["red", "red"]},
        {"words": ["red", 3]},
        {"words": ["red", ""]},
        {"words": "red"},
        {"typical": "green"},
        {"typical": 1.0},
        {"flagged": True},
        {"kind": "date"},
    ],
)
def test_an_encoding_of_words_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    column = {**GOOD["columns"][1], **change}
    with pytest.raises(ModelFileError, match="describes"):
        TableEncoder.from_dict({**GOOD, "columns": [column]})


@pytest.mark.parametrize(
    "about",
    [
        None,
        [],
        {},
        {"columns": [], "missing": "error"},
        {"columns": {"a": 1}, "missing": "error"},
        {"columns": ["size"], "missing": "error"},
        {**GOOD, "missing": "guess"},
        {**GOOD, "missing": ["error"]},
        {**GOOD, "columns": [GOOD["columns"][0]] * 2},
    ],
)
def test_what_is_no_encoder_is_refused(about: Any) -> None:
    with pytest.raises(ModelFileError):
        TableEncoder.from_dict(about)


def test_what_is_missing_and_what_differs_in_numbers_and_in_words() -> None:
    table = DataTable.of({"text": ["1", "1.0", "", "b"], "size": [1.0, 1.0, np.nan, 2.0]})
    for name, different in (("text", 3), ("size", 2)):
        assert table.missing(name).tolist() == [False, False, True, False]
        assert table.n_unique(name) == different


def test_numbers_written_as_text_are_read_once_and_nothing_else_is_touched() -> None:
    read = TABLE.parse_numbers(["size", "colour", "day"])
    np.testing.assert_array_equal(read.values["size"], [1, 2.5, np.nan, 4])
    assert read.values["size"].dtype == np.float64
    assert all(read.values[name] is TABLE.values[name] for name in ("colour", "day", "code"))
    assert TABLE.parse_numbers([]).values["size"] is TABLE.values["size"]
    for missing in ("impute", "error"):
        assert TableEncoder.learn(read, missing=missing) == TableEncoder.learn(
            TABLE, missing=missing
        )


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(InputError, match="one length"):
        DataTable.of({"a": [1], "b": [1, 2]})


def test_data_frames_are_tables() -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
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
        "words",
        "words",
        "date",
    ]
    assert table.strings("b").tolist() == ["true", "false", "true"]
    assert table.strings("w").tolist() == ["a", None, "b"]
    np.testing.assert_array_equal(table.numbers("n"), [1, np.nan, 3])
