"""How strings write numbers and dates."""

from datetime import UTC, datetime
from typing import Any

import pytest

from winnowgp.data.notation import Ambiguity, Notation, may_be, recognised
from winnowgp.errors import ModelFileError


@pytest.mark.parametrize(
    ("strings", "values"),
    [
        (["1", "-2.5", "4e0"], [1, -2.5, 4]),
        (["2,698", "1,250,000"], [2698, 1_250_000]),
        (["2,698.5", "12"], [2698.5, 12]),
        (["$2,698.50", "-$3", "$-4", "5"], [2698.5, -3, -4, 5]),
        (["12.5 €", "3€"], [12.5, 3]),
        (["45%", "3.5 %"], [45, 3.5]),
        (["1 234 567", "12\u202f000.5", "7"], [1_234_567, 12_000.5, 7]),
        (["1'234", "\u22125"], [1234, -5]),
    ],
)
def test_recognised_numbers_are_read_as_written(strings: list[str], values: list[float]) -> None:
    known = recognised(dict.fromkeys(strings, 1))
    assert known is not None
    kind, notation = known
    assert kind == "number"
    assert [notation.number(string) for string in strings] == values


@pytest.mark.parametrize(
    ("strings", "message"),
    [
        (["2,698", "950"], "'2,698' may be 2698 or 2.698; use decimal='.'.*decimal=','"),
        (["2,698", "0,5"], "'2,698' looks like a number with a decimal comma"),
        (["0,125"], "'0,125' looks like a number with a decimal comma"),
        (["1.234.567", "2"], "'1.234.567' looks like a number with points between thousands"),
        (["03/04/2024", "05/05/2024"], "'03/04/2024' may be 3 April 2024 or 4 March 2024"),
        (["5/6/24 3:15 PM"], "5 June 2024 or 6 May 2024; use dates='day-first'"),
    ],
)
def test_recognised_two_readings_raise_ambiguity(strings: list[str], message: str) -> None:
    with pytest.raises(Ambiguity, match=message):
        recognised(dict.fromkeys(strings, 1))


@pytest.mark.parametrize(
    ("decimal", "strings", "values"),
    [
        (".", ["2,698", "950"], [2698, 950]),
        (",", ["2,698", "950"], [2.698, 950]),
        (",", ["1.234,5 €", "0,5"], [1234.5, 0.5]),
        (",", ["2.698", "1"], [2698, 1]),
    ],
)
def test_recognised_decimal_option_decides(
    decimal: str, strings: list[str], values: list[float]
) -> None:
    known = recognised(dict.fromkeys(strings, 1), decimal=decimal)
    assert known is not None
    assert [known[1].number(string) for string in strings] == values


def test_recognised_decimal_point_in_a_table_of_commas_is_refused() -> None:
    with pytest.raises(Ambiguity, match=r"'3\.14' has a decimal point"):
        recognised({"3.14": 1, "2": 1}, decimal=",")


@pytest.mark.parametrize(
    "strings",
    [["red"], ["45%", "0.3"], ["$5", "€5"], ["1_000"], ["1,2,3"], ["-"], ["$"], ["1,23,456"]],
)
def test_recognised_other_strings_are_nothing(strings: list[str]) -> None:
    assert recognised(dict.fromkeys(strings, 1)) is None


@pytest.mark.parametrize(
    ("strings", "order", "dates"),
    [
        (["2024-03-01", "2024-03-01T12:00"], "", [(2024, 3, 1), (2024, 3, 1, 12)]),
        (["2024/3/1", "2024-03"], "", [(2024, 3, 1), (2024, 3, 1)]),
        (["13/02/2024", "01/02/2024"], "day-first", [(2024, 2, 13), (2024, 2, 1)]),
        (["02/13/2024", "01/02/2024"], "month-first", [(2024, 2, 13), (2024, 1, 2)]),
        (["03.04.2024", "3.4.24 14:30"], "day-first", [(2024, 4, 3), (2024, 4, 3, 14, 30)]),
        (["1/31/99 12:05 AM", "1/31/68"], "month-first", [(1999, 1, 31, 0, 5), (2068, 1, 31)]),
    ],
)
def test_recognised_dates_have_the_only_possible_order(
    strings: list[str], order: str, dates: list[tuple[int, ...]]
) -> None:
    assert recognised(dict.fromkeys(strings, 1)) == ("date", Notation(dates=order))
    for string, date in zip(strings, dates, strict=True):
        expected = datetime(*date, tzinfo=UTC).timestamp() / 86_400
        assert Notation(dates=order).days(string) == expected


@pytest.mark.parametrize("order", ["day-first", "month-first"])
def test_recognised_dates_option_decides(order: str) -> None:
    assert recognised({"03/04/2024": 1}, dates=order) == ("date", Notation(dates=order))
    assert recognised({"13/13/2024": 1}, dates=order) is None


def test_may_be_takes_any_notation() -> None:
    assert all(may_be(s, "number") for s in ("1", "2,698", "0,5", "45%", "€5"))
    assert all(may_be(s, "date") for s in ("2024-03-01", "03/04/2024", "13/04/2024"))
    assert not may_be("unknown", "number")
    assert not may_be("2024-03-01", "number")


@pytest.mark.parametrize(
    "change",
    [{"decimal": ";"}, {"decimal": 1}, {"sign": "x"}, {"sign": "$$"}, {"dates": "auto"}, {"z": ""}],
)
def test_notation_from_dict_refuses_what_it_does_not_write(change: dict[str, Any]) -> None:
    good = Notation(".", "$", "").to_dict()
    assert Notation.from_dict(good) == Notation(".", "$", "")
    with pytest.raises(ModelFileError, match="notation"):
        Notation.from_dict({**good, **change})
