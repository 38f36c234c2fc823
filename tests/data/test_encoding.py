"""Encoding tables as matrices, the same way for every later table."""

from typing import Any

import numpy as np
import pytest

from winnowgp.data import DataTable
from winnowgp.data.encoding import TableEncoder
from winnowgp.errors import InputError, ModelFileError

TABLE = DataTable.of(
    {
        "size": ["1", "2.5", "", "4e0"],
        "colour": ["red", "blue", "red", "NA"],
        "day": ["1970-01-03", "1970-01-02T12:00:00", "1970-01-01", "1970-01-01T00:00:00Z"],
        "code": [3, 3, 7, 3],
    }
)
GOOD = TableEncoder.learn(TABLE, missing="impute").to_dict()


def test_encoder_recognises_the_kind_of_each_column() -> None:
    encoder = TableEncoder.learn(TABLE, missing="impute")
    assert [c.kind for c in encoder.columns] == ["number", "category", "date", "number"]
    assert encoder.features == (
        "size",
        "size missing",
        "colour=red",
        "colour=blue",
        "day",
        "code",
    )


def test_encoder_encodes_the_training_table() -> None:
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


def test_encoder_encodes_a_later_table_as_the_training_table() -> None:
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
    # A missing date is imputed by the training median, 0.75 days; it has no indicator column.
    np.testing.assert_array_equal(encoder.encode(later), [[2.5, 1, 0, 0, 0.75, 8]])
    assert encoder.unseen(later) == {"colour": ["green"]}


def test_encoder_numbers_can_be_categories_learnt_as_strings() -> None:
    encoder = TableEncoder.learn(DataTable.of({"code": ["7", "7b"]}))
    np.testing.assert_array_equal(encoder.encode(DataTable.of({"code": [7, 8]})), [[1, 0], [0, 0]])


def test_encoder_strings_with_commas_are_categories() -> None:
    encoder = TableEncoder.learn(DataTable.of({"a": ["1,5", "2,x"]}))
    assert encoder.columns[0].categories == ("1,5", "2,x")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"a": ["1", ""]}, "'a' has a missing value in row 2"),
        ({"a": ["x", None]}, "'a' has a missing value in row 2"),
        ({"a": ["1", "inf"]}, "'a' has inf in row 2"),
        ({"a": ["1", "-2e300"]}, "row 2; numbers must be finite.*Correct that row"),
        ({"a": [None, None]}, "'a' is empty"),
        (
            {"a": [f"{i}x{i}" for i in range(40)]},
            "40 different strings, such as '0x0'.*`--drop 'a'`.*`--id 'a'`",
        ),
        ({"a": [f"{i},5" for i in range(40)]}, "decimal comma.*`--decimal ,`"),
        ({"a": ["1,5", "2", "", "-0,25"]}, "'a': '1,5' looks like a number with a decimal comma"),
        (
            {"a": [f"a{i}" for i in range(40)], "b": [f"b{i}" for i in range(40)]},
            "2 columns have more than 30 different strings.*--drop 'a,b'",
        ),
        ({}, "no columns are left.*leave fewer out"),
    ],
)
def test_encoder_invalid_training_table_raises_input_error(
    table: dict[str, Any], message: str
) -> None:
    columns = DataTable.of(table)
    with pytest.raises(InputError, match=message):
        TableEncoder.learn(columns).encode(columns)


@pytest.mark.parametrize(
    ("later", "message"),
    [
        ({"day": ["1970-01-01"], "size": ["1"]}, "lacks columns.*'colour'"),
        (
            {"colour": ["a"], "day": ["1970-01-01"], "size": ["big"]},
            "must have numbers.*'big' in row 1.*Correct that row, or leave it out",
        ),
        (
            {"colour": ["a"], "day": ["1970-01-01"], "size": ["1,5"]},
            "must have numbers.*'1,5' in row 1",
        ),
        ({"colour": ["a"], "day": ["monday"], "size": ["1"]}, "must have dates.*'monday'"),
    ],
)
def test_encoder_later_table_of_other_types_raises_input_error(
    later: dict[str, Any], message: str
) -> None:
    encoder = TableEncoder.learn(TABLE.without(["code"]), missing="impute")
    with pytest.raises(InputError, match=message):
        encoder.encode(DataTable.of(later))


@pytest.mark.parametrize(
    "change",
    [
        {"name": 3},
        {"name": None},
        {"kind": "eval"},
        {"kind": ["number"]},
        {"kind": "category"},
        {"typical": "2.5"},
        {"typical": float("inf")},
        {"typical": True},
        {"typical": None},
        {"flagged": 1},
        {"categories": ["a"]},
        {"categories": None},
        {"more": 1},
    ],
)
def test_encoder_from_dict_refuses_an_invalid_number_column(change: dict[str, Any]) -> None:
    column = {**GOOD["columns"][0], **change}
    with pytest.raises(ModelFileError, match="describes"):
        TableEncoder.from_dict({**GOOD, "columns": [column]})


@pytest.mark.parametrize(
    "change",
    [
        {"categories": []},
        {"categories": ["red", "red"]},
        {"categories": ["red", 3]},
        {"categories": ["red", ""]},
        {"categories": "red"},
        {"typical": "green"},
        {"typical": 1.0},
        {"flagged": True},
        {"kind": "date"},
    ],
)
def test_encoder_from_dict_refuses_an_invalid_string_column(change: dict[str, Any]) -> None:
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
def test_encoder_from_dict_refuses_an_invalid_encoder(about: Any) -> None:
    with pytest.raises(ModelFileError):
        TableEncoder.from_dict(about)
