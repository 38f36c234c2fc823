"""How the strings of a column write numbers and dates: separators, signs and the order of dates."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any
from unicodedata import category

import numpy as np
from numpy.typing import NDArray

from winnowgp.errors import InputError, ModelFileError

DECIMALS = ("auto", ".", ",")
DATES = ("auto", "day-first", "month-first")

_SECONDS_PER_DAY = 86_400.0
_BLANKS = " \u00a0\u2009\u202f'\u2019"
_TIME = (
    r"(?:[ T,]+(?P<hour>\d{1,2}):(?P<minute>\d{2})(?::(?P<second>\d{2}(?:\.\d+)?))?"
    r"\s*(?P<half>[ap]\.?m\.?)?)?"
)
_DATE = re.compile(rf"(\d{{1,4}})([-/.])(\d{{1,2}})\2(\d{{1,4}}){_TIME}", re.IGNORECASE)
_MONTH = re.compile(r"\d{4}-\d{2}")
_NAMED = "month names"
# English, whatever the locale is.
_MONTHS = (
    *("january", "february", "march", "april", "may", "june", "july"),
    *("august", "september", "october", "november", "december"),
)
_SHORT_MONTHS = tuple(month[:3] for month in _MONTHS)
_NAMED_DATE = re.compile(
    r"(?:(?P<before>\d{1,2})(?:st|nd|rd|th)?[-. ]+)?(?P<month>[a-z]{3,9})\.?"
    rf"(?:[- ]+(?P<after>\d{{1,2}})(?:st|nd|rd|th)?)?[-, ]+(?P<year>\d{{4}}|\d\d){_TIME}",
    re.IGNORECASE,
)
# A word, or two with a slash between them, perhaps with an exponent: kg, m², km/h, °C.
_WORD = r"[°µ]?[^\W\d_]+[²³]?|°"
_UNIT = re.compile(rf"(?:{_WORD})(?:/(?:{_WORD}))?")
_WITH_UNIT = re.compile(rf"[^a-z]*[\d.](?P<blank>\s*)(?P<unit>{_UNIT.pattern})", re.IGNORECASE)
# Years of dates with a month name: others are codes, such as DEC 9001.
_FIRST_YEAR, _LAST_YEAR = 1500, 2500
# Words behind a number that make it a date or a time of day.
_NO_UNITS = {"am", "pm", "sept", *_MONTHS, *_SHORT_MONTHS}


@dataclass(frozen=True, slots=True)
class Notation:
    """How the strings of a column write numbers or dates.

    >>> Notation(decimal=".", sign="$").number("$2,698.50")
    2698.5
    >>> Notation(decimal=",").number("2.698,5")
    2698.5
    >>> Notation(dates="day-first").days("02.01.1970")
    1.0
    >>> Notation(sign="m/s").number("3.5 m/s"), Notation(dates="month names").days("Jan 3, 1970")
    (3.5, 2.0)
    """

    decimal: str = ""
    """"." if commas may separate thousands, "," for decimal commas, "" if there are no commas."""
    sign: str = ""
    """A currency sign that may stand beside the numbers; or "%" or a unit behind each."""
    dates: str = ""
    """"day-first", "month-first", "month names", or "" if dates begin with the year."""

    def number(self, text: str) -> float:
        """Parse a number.

        Raises:
            ValueError: the string is not a number in this notation.
        """
        if not self.sign and self.decimal != ",":
            # `float` also reads underscores, as in 1_000.
            if "_" in text:
                raise ValueError(text)
            try:
                return float(text)
            except ValueError:
                pass
        text = _without_sign(text.replace("\u2212", "-"), self.sign)
        match = _number_pattern(self.decimal).fullmatch(text)
        if match is None:
            raise ValueError(text)
        digits = text.replace(match["separator"], "") if match["separator"] else text
        return float(digits.replace(",", "."))

    def days(self, text: str) -> float:
        """Parse a date, as days since 1970; without a time zone it is UTC.

        Raises:
            ValueError: the string is not a date in this notation.
        """
        if self.dates == _NAMED:
            date = _named_date(text)
        else:
            date = _local_date(text, self.dates) if self.dates else _year_first(text)
        date = date if date.tzinfo else date.replace(tzinfo=UTC)
        return date.timestamp() / _SECONDS_PER_DAY

    def accepts(self, text: str, kind: str) -> bool:
        """Return whether a string is a "number" or a "date" in this notation."""
        try:
            self.days(text) if kind == "date" else self.number(text)
        except ValueError:
            return False
        return True

    def values(self, strings: Iterable[str | None], kind: str) -> NDArray[np.float64] | None:
        """Return strings as numbers or days, NaN where missing; None if one is neither."""
        parse = self.days if kind == "date" else self.number
        try:
            return np.array([np.nan if s is None else parse(s) for s in strings], dtype=np.float64)
        except ValueError:
            return None

    def __str__(self) -> str:
        separators = {".": "commas separate thousands", ",": "decimal commas", "": ""}
        parts = [
            self.dates
            and (f"dates with {_NAMED}" if self.dates == _NAMED else f"dates are {self.dates}"),
            separators[self.decimal],
            self.sign and ("in %" if self.sign == "%" else f"in {self.sign}"),
        ]
        return ", ".join(part for part in parts if part)

    def to_dict(self) -> dict[str, str]:
        """Return a dictionary that can be written as JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> "Notation":
        """Check the result of `to_dict` from an untrusted file, and return its notation."""
        if (
            not isinstance(values, dict)
            or values.keys() != {"decimal", "sign", "dates"}
            or not all(isinstance(value, str) for value in values.values())
            or values["decimal"] not in ("", *DECIMALS[1:])
            or values["dates"] not in ("", *DATES[1:], _NAMED)
            or not (values["sign"] == "" or _is_sign(values["sign"]) or _is_unit(values["sign"]))
        ):
            raise ModelFileError(f"describes the notation of a column as {values!r:.200}")
        return cls(**values)


