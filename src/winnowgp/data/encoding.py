"""Encoding of table columns as numbers."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from winnowgp.data.tables import DataTable, as_number
from winnowgp.errors import InputError, ModelFileError

# How one column of a table becomes numbers, the same way always.


_SECONDS_A_DAY = 86_400.0

_DECIMAL_COMMA = re.compile(r"[+-]?[\d.]*,\d+|[+-]?\d+")


@dataclass(frozen=True, slots=True)
class ColumnEncoding:
    """A number, a date (in days), or words of which each becomes a column of zeros and ones."""

    name: str
    kind: str
    """"number", "date" or "words"."""
    typical: float | str
    """The median, or the most frequent word: what stands in for a missing number."""
    flagged: bool = False
    """Whether a second column says where a number was missing."""
    words: tuple[str, ...] = ()
    """Most frequent first."""

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the columns that it becomes."""
        if self.kind == "words":
            return tuple(f"{self.name}={word}" for word in self.words)
        return (self.name, f"{self.name} missing") if self.flagged else (self.name,)

    def holds(self, table: DataTable) -> bool:
        """Whether the column of a table is of this kind."""
        if self.kind == "words":
            return True
        return numbers_or_dates(table, self.name, date=self.kind == "date") is not None

    def encode(self, table: DataTable, *, impute: bool) -> NDArray[np.float64]:
        """`[N features]`. A word never seen, or missing, is a row of zeros."""
        if self.kind == "words":
            found = table.words(self.name)
            self._check_missing(table, np.array([w is None for w in found]), impute=impute)
            known = {word: place for place, word in enumerate(self.words)}
            places = np.array([known.get(word, -1) for word in found])
            return (places[:, None] == np.arange(len(self.words))).astype(np.float64)
        values = numbers_or_dates(table, self.name, date=self.kind == "date")
        if values is None:
            row, word = odd_word(table, self.name, self.kind)
            raise InputError(
                f"column {self.name!r} held {self.kind}s when the model was fitted; "
                f"now it has {word!r} in {table.place(row)}.{decimal_comma_advice([word])}"
            )
        check_finite(table, self.name, values)
        missing = np.isnan(values)
        self._check_missing(table, missing, impute=impute)
        filled = np.where(missing, self.typical, values).astype(np.float64)
        return np.stack([filled, missing.astype(np.float64)] if self.flagged else [filled], axis=1)

    def _check_missing(self, table: DataTable, missing: NDArray[np.bool_], *, impute: bool) -> None:
        if impute or not missing.any():
            return
        # How many there are in a whole file, nobody knows who has seen a part of it.
        count = f"{int(missing.sum())} " if table.origin is None else ""
        raise InputError(
            f"column {self.name!r} has {count}missing values, the first in "
            f"{table.place(int(missing.argmax()))}; fill them in, or fit with missing='impute' "
            "(`--missing impute`)."
        )

    def about(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "name": self.name,
            "kind": self.kind,
            "typical": self.typical,
            "flagged": self.flagged,
            "words": list(self.words),
        }

    @classmethod
    def from_about(cls, about: Any) -> "ColumnEncoding":
        """The way back, from a file that anybody may have written.

        Raises:
            ModelFileError: this is no encoding of a column.
        """
        if not isinstance(about, dict) or not _is_encoding(about):
            raise ModelFileError(f"describes an input as {about!r:.200}")
        return cls(**{**about, "words": tuple(about["words"])})


def _is_encoding(about: dict[Any, Any]) -> bool:
    """Whether a dictionary is one that `about` might have returned."""
    if about.keys() != {"name", "kind", "typical", "flagged", "words"}:
        return False
    words, typical = about["words"], about["typical"]
    if not isinstance(about["name"], str) or not isinstance(words, list):
        return False
    if about["kind"] == "words":
        known = all(isinstance(word, str) and word for word in words)
        once = known and len(set(words)) == len(words)
        return once and typical in words and about["flagged"] is False
    number = isinstance(typical, float | int) and not isinstance(typical, bool)
    return (
        about["kind"] in ("number", "date")
        and type(about["flagged"]) is bool
        and number
        and isfinite(typical)
        and not words
    )


