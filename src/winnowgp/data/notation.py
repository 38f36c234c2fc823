"""How the strings of a column write numbers and dates: separators, signs and the order of dates."""

import re
from calendar import month_name
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
_DATE = re.compile(
    r"(\d{1,4})([-/.])(\d{1,2})\2(\d{1,4})"
    r"(?:[ T,]+(\d{1,2}):(\d{2})(?::(\d{2}(?:\.\d+)?))?\s*([ap]\.?m\.?)?)?",
    re.IGNORECASE,
)
_MONTH = re.compile(r"\d{4}-\d{2}")


@dataclass(frozen=True, slots=True)
class Notation:
    """How the strings of a column write numbers or dates.

    >>> Notation(decimal=".", sign="$").number("$2,698.50")
    2698.5
    >>> Notation(decimal=",").number("2.698,5")
    2698.5
    >>> Notation(dates="day-first").days("02.01.1970")
    1.0
    """

    decimal: str = ""
    """"." if commas may separate thousands, "," for decimal commas, "" if there are no commas."""
    sign: str = ""
    """A currency sign that may stand beside the numbers, or "%", which stands behind each."""
    dates: str = ""
    """"day-first", "month-first", or "" if dates begin with the year."""

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
            self.dates and f"dates are {self.dates}",
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
            or values["dates"] not in ("", *DATES[1:])
            or not (values["sign"] == "" or _is_sign(values["sign"]))
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
    if sign is not None:
        notation = _number_notation(counts, decimal, sign)
        if notation is not None:
            return "number", notation
    if _all(Notation(), counts, "date"):
        return "date", Notation()
    notation = _date_notation(counts, dates)
    return None if notation is None else ("date", notation)


class Ambiguity(ValueError):
    """The strings of a column have several readings; the message says how to choose one."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        """"number" or "date"."""


def may_be(string: str, kind: str) -> bool:
    """Return whether a string is a "number" or a "date" in some notation.

    >>> may_be("2,698 €", "number"), may_be("unknown", "number")
    (True, False)
    """
    if not any(character.isdigit() for character in string):
        return False
    try:
        known = recognised({string: 1})
    except Ambiguity as ambiguity:
        return ambiguity.kind == kind
    return known is not None and known[0] == kind


def _number_notation(counts: Iterable[str], decimal: str, sign: str) -> Notation | None:
    if decimal != "auto":
        notation = Notation(decimal, sign)
        if _all(notation, counts, "number"):
            return notation
        if decimal == "," and _all(Notation(), counts, "number"):
            example = next(string for string in counts if not notation.accepts(string, "number"))
            raise Ambiguity(
                "number",
                f"{example[:40]!r} has a decimal point, and decimal=',' (`--decimal ,`) is for "
                "tables with decimal commas in all columns",
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
            f"{example[:40]!r} looks like a number with {what}; if it is, use decimal=',' "
            "(`--decimal ,`)",
        )
    readings = (f"{Notation(d, sign).number(example):g}" for d in (".", ","))
    raise Ambiguity(
        "number",
        "{!r} may be {} or {}; use decimal='.' (`--decimal .`) if commas separate thousands, or "
        "decimal=',' (`--decimal ,`) if they are decimal commas".format(example[:40], *readings),
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
            f"{example[:40]!r} may be {shown}; use dates='day-first' (`--dates day-first`) or "
            "dates='month-first' (`--dates month-first`)",
        )
    return Notation(dates=possible[0]) if possible else None


def _readings(text: str) -> list[str]:
    """Return the different dates that a string may be, in words."""
    dates = dict.fromkeys(_local_date(text, order) for order in DATES[1:])
    return [f"{d.day} {month_name[d.month]} {d.year}" for d in dates]


def _all(notation: Notation, strings: Iterable[str], kind: str) -> bool:
    return all(notation.accepts(string, kind) for string in strings)


def _sign(strings: Iterable[str]) -> str | None:
    """Return the sign at an end of the strings, "" if there is none, None if there are several."""
    ends = {c for s in strings for c in (s[0], s.lstrip("+-\u2212")[:1], s[-1])}
    signs = [c for c in ends if c and _is_sign(c)]
    return None if len(signs) > 1 else "".join(signs)


def _is_sign(character: str) -> bool:
    return len(character) == 1 and (character == "%" or category(character) == "Sc")


def _without_sign(text: str, sign: str) -> str:
    """Remove a sign from one end of a number; a per cent sign must be there."""
    if not sign:
        return text
    if sign == "%":
        if not text.endswith("%"):
            raise ValueError(text)
        return text[:-1].rstrip()
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
        # Years of two digits are those from 1969 to 2068, as in POSIX.
        year = c if len(c) == 4 else f"{20 if int(c) < 69 else 19}{c}"
        return (year, b, a) if order == "day-first" else (year, a, b)

    return _from_parts(text, parts)


def _from_parts(
    text: str, parts: Callable[[str, str, str], tuple[str, str, str] | None]
) -> datetime:
    match = _DATE.fullmatch(text)
    date = None if match is None else parts(match[1], match[3], match[4])
    if match is None or date is None:
        raise ValueError(text)
    year, month, day = map(int, date)
    seconds = float(match[7] or 0)
    hour = int(match[5] or 0)
    if match[8]:
        if not 1 <= hour <= 12:
            raise ValueError(text)
        hour = hour % 12 + (12 if match[8].lower().startswith("p") else 0)
    microseconds = round(1e6 * (seconds % 1))
    return datetime(year, month, day, hour, int(match[6] or 0), int(seconds), microseconds)
