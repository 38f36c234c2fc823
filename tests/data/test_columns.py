"""What the columns of a table hold."""

from typing import Any

import numpy as np
import pytest

from winnowgp.data import DataTable
from winnowgp.data.columns import ColumnKind, column_kinds, column_note, parse_numbers
from winnowgp.data.encoding import TableEncoder
from winnowgp.data.notation import Notation
from winnowgp.errors import InputError


def kinds_of(values: list[str], **options: Any) -> ColumnKind:
    return column_kinds(DataTable.of({"a": values}), **options)["a"]


@pytest.mark.parametrize("different", [7, 25, 60])
def test_one_odd_cell_in_a_column_of_numbers_is_an_error(different: int) -> None:
    """The number of different strings, few enough for categories or not, does not matter."""
    values = [str(i % different) for i in range(100)]
    values[16] = "unknown"
    message = "'a' has numbers in all but 1 of 100 rows, where it has 'unknown', first in row 17"
    with pytest.raises(InputError, match=message):
        kinds_of(values)
    assert kinds_of(values, categorical=["a"]) == ColumnKind("category", literal=True)


def test_one_odd_cell_in_a_column_of_dates_is_an_error() -> None:
    values = [f"2024-03-{1 + i % 28:02d}" for i in range(60)]
    values[3] = "spring"
    with pytest.raises(InputError, match=r"'a' has dates in all but 1 of 60 rows.*row 4"):
        kinds_of(values)