def check_options(decimal: str, dates: str) -> None:
    """Raise an error if an option of `recognised` is not one of its values."""
    if decimal not in DECIMALS:
        raise InputError(f"`decimal` must be 'auto', '.' or ','; got {decimal!r}.")
    if dates not in DATES:
        raise InputError(f"`dates` must be 'auto', 'day-first' or 'month-first'; got {dates!r}.")


def recognised(
    counts: Mapping[str, int], *, decimal: str = "auto", dates: str = "auto"
) -> tuple[str, Notation] | None:
    """Return the kind and notation in which all strings are numbers or dates; None if none is.

    >>> recognised({"$1,250,000": 1, "$950": 2})
    ('number', Notation(decimal='.', sign='$', dates=''))

    Args:
        counts: the different strings of a column, with their numbers of rows.
        decimal: "." if commas separate thousands, "," for decimal commas, or "auto": the only one
            that is possible, which must not be the comma.
        dates: "day-first" or "month-first" for dates such as 03/04/2024, or "auto": the only one
            that is possible.

    Raises:
        Ambiguity: the strings have several readings.
    """
    if decimal == "auto" and _all(Notation(), counts, "number"):
        return "number", Notation()
    sign = _sign(counts)
    if sign == "":
        sign = _common_unit(counts)
    if sign is not None:
        notation = _number_notation(counts, decimal, sign)
        if notation is not None:
            return "number", notation
    for notation in (Notation(), Notation(dates=_NAMED)):
        if _all(notation, counts, "date"):
            return "date", notation
    notation = _date_notation(counts, dates)
    return None if notation is None else ("date", notation)


class Ambiguity(ValueError):
    """The strings of a column have several readings; the message says how to choose one."""

    def __init__(self, kind: str, example: str, advice: str) -> None:
        super().__init__(example + advice)
        self.kind = kind
        """"number" or "date"."""
        self.advice = advice
        """The end of the message, which columns with other strings may share."""


def may_be(string: str, kind: str) -> bool:
    """Return whether a string is a "number" or a "date" in some notation.

    A letter next to a number, as in 7b, may be a unit only if all strings have it.

    >>> may_be("2,698 €", "number"), may_be("12 kg", "number"), may_be("7b", "number")
    (True, True, False)
    """
    if not any(character.isdigit() for character in string):
        return False
    try:
        known = recognised({string: 1})
    except Ambiguity as ambiguity:
        return ambiguity.kind == kind
    if known is not None and kind == "number" and unit_of(string) and unit_of(string, " ") == "":
        return False
    return known is not None and known[0] == kind


