"""What the columns of a table hold: numbers, dates or categories, and what deserves a note."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from winnowgp.data.notation import Ambiguity, Notation, check_options, may_be, recognised, unit_of
from winnowgp.data.tables import DataTable
from winnowgp.errors import InputError

# A column of numbers or dates has at most this share of other rows, or of other strings.
_FEW_ROWS, _FEW_STRINGS = 0.05, 0.1
# More different words behind numbers than this are names, not units.
_MOST_UNITS = 3
_IDENTIFIER = re.compile(r"(?:^|[\W_])(?:id|ids|key|uuid|nr|no)$|[a-z](?:ID|Id)$")
_POSTAL = re.compile(r"zip|postal|post_?code|postleitzahl|(?:^|[\W_])plz", re.IGNORECASE)
_CONSTANT = "the same in every row"
# Fewer rows than this may differ by chance.
_FEWEST_ROWS = 20
# Columns whose problems one error describes.
_MOST_PROBLEMS = 6


@dataclass(frozen=True, slots=True)
class ColumnKind:
    """What a column holds, and how its strings are read."""

    kind: str
    """"number", "date" or "category"."""
    notation: Notation = Notation()
    literal: bool = False
    """Whether only empty strings are missing, so that NA is a category."""


def column_kinds(
    table: DataTable,
    names: Iterable[str] | None = None,
    *,
    decimal: str = "auto",
    dates: str = "auto",
    categorical: Iterable[str] = (),
) -> dict[str, ColumnKind]:
    """Return what each column holds.

    >>> table = DataTable.of({"price": ["$950", "$1,200.50"], "country": ["NA", "ZA"]})
    >>> column_kinds(table, categorical=["country"])["price"]
    ColumnKind(kind='number', notation=Notation(decimal='.', sign='$', dates=''), literal=False)

    Args:
        names: the columns, by default all.
        decimal: "." if commas separate thousands, "," for decimal commas, or "auto": a comma
            separates thousands where it cannot be a decimal comma, and is an error elsewhere.
        dates: "day-first" or "month-first" for dates such as 03/04/2024, or "auto": the only
            possible order, and an error where both are possible.
        categorical: columns of categories, whatever their strings look like. NA, null or ? are
            categories in them; only empty cells are missing.

    Raises:
        InputError: a column may be read in two ways; or is empty; or a few of its cells are not
            numbers or dates, and all others are.
    """
    check_options(decimal, dates)
    forced = set(categorical)
    kinds: dict[str, ColumnKind] = {}
    problems: list[str] = []
    ambiguous: dict[str, dict[str, Ambiguity]] = {}
    for name in table.names if names is None else names:
        try:
            kinds[name] = (
                ColumnKind("category", literal=True)
                if name in forced
                else _column_kind(table, name, decimal=decimal, dates=dates)
            )
        except Ambiguity as ambiguity:
            ambiguous.setdefault(ambiguity.advice, {})[name] = ambiguity
        except InputError as error:
            problems.append(str(error))
    wrong = len(problems) + sum(map(len, ambiguous.values()))
    # Columns of one table tend to be written alike: one error for all of them.
    problems = [_ambiguity_of(columns) for columns in ambiguous.values()] + problems
    if len(problems) > 1:
        # All at once, so that their owner corrects them at once.
        shown = " ".join(f"({i}) {text}" for i, text in enumerate(problems[:_MOST_PROBLEMS], 1))
        raise InputError(f"{wrong} columns cannot be read as they are. {shown}")
    if problems:
        raise InputError(problems[0])
    return kinds


def parse_numbers(table: DataTable, kinds: Mapping[str, ColumnKind]) -> DataTable:
    """Convert the columns that hold numbers as strings; check that numbers are finite."""
    parsed = {}
    for name, kind in kinds.items():
        if kind.kind == "number":
            values = table.numbers(name, kind.notation)
            assert values is not None, name
            check_finite(table, name, values)
            parsed[name] = values
    return table.with_columns(parsed)


def check_finite(table: DataTable, name: str, values: NDArray[np.float64]) -> None:
    """Raise an error that names the row of the first number that is infinite or above 1e150."""
    huge = np.abs(values) > 1e150
    if huge.any():
        row = int(huge.argmax())
        raise InputError(
            f"column {name!r} has {values[row]:g} in {table.describe_row(row)}; numbers must be "
            "finite and below 1e150. Correct that row, or rescale the column."
        )


def column_note(table: DataTable, name: str, kind: ColumnKind) -> str:
    """Return what the owner of a table should know about the reading of a column, or "".

    >>> table = DataTable.of({"zip": ["02139", "94305"]})
    >>> column_note(table, "zip", ColumnKind("number"))
    'codes with leading zeros, read as numbers; --categorical reads them as categories'
    """
    constant = table.n_unique(name) == 1 and not table.missing(name, literal=kind.literal).any()
    if constant and kind.kind == "category":
        return _CONSTANT
    if kind.kind == "category":
        return "" if kind.literal else _partly_numbers(table, name)
    notation = kind.notation
    if table.values[name].dtype == object and not any("," in s for s in table.strings(name) if s):
        notation = replace(notation, decimal="")
    notes = [str(notation)] if str(notation) else []
    if kind.kind == "number":
        notes += _number_notes(table, name, kind.notation)
    if constant:
        notes.append(_CONSTANT)
    return "; ".join(notes)


def _column_kind(table: DataTable, name: str, *, decimal: str, dates: str) -> ColumnKind:
    """Return what a column holds.

    Raises:
        Ambiguity: the column can be read in two ways.
        InputError: it is empty, or has a few odd cells.
    """
    if table.values[name].dtype != object:
        return ColumnKind("number")
    strings = table.strings(name)
    counts = Counter(string for string in strings if string is not None)
    if not counts:
        raise InputError(f"column {name!r} is empty; leave it out with `drop` (`--drop {name!r}`).")
    known = recognised(counts, decimal=decimal, dates=dates)
    if known is not None:
        return ColumnKind(*known)
    for kind in ("number", "date"):
        _check_odd_cells(table, name, counts, kind)
    return ColumnKind("category")


def _ambiguity_of(columns: Mapping[str, Ambiguity]) -> str:
    """Return the message about columns that can be read in the same two ways."""
    names, message = list(columns), next(iter(columns.values()))
    if len(names) == 1:
        return f"column {names[0]!r}: {message}. {_categories_advice(names[0])}"
    shown = ", ".join(map(repr, names[:_MOST_PROBLEMS]))
    more = f" and {len(names) - _MOST_PROBLEMS} more" if len(names) > _MOST_PROBLEMS else ""
    return (
        f"columns {shown}{more}: {message}. To read the columns as categories use `categorical` "
        f"(`--categorical {','.join(names)!r}`)."
    )


def _check_odd_cells(table: DataTable, name: str, counts: Counter[str], kind: str) -> None:
    """Raise an error if all strings, or all but a few rows or strings, are of a kind."""
    if kind == "number" and len({unit_of(string) for string in counts} - {""}) > _MOST_UNITS:
        return  # Addresses, plates and the like.
    odd: dict[str, int] = {}
    rows, total = 0, counts.total()
    for string, count in counts.items():
        if not may_be(string, kind):
            odd[string] = count
            rows += count
            if rows > _FEW_ROWS * total and len(odd) > _FEW_STRINGS * len(counts):
                return
    if not odd:
        # Each string has a reading, but there is no notation in which all of them have one.
        shown = ", ".join(repr(string[:40]) for string in _extremes(counts))
        raise InputError(
            f"column {name!r} has {kind}s that are written in several ways, such as {shown}. "
            f"Write them in one way{_unit_advice(counts)}. {_categories_advice(name)}"
        )
    first = next(row for row, string in enumerate(table.strings(name)) if string in odd)
    shown = ", ".join(repr(string[:40]) for string in list(odd)[:3])
    raise InputError(
        f"column {name!r} has {kind}s in all but {rows} of {total} rows, where it has {shown}, "
        f"first in {table.describe_row(first)}. Correct such cells, or leave them empty "
        f"if the values are missing. {_categories_advice(name)}"
    )


def _extremes(counts: Counter[str]) -> list[str]:
    """Return two strings that are written differently: with other units, or other characters."""
    units = {unit_of(string): string for string in counts}
    if len(units) > 1:
        return list(units.values())[:2]
    marks = ("%", *"$€£,/.")
    for mark in marks:
        two = [next((s for s in counts if (mark in s) == has), None) for has in (True, False)]
        if None not in two:
            return [s for s in two if s is not None]
    return list(counts)[:2]


def _unit_advice(strings: Iterable[str]) -> str:
    units = {unit_of(string) for string in strings}
    return ", in one unit" if len(units - {""}) > 1 else ""


def _categories_advice(name: str) -> str:
    return f"To read the column as categories use `categorical` (`--categorical {name!r}`)."


def _partly_numbers(table: DataTable, name: str) -> str:
    """Return a note about a column of categories many of which are numbers."""
    strings = [string for string in table.strings(name) if string is not None]
    units = sorted({unit_of(string) for string in strings})
    if len(units) > 1 and units[0]:
        return f"numbers with several units ({', '.join(units[:3])}), read as categories"
    numbers = sum(Notation().accepts(string, "number") for string in strings)
    if numbers < len(strings) / 2 or numbers == len(strings):
        return ""
    other = next(s for s in strings if not Notation().accepts(s, "number"))
    return f"{numbers} of {len(strings)} rows are numbers, others such as {other[:20]!r}"


def _number_notes(table: DataTable, name: str, notation: Notation) -> list[str]:
    values = table.numbers(name, notation)
    assert values is not None
    values = values[~np.isnan(values)]
    if not len(values) or notation.sign or not (values == np.round(values)).all():
        return []
    strings = [s for s in table.strings(name) if s is not None]
    if any(len(s) > 1 and s[0] == "0" and s.isdigit() for s in strings):
        return ["codes with leading zeros, read as numbers; --categorical reads them as categories"]
    if _POSTAL.search(name):
        return ["postal codes, read as numbers; --categorical reads them as categories"]
    different = len(np.unique(values))
    numbered = different == len(values) == values.max() - values.min() + 1
    if len(values) >= _FEWEST_ROWS and (numbered or (_IDENTIFIER.search(name) and different > 30)):
        return ["perhaps an identifier: if it only numbers things, use --id or --drop"]
    return []