def learnt_encoding(table: DataTable, name: str, *, max_words: int) -> ColumnEncoding:
    """What a column is, from what is in it.

    Raises:
        InputError: nothing is in it, or too many different words.
    """
    for date in (False, True):
        values = numbers_or_dates(table, name, date=date)
        if values is not None:
            check_finite(table, name, values)
            missing = np.isnan(values)
            if missing.all():
                raise InputError(f"column {name!r} is empty; leave it out (`--drop`).")
            typical = float(np.median(values[~missing]))
            return ColumnEncoding(name, "date" if date else "number", typical, bool(missing.any()))
    counts = Counter(word for word in table.words(name) if word is not None)
    if advice := decimal_comma_advice(counts):
        raise InputError(
            f"column {name!r} holds words, such as {next(w for w in counts if ',' in w)[:40]!r}."
            f"{advice} If they are categories, write them with a letter, or leave the column out "
            "(`--drop`)."
        )
    if len(counts) > max_words:
        raise TooManyWordsError(
            f"column {name!r} has {len(counts)} different words, such as "
            f"{next(iter(counts))[:40]!r}, and {max_words} are allowed; leave it out (`--drop`), "
            f"say that it names rows (`--id`), or allow more (`--max-words`).{_stray(counts)}",
            name,
        )
    words = tuple(word for word, _ in counts.most_common())
    return ColumnEncoding(name, "words", words[0], words=words)


class TooManyWordsError(InputError):
    """A column of words looks like names or numbers of rows rather than like categories."""

    def __init__(self, message: str, column: str) -> None:
        super().__init__(message)
        self.column = column


def numbers_or_dates(table: DataTable, name: str, *, date: bool) -> NDArray[np.float64] | None:
    """The column as numbers, dates as days since 1970; None if it holds something else."""
    if not date:
        return table.numbers(name)
    words = table.words(name)
    try:
        return np.array([np.nan if word is None else _days(word) for word in words])
    except ValueError:
        return None


def check_finite(table: DataTable, name: str, values: NDArray[np.float64]) -> None:
    """An error that names the row of the first infinity, or of a number beyond 1e150."""
    huge = np.abs(values) > 1e150
    if huge.any():
        row = int(huge.argmax())
        raise InputError(
            f"column {name!r} has {values[row]:g} in {table.place(row)}; numbers must be finite "
            "and below 1e150."
        )


def _days(text: str) -> float:
    moment = datetime.fromisoformat(text)
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return moment.timestamp() / _SECONDS_A_DAY


def odd_word(table: DataTable, name: str, kind: str) -> tuple[int, str]:
    """The first word that is not of a kind, and its row; (−1, "") if there is none."""
    for row, word in enumerate(table.words(name)):
        if word is not None and not _is(word, kind):
            return row, word[:40]
    return -1, ""


def _stray(counts: Counter[str]) -> str:
    """Names the words among numbers, if they are few."""
    strays = [word for word in counts if not _is(word, "number")]
    if 0 < len(strays) <= len(counts) // 10:
        shown = ", ".join(repr(word[:40]) for word in strays[:3])
        return f" All but {len(strays)} of them are numbers; the others are such as {shown}."
    return ""


def _is(word: str, kind: str) -> bool:
    try:
        _days(word) if kind == "date" else as_number(word)
    except ValueError:
        return False
    return True


def decimal_comma_advice(words: Iterable[str]) -> str:
    """Advice for numbers written as in 3,14; nothing if some are not."""
    found = list(words)
    if any("," in word for word in found) and all(map(_DECIMAL_COMMA.fullmatch, found)):
        return " These look like numbers with decimal commas; write them with points."
    return ""