def unit_of(string: str, between: str = "") -> str:
    """Return the unit behind a number, "" if there is none.

    Args:
        between: what must stand between the number and its unit.

    >>> unit_of("3.5 m/s"), unit_of("7b"), unit_of("7b", " "), unit_of("3 March")
    ('m/s', 'b', '', '')
    >>> unit_of("12345 Berlin")
    ''
    """
    match = _WITH_UNIT.fullmatch(string)
    if match is None or between not in match["blank"] or not _is_unit(match["unit"]):
        return ""
    return match["unit"]


def _number_notation(counts: Iterable[str], decimal: str, sign: str) -> Notation | None:
    if decimal != "auto":
        notation = Notation(decimal, sign)
        if _all(notation, counts, "number"):
            return notation
        if decimal == "," and _all(Notation(), counts, "number"):
            example = next(string for string in counts if not notation.accepts(string, "number"))
            raise Ambiguity(
                "number",
                repr(example[:40]),
                " has a decimal point, and decimal=',' (`--decimal ,`) is for tables with decimal "
                "commas in all columns",
            )
        return None
    if sign and _all(Notation(sign=sign), counts, "number"):
        return Notation(sign=sign)
    point, comma = (_all(Notation(d, sign), counts, "number") for d in (".", ","))
    if point and not comma:
        return Notation(".", sign)
    if not comma:
        return None
    example = next(s for s in counts if not Notation(sign=sign).accepts(s, "number"))
    if not point:
        what = "a decimal comma" if "," in example else "points between thousands"
        raise Ambiguity(
            "number",
            repr(example[:40]),
            f" looks like a number with {what}; if it is, use decimal=',' (`--decimal ,`)",
        )
    readings = (f"{Notation(d, sign).number(example):g}" for d in (".", ","))
    raise Ambiguity(
        "number",
        "{!r} may be {} or {}".format(example[:40], *readings),
        "; use decimal='.' (`--decimal .`) if commas separate thousands, or decimal=',' "
        "(`--decimal ,`) if they are decimal commas",
    )


def _date_notation(counts: Iterable[str], dates: str) -> Notation | None:
    if dates != "auto":
        notation = Notation(dates=dates)
        return notation if _all(notation, counts, "date") else None
    # Points separate the parts of dates only where the day comes first.
    orders = DATES[1:2] if any("." in s.partition(" ")[0] for s in counts) else DATES[1:]
    possible = [o for o in orders if _all(Notation(dates=o), counts, "date")]
    if len(possible) == 2:
        example = next((s for s in counts if len(_readings(s)) == 2), next(iter(counts)))
        shown = " or ".join(_readings(example))
        raise Ambiguity(
            "date",
            f"{example[:40]!r} may be {shown}",
            "; use dates='day-first' (`--dates day-first`) or dates='month-first' "
            "(`--dates month-first`)",
        )
    return Notation(dates=possible[0]) if possible else None


def _readings(text: str) -> list[str]:
    """Return the different dates that a string may be, in words."""
    dates = dict.fromkeys(_local_date(text, order) for order in DATES[1:])
    return [f"{d.day} {_MONTHS[d.month - 1].capitalize()} {d.year}" for d in dates]


def _all(notation: Notation, strings: Iterable[str], kind: str) -> bool:
    return all(notation.accepts(string, kind) for string in strings)


def _sign(strings: Iterable[str]) -> str | None:
    """Return the sign at an end of the strings, "" if there is none, None if there are several."""
    ends = {c for s in strings for c in (s[0], s.lstrip("+-\u2212")[:1], s[-1])}
    signs = [c for c in ends if c and _is_sign(c)]
    return None if len(signs) > 1 else "".join(signs)


def _common_unit(strings: Iterable[str]) -> str | None:
    """Return the unit that all strings have, "" if none has one, None if they differ."""
    units = {unit_of(string) for string in strings}
    return units.pop() if len(units) == 1 else None