@pytest.mark.parametrize(
    "values",
    [["0", "1", "2", "3+"] * 10, ["7", "7b"], ["1,5", "2,x"], ["10-20", "20-30"], ["red", "1"]],
)
def test_categories_with_digits_stay_categories(values: list[str]) -> None:
    assert kinds_of(values) == ColumnKind("category")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["45%", "0.3"], "numbers that are written in several ways, such as '45%', '0.3'"),
        (["$5", "€6"], "several ways, such as '\\$5', '€6'"),
        (["12 kg", "3 lb"], "such as '12 kg', '3 lb'. Write them in one way, in one unit. To read"),
        (["12 kg"] * 9 + ["11"], "several ways, such as '12 kg', '11'. Write them in one way. To"),
        (["13/04/2024", "04/13/2024"], "dates that are written in several ways"),
        (["2,698", "950"], "column 'a': '2,698' may be 2698 or 2.698"),
        (["NA", ""], "'a' is empty"),
    ],
)
def test_columns_without_one_reading_raise_input_error(values: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        kinds_of(values)


def test_problems_of_several_columns_are_reported_at_once() -> None:
    table = DataTable.of({"a": ["2,698", "950"], "b": ["x", "y"], "c": ["03/04/2024"] * 2})
    with pytest.raises(InputError, match=r"2 columns .* \(1\) column 'a'.* \(2\) column 'c'"):
        column_kinds(table)


@pytest.mark.parametrize("option", [{"decimal": ";"}, {"dates": "iso"}])
def test_unknown_option_raises_input_error(option: dict[str, str]) -> None:
    with pytest.raises(InputError, match=f"`{next(iter(option))}` must be"):
        kinds_of(["1"], **option)


def test_na_is_missing_unless_the_column_is_categorical() -> None:
    table = DataTable.of({"alley": ["NA", "paved", "", "NA"]})
    assert table.strings("alley").tolist() == [None, "paved", None, None]
    kinds = column_kinds(table, categorical=["alley"])
    encoder = TableEncoder.learn(table, kinds=kinds, missing="impute")
    assert encoder.features == ("alley=NA", "alley=paved")
    expected = [[1, 0], [0, 1], [0, 0], [1, 0]]
    for each in (encoder, TableEncoder.from_dict(encoder.to_dict())):
        np.testing.assert_array_equal(each.encode(table), expected)
        assert each.unseen(DataTable.of({"alley": ["null", ""]})) == {"alley": ["null"]}


def test_missing_na_in_categories_names_the_option() -> None:
    table = DataTable.of({"alley": ["paved", "NA"]})
    with pytest.raises(InputError, match="If 'NA' is a category, use `categorical`"):
        TableEncoder.learn(table).encode(table)


def test_encoder_reads_later_tables_in_the_notation_of_the_first() -> None:
    table = DataTable.of({"price": ["$1,250.5", "$3"], "sold": ["13/01/1970", "02/01/1970"]})
    encoder = TableEncoder.from_dict(TableEncoder.learn(table).to_dict())
    later = DataTable.of({"price": ["$2,698"], "sold": ["03/01/1970"]})
    np.testing.assert_array_equal(encoder.encode(later), [[2698, 2]])
    with pytest.raises(InputError, match=r"dates are day-first\); got '1970-01-05' in row 1"):
        encoder.encode(DataTable.of({"price": ["1"], "sold": ["1970-01-05"]}))


def test_plain_columns_are_written_as_before() -> None:
    """So that earlier versions read the files of plain tables."""
    encoder = TableEncoder.learn(DataTable.of({"a": ["1", "2"], "b": ["x", "y"]}))
    keys = {"name", "kind", "typical", "flagged", "categories"}
    assert all(column.keys() == keys for column in encoder.to_dict()["columns"])
    assert encoder.to_dict().keys() == {"columns", "missing"}


def test_kinds_come_from_all_rows_and_medians_from_some() -> None:
    table = DataTable.of({"sold": ["01/02/1970", "03/02/1970", "25/02/1970"]})
    encoder = TableEncoder.learn(table, rows=np.array([0, 1]))
    assert encoder.columns[0].notation == Notation(dates="day-first")
    assert encoder.columns[0].typical == 32


def test_parse_numbers_converts_only_numbers() -> None:
    table = DataTable.of({"n": ["1", ""], "w": ["a", "b"], "d": ["2024-03-01", "2024-03-02"]})
    parsed = parse_numbers(table, column_kinds(table))
    np.testing.assert_array_equal(parsed.values["n"], [1, np.nan])
    assert all(parsed.values[name] is table.values[name] for name in ("w", "d"))


@pytest.mark.parametrize(
    ("name", "values", "note"),
    [
        ("zip", ["02139", "94305"] * 10, "leading zeros"),
        ("Zip code", [10115, 80331] * 10, "postal codes"),
        ("row", list(range(7, 37)), "perhaps an identifier"),
        ("customer_id", [17 * i for i in range(40)] * 2, "perhaps an identifier"),
        ("customerID", [17 * i for i in range(40)], "perhaps an identifier"),
        ("grid", [17 * i for i in range(40)], ""),
        ("size", [0.5 * i for i in range(40)], ""),
        ("age", [20, 30, 20] * 20, ""),
        ("price", ["$1,200.50", "$3"], "commas separate thousands, in $"),
        ("share", ["3%", "4%"], "in %"),
        ("weight", ["3 kg", "4.5 kg"], "in kg"),
        ("weight", ["3kg", "4lb"], "numbers with several units (kg, lb), read as categories"),
        ("sold", ["13/01/2024"], "dates are day-first"),
        ("sold", ["13 Jan 2024"], "dates with month names"),
        ("dependants", ["0", "1", "3+"] * 10, "20 of 30 rows are numbers, others such as '3+'"),
        ("colour", ["red", "blue"], ""),
        ("colour", ["red", "red"], "the same in every row"),
        ("colour", ["red", ""], ""),
        ("size", [3, 3], "the same in every row"),
        ("size", [3, None], ""),
        ("weight", ["3 kg", "3 kg"], "in kg; the same in every row"),
    ],
)
def test_column_note_says_how_a_column_is_read(name: str, values: list[object], note: str) -> None:
    table = DataTable.of({name: values})
    written = column_note(table, name, column_kinds(table)[name])
    assert note in written
    assert bool(note) == bool(written)


def test_columns_with_the_same_two_readings_share_one_error() -> None:
    table = DataTable.of({"x": ["1,5", "2,25"], "y": ["3,5", "0,25"], "town": ["a", "b"]})
    with pytest.raises(InputError) as error:
        column_kinds(table)
    assert str(error.value) == (
        "columns 'x', 'y': '1,5' looks like a number with a decimal comma; if it is, use "
        "decimal=',' (`--decimal ,`). To read the columns as categories use `categorical` "
        "(`--categorical 'x,y'`)."
    )


def test_columns_with_other_problems_are_counted_beside_those_of_two_readings() -> None:
    columns = {"x": ["1,5", "2,25"], "y": ["3,5", "0,25"], "day": ["03/04/2024"], "z": ["", ""]}
    with pytest.raises(InputError, match=r"^4 columns cannot be read as they are") as error:
        column_kinds(DataTable.of({name: v * (2 // len(v)) for name, v in columns.items()}))
    parts = ("(1) columns 'x', 'y': '1,5'", "(2) column 'day': '03/04/2024'", "(3) column 'z' is")
    assert all(part in str(error.value) for part in parts)


def test_column_note_leaves_out_separators_that_do_not_occur() -> None:
    table = DataTable.of({"a": ["1", "2"], "b": ["1,5", "2"]})
    kinds = column_kinds(table, decimal=",")
    assert column_note(table, "a", kinds["a"]) == ""
    assert column_note(table, "b", kinds["b"]) == "decimal commas"