# From a table with words and holes to a matrix, and the same way for every later table.


MISSING = ("error", "impute")


@dataclass(frozen=True, slots=True)
class TableEncoder:
    """One encoding a column, learnt once.

    Numbers stay what they are. Dates in ISO form become days since 1970. Words become one column of
    zeros and ones for each category; a word never seen before is a row of zeros. What is missing is
    an error, or imputed: a number by the training median, with a further column that says where if
    the training table had holes in that column; a word by a row of zeros.

    >>> table = DataTable.of({"size": ["1", "2", "4"], "colour": ["red", "blue", "red"]})
    >>> encoder = TableEncoder.learn(table)
    >>> encoder.features
    ('size', 'colour=red', 'colour=blue')
    >>> encoder.encode(DataTable.of({"size": ["3"], "colour": ["green"]})).tolist()
    [[3.0, 0.0, 0.0]]
    """

    columns: tuple[ColumnEncoding, ...]
    missing: str = "error"

    @classmethod
    def learn(
        cls, table: DataTable, *, missing: str = "error", max_words: int = 30
    ) -> "TableEncoder":
        """What each column is, from what is in it.

        Args:
            missing: "error" or "impute".
            max_words: most categories of a column of words.
        """
        if missing not in MISSING:
            raise InputError(f"`missing` must be 'error' or 'impute'; got {missing!r}.")
        if not table.names:
            raise InputError("no columns are left to learn from; keep at least one input.")
        encodings, unusable = [], []
        for name in table.names:
            try:
                encodings.append(learnt_encoding(table, name, max_words=max_words))
            except TooManyWordsError as error:
                unusable.append(error)
        if len(unusable) > 1:
            names = ",".join(error.column for error in unusable)
            raise InputError(
                f"{len(unusable)} columns have more than {max_words} different words; leave them "
                f"out (`--drop {names!r}`), or allow more (`--max-words`)."
            )
        if unusable:
            raise unusable[0]
        return cls(tuple(encodings), missing)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the columns of the matrix."""
        return tuple(feature for column in self.columns for feature in column.features)

    def encode(self, table: DataTable) -> NDArray[np.float64]:
        """The matrix `[N features]`; columns are found by name, others ignored."""
        self.check_has_columns(table)
        impute = self.missing == "impute"
        return np.hstack([column.encode(table, impute=impute) for column in self.columns])

    def check_has_columns(self, table: DataTable) -> None:
        """An error that names the columns which a table lacks, if it does."""
        absent = [c.name for c in self.columns if c.name not in table.values]
        if absent:
            shown = ", ".join(repr(name) for name in absent[:12])
            raise InputError(f"the table lacks columns that the model was fitted with: {shown}.")

    def unseen(self, table: DataTable) -> dict[str, list[str]]:
        """Words of each column that were not in the training table."""
        found: dict[str, list[str]] = {}
        for column in self.columns:
            if column.kind == "words":
                new = set(table.words(column.name)) - set(column.words) - {None}
                if new:
                    found[column.name] = sorted(new)
        return found

    def about(self) -> dict[str, Any]:
        """As JSON."""
        return {"columns": [c.about() for c in self.columns], "missing": self.missing}

    @classmethod
    def from_about(cls, about: Any) -> "TableEncoder":
        """The way back, from a file that anybody may have written.

        Raises:
            ModelFileError: this is no encoder.
        """
        if not isinstance(about, dict) or not isinstance(about.get("columns"), list):
            raise ModelFileError("has no encoder of a table")
        columns = tuple(map(ColumnEncoding.from_about, about["columns"]))
        names = {column.name for column in columns}
        if not columns or len(names) < len(columns) or about.get("missing") not in MISSING:
            raise ModelFileError("has an encoder of no table: no columns, one twice, or no rule")
        return cls(columns, about["missing"])
