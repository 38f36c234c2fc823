"""Tables with columns of numbers, strings and dates, read from CSV and Parquet."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from winnowgp.errors import InputError

# Where a block of rows stands in its file.


@dataclass(frozen=True, slots=True)
class Origin:
    """How to name the rows of a block as a reader of the whole file would.

    >>> Origin(before=100).place(0)
    'row 101'
    >>> Origin(before=100, groups=(60, 120)).place(0)
    'row 101 (row group 1, counted from 0)'
    """

    before: int
    """Rows of the file that come first."""
    groups: tuple[int, ...] = ()
    """Of a Parquet file: rows up to the end of each row group."""

    def place(self, row: int) -> str:
        """Words for a row of the block, counted from 0: its number in the file, from 1."""
        row += self.before
        group = f" (row group {bisect_right(self.groups, row)}, counted from 0)"
        return f"row {row + 1}{group if self.groups else ''}"

    def after(self, rows: int) -> "Origin":
        """Of what is left when the block's first rows are taken away."""
        return Origin(self.before + rows, self.groups)


# Names of the columns of a file.


def distinct_names(header: Iterable[str], path: Path) -> list[str]:
    """Without blanks around them; an error if one is empty or there twice."""
    names = [name.strip() for name in header]
    for place, name in enumerate(names, start=1):
        if not name:
            raise InputError(
                f"{path}: column {place} has no name; give every column one "
                "(pandas: `to_csv(..., index=False)`)."
            )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        shown = ", ".join(repr(name[:60]) for name in twice[:5])
        raise InputError(f"{path}: more than one column is called {shown}; rename them.")
    return names


# A table as it comes from a file: named columns of numbers or words, some of them missing.


Column: TypeAlias = NDArray[Any]

"""Numbers in float64, NaN where missing; or an object array of strings, None where missing."""

MISSING_WORDS = frozenset({"", "na", "n/a", "nan", "null", "none", "?", "<na>", "nat"})

_EXACT = 2.0**53


