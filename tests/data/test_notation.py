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
        (["12 kg", "3.5 kg"], [12, 3.5]),
        (["-3.5 m/s", "0 m/s"], [-3.5, 0]),
        (["20°C", "-4 °C"], [20, -4]),
        (["1,250,000 km²", "7km²"], [1_250_000, 7]),
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
        (["2,698 kg", "950 kg"], "'2,698 kg' may be 2698 or 2.698"),
        (["0,5 kg"], "'0,5 kg' looks like a number with a decimal comma"),
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
    [
        ["red"],
        ["45%", "0.3"],
        ["$5", "€5"],
        ["1_000"],
        ["1,2,3"],
        ["-"],
        ["$"],
        ["1,23,456"],
        ["7", "7b"],
        ["12 kg", "3 lb"],
        ["12 kg", "3"],
        ["3 March"],
        ["3 pm"],
        ["12 Main Street"],
        ["4x4"],
        ["12 Mai 2024"],
        ["Mar 12"],
        ["12 Marble 2024"],
        ["31 Feb 2024"],
        ["3 Mar 4 2024"],
    ],
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
        (["12 Mar 2024", "March 3, 2024"], "month names", [(2024, 3, 12), (2024, 3, 3)]),
        (["1-sep-99", "Sept. 2nd 2024"], "month names", [(1999, 9, 1), (2024, 9, 2)]),
        (["May 2024", "1 May 2024, 3:05 PM"], "month names", [(2024, 5, 1), (2024, 5, 1, 15, 5)]),
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
    assert may_be("12 kg", "number")
    assert may_be("12 Mar 2024", "date")
    assert not may_be("7b", "number")
    assert not may_be("unknown", "number")
    assert not may_be("2024-03-01", "number")


@pytest.mark.parametrize(
    "change",
    [
        {"decimal": ";"},
        {"decimal": 1},
        {"sign": "x1"},
        {"sign": "$$"},
        {"sign": "k g"},
        {"sign": "pm"},
        {"dates": "auto"},
        {"z": ""},
    ],
)
def test_notation_from_dict_refuses_what_it_does_not_write(change: dict[str, Any]) -> None:
    for notation in (Notation(".", "$", ""), Notation(sign="m/s"), Notation(dates="month names")):
        assert Notation.from_dict(notation.to_dict()) == notation
    good = Notation(".", "$", "").to_dict()
    with pytest.raises(ModelFileError, match="notation"):
        Notation.from_dict({**good, **change})