def _is_unit(text: str) -> bool:
    """Return whether a word may be a unit; not a month, nor a name such as that of a town."""
    name = len(text) > 3 and text.istitle()
    return _UNIT.fullmatch(text) is not None and text.lower() not in _NO_UNITS and not name


def _is_sign(character: str) -> bool:
    return len(character) == 1 and (character == "%" or category(character) == "Sc")


def _without_sign(text: str, sign: str) -> str:
    """Remove a sign from one end of a number; a per cent sign or a unit must be there."""
    if not sign:
        return text
    if sign == "%" or _is_unit(sign):
        if not text.endswith(sign):
            raise ValueError(text)
        return text[: -len(sign)].rstrip()
    lead = text[:1] if text[:1] in "+-" else ""
    rest = text[len(lead) :].lstrip()
    rest = rest[1:].lstrip() if rest.startswith(sign) else rest.removesuffix(sign).rstrip()
    return lead + rest


@cache
def _number_pattern(decimal: str) -> re.Pattern[str]:
    """Return the pattern of a number, whose thousands may be separated by one character."""
    separators = {"": "", ".": ",", ",": "."}[decimal] + _BLANKS
    point = "," if decimal == "," else "."
    return re.compile(
        rf"[+-]?(?:[1-9]\d{{0,2}}(?P<separator>[{re.escape(separators)}])\d{{3}}"
        rf"(?:(?P=separator)\d{{3}})*|\d+|(?=[{point}]\d))(?:[{point}]\d*)?(?:[eE][+-]?\d+)?",
        re.ASCII,
    )


def _year_first(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        if _MONTH.fullmatch(text):
            return datetime.fromisoformat(f"{text}-01")
    return _from_parts(text, lambda a, b, c: (a, b, c) if len(a) == 4 else None)


def _local_date(text: str, order: str) -> datetime:
    def parts(a: str, b: str, c: str) -> tuple[str, str, str] | None:
        if len(a) > 2 or len(c) not in (2, 4):
            return None
        return (_year(c), b, a) if order == "day-first" else (_year(c), a, b)

    return _from_parts(text, parts)


def _year(digits: str) -> str:
    """Return a year of four digits; two stand for those from 1969 to 2068, as in POSIX."""
    return digits if len(digits) == 4 else f"{20 if int(digits) < 69 else 19}{digits}"


def _named_date(text: str) -> datetime:
    """Parse a date whose month is a name, such as 12 Mar 2024, or March 2024 for its first day."""
    match = _NAMED_DATE.fullmatch(text)
    if match is None or (match["before"] and match["after"]):
        raise ValueError(text)
    day, month = match["before"] or match["after"], match["month"].lower()
    known = month in (*_MONTHS, *_SHORT_MONTHS, "sept")
    if not known or not (day or len(match["year"]) == 4):
        raise ValueError(text)
    number, year = _SHORT_MONTHS.index(month[:3]) + 1, int(_year(match["year"]))
    if not _FIRST_YEAR <= year <= _LAST_YEAR:
        raise ValueError(text)
    return _with_time(year, number, int(day or 1), match)


def _from_parts(
    text: str, parts: Callable[[str, str, str], tuple[str, str, str] | None]
) -> datetime:
    match = _DATE.fullmatch(text)
    date = None if match is None else parts(match[1], match[3], match[4])
    if match is None or date is None:
        raise ValueError(text)
    year, month, day = map(int, date)
    return _with_time(year, month, day, match)


def _with_time(year: int, month: int, day: int, match: re.Match[str]) -> datetime:
    """Return a date with the time that a pattern has matched, if any."""
    seconds, hour = float(match["second"] or 0), int(match["hour"] or 0)
    if match["half"]:
        if not 1 <= hour <= 12:
            raise ValueError(match.string)
        hour = hour % 12 + (12 if match["half"].lower().startswith("p") else 0)
    minute, microseconds = int(match["minute"] or 0), round(1e6 * (seconds % 1))
    return datetime(year, month, day, hour, minute, int(seconds), microseconds)