@dataclass(frozen=True, slots=True)
class DataTable:
    """Named columns of one length.

    >>> table = DataTable.of({"size": [1, 2, None], "colour": ["red", "NA", "blue"]})
    >>> table.N, table.words("colour").tolist()
    (3, ['red', None, 'blue'])
    """

    values: dict[str, Column]
    origin: Origin | None = None
    """Where in a file they are; None if they are all there is."""

    @classmethod
    def of(cls, table: Mapping[str, Any] | Any) -> "DataTable":
        """From anything that names its columns: a data frame, or a dictionary of sequences."""
        values = {str(name): _column(str(name), table[name]) for name in table.keys()}  # noqa: SIM118
        lengths = {name: len(column) for name, column in values.items()}
        if len(set(lengths.values())) > 1:
            raise InputError(f"all columns must have one length; got {lengths}.")
        return cls(values)

    @classmethod
    def joined(cls, blocks: Sequence["DataTable"]) -> "DataTable":
        """One after another; from where the first one is. At least one, with the same names.

        A column that is numbers in some blocks and words in others becomes words.
        """
        if len(blocks) == 1:
            return blocks[0]
        return cls(
            {name: _joined([b.values[name] for b in blocks]) for name in blocks[0].names},
            blocks[0].origin,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """In the order of the file."""
        return tuple(self.values)

    @property
    def N(self) -> int:
        """Number of rows."""
        return len(next(iter(self.values.values()))) if self.values else 0

    def numbers(self, name: str) -> NDArray[np.float64] | None:
        """The column as numbers, NaN where missing; None if some entry is not a number."""
        column = self.values[name]
        if column.dtype != object:
            return column
        try:
            return np.array(
                [np.nan if v is None else as_number(v) for v in column], dtype=np.float64
            )
        except ValueError:
            return None

    def missing(self, name: str) -> NDArray[np.bool_]:
        """Where the column has nothing."""
        column = self.values[name]
        if column.dtype != object:
            return np.isnan(column)
        return np.array([word is None for word in column], dtype=bool)

    def different(self, name: str) -> int:
        """How many different entries the column has."""
        present = self.values[name][~self.missing(name)]
        return len(set(present) if present.dtype == object else np.unique(present))

    def words(self, name: str) -> NDArray[np.object_]:
        """The column as words, None where missing; whole numbers without a decimal point."""
        return _words(self.values[name])

    def numbered(self, names: Iterable[str]) -> "DataTable":
        """The same, with those of these columns that hold numbers as text read once and for all."""
        read = {n: values for n in names if (values := self.numbers(n)) is not None}
        return DataTable({**self.values, **read}, self.origin)

    def without(self, names: Iterable[str]) -> "DataTable":
        """All columns but these."""
        dropped = set(names)
        return DataTable({n: v for n, v in self.values.items() if n not in dropped}, self.origin)

    def rows(self, which: NDArray[Any]) -> "DataTable":
        """Some rows, by number or by mask."""
        return DataTable({name: column[which] for name, column in self.values.items()})

    def between(self, start: int, stop: int) -> "DataTable":
        """Rows one after another, which still know where in their file they are."""
        origin = None if self.origin is None else self.origin.after(start)
        return DataTable({name: column[start:stop] for name, column in self.values.items()}, origin)

    def place(self, row: int) -> str:
        """Words for a row, given its number from 0: where a person finds it, from 1."""
        return f"row {row + 1}" if self.origin is None else self.origin.place(row)

    def check_has(self, names: Sequence[str], *, said_by: str) -> None:
        """An error that lists what there is, if a name is not among the columns."""
        absent = [name for name in names if name not in self.values]
        if absent:
            raise InputError(
                f"{said_by} must name columns of the table; {_quoted(absent)} "
                f"{'is' if len(absent) == 1 else 'are'} not among {_quoted(self.names)}."
            )


def number_word(value: float) -> str:
    """A number as a person would write it.

    >>> number_word(3.0), number_word(0.25)
    ('3', '0.25')
    """
    return str(int(value)) if value.is_integer() and abs(value) < _EXACT else repr(float(value))


def word_or_missing(text: str) -> str | None:
    """Stripped of blanks; None for the usual ways to say that nothing is known."""
    stripped = text.strip()
    return None if stripped.lower() in MISSING_WORDS else stripped


def as_number(text: str) -> float:
    """A number written out; Python would also read 1_000."""
    if "_" in text:
        raise ValueError(text)
    return float(text)


def _words(column: Column) -> NDArray[np.object_]:
    if column.dtype == object:
        return column
    return np.array([None if np.isnan(v) else number_word(v) for v in column], dtype=object)


def _joined(columns: list[Column]) -> Column:
    alike = len({column.dtype for column in columns}) == 1
    return np.concatenate(columns if alike else [_words(column) for column in columns])


def _column(name: str, values: Any) -> Column:
    """Numbers stay numbers, dates become ISO text, everything else words."""
    given = np.asarray(values)
    if given.ndim != 1:
        raise InputError(f"column {name!r} must hold one value a row; got shape {given.shape}.")
    if given.dtype.kind == "M":
        text = np.datetime_as_string(given, unit="s")
        return np.array([None if t == "NaT" else str(t) for t in text], dtype=object)
    if given.dtype.kind == "f" or (given.dtype.kind in "iu" and _exact(given)):
        return given.astype(np.float64)
    return np.array([_word(v) for v in given.tolist()], dtype=object)


def _exact(whole: NDArray[Any]) -> bool:
    return not len(whole) or max(abs(int(whole.min())), abs(int(whole.max()))) < _EXACT


def _word(value: Any) -> str | None:
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, float):
        return None if np.isnan(value) else number_word(value)
    if isinstance(value, bool):
        return str(value).lower()
    return word_or_missing(str(value))


def _quoted(names: Sequence[str], most: int = 12) -> str:
    shown = ", ".join(repr(name) for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
