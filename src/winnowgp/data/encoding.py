"""Encoding the columns of a table as a numeric matrix."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from winnowgp.data.tables import DataTable, parse_number
from winnowgp.errors import InputError, ModelFileError

_MISSING = ("error", "impute")
_SECONDS_PER_DAY = 86_400.0
_DECIMAL_COMMA = re.compile(r"[+-]?[\d.]*,\d+|[+-]?\d+")


@dataclass(frozen=True, slots=True)
class TableEncoder:
    """Encodes tables as numeric matrices; the encoding is learnt from a training table.

    Numbers stay as they are. Dates in ISO format become days since 1970. Strings are one-hot
    encoded; a category that was not in the training table becomes a row of zeros. Missing values
    are an error or imputed: a number by the training median, with an indicator column if the
    training table had missing values in that column; a string by a row of zeros.

    >>> table = DataTable.of({"size": ["1", "2", "4"], "colour": ["red", "blue", "red"]})
    >>> encoder = TableEncoder.learn(table)
    >>> encoder.features
    ('size', 'colour=red', 'colour=blue')
    >>> encoder.encode(DataTable.of({"size": ["3"], "colour": ["green"]})).tolist()
    [[3.0, 0.0, 0.0]]
    """

    columns: tuple["ColumnEncoding", ...]
    missing: str = "error"

    @classmethod
    def learn(
        cls, table: DataTable, *, missing: str = "error", max_words: int = 30
    ) -> "TableEncoder":
        """Learn the encoding of each column from its values.

        Args:
            table: training table, without the target.
            missing: "error" to refuse missing values, or "impute".
            max_words: largest number of categories of a column of strings.
        """
        if missing not in _MISSING:
            raise InputError(f"`missing` must be 'error' or 'impute'; got {missing!r}.")
        if not table.names:
            raise InputError(
                "`table` must have at least one input; no columns are left to learn from."
            )
        encodings, refused = [], []
        for name in table.names:
            try:
                encodings.append(_learnt_encoding(table, name, max_words=max_words))
            except _TooManyCategoriesError as error:
                refused.append(error)
        if len(refused) > 1:
            names = ",".join(error.column for error in refused)
            raise InputError(
                f"{len(refused)} columns have more than {max_words} different strings; leave them "
                f"out with `drop` (`--drop {names!r}`), or increase `max_words` (`--max-words`)."
            )
        if refused:
            raise refused[0]
        return cls(tuple(encodings), missing)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the columns of the matrix."""
        return tuple(feature for column in self.columns for feature in column.features)

    def encode(self, table: DataTable) -> NDArray[np.float64]:
        """Return the matrix `[N features]`; columns are matched by name, and others ignored."""
        self.require_columns(table)
        impute = self.missing == "impute"
        return np.hstack([column.encode(table, impute=impute) for column in self.columns])

    def require_columns(self, table: DataTable) -> None:
        """Raise an error that names the columns of the training table that a table lacks."""
        absent = [c.name for c in self.columns if c.name not in table.values]
        if absent:
            shown = ", ".join(repr(name) for name in absent[:12])
            raise InputError(f"the table lacks columns that the model was fitted with: {shown}.")

    def unseen(self, table: DataTable) -> dict[str, list[str]]:
        """Return the categories of each column that were not in the training table."""
        unseen: dict[str, list[str]] = {}
        for column in self.columns:
            if column.kind == "words":
                new = set(table.strings(column.name)) - set(column.categories) - {None}
                if new:
                    unseen[column.name] = sorted(new)
        return unseen

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary that can be written as JSON."""
        return {"columns": [c.to_dict() for c in self.columns], "missing": self.missing}

    @classmethod
    def from_dict(cls, values: Any) -> "TableEncoder":
        """Check the result of `to_dict` from an untrusted file, and return its encoder.

        Raises:
            ModelFileError: the value does not describe an encoder.
        """
        if not isinstance(values, dict) or not isinstance(values.get("columns"), list):
            raise ModelFileError("has no table encoder")
        columns = tuple(map(ColumnEncoding.from_dict, values["columns"]))
        names = {column.name for column in columns}
        if not columns or len(names) < len(columns) or values.get("missing") not in _MISSING:
            raise ModelFileError(
                "has a table encoder without columns, with repeated columns, or without a rule for "
                "missing values"
            )
        return cls(columns, values["missing"])


@dataclass(frozen=True, slots=True)
class ColumnEncoding:
    """The encoding of one column: a number, a date in days, or one-hot categories."""

    name: str
    kind: str
    """"number", "date", or "words" for a column of strings."""
    typical: float | str
    """The median, which replaces missing numbers, or the most frequent category."""
    flagged: bool = False
    """Whether an indicator column marks missing numbers."""
    categories: tuple[str, ...] = ()
    """Strings of a column of kind "words", most frequent first."""

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the columns of the matrix that this column becomes."""
        if self.kind == "words":
            return tuple(f"{self.name}={category}" for category in self.categories)
        return (self.name, f"{self.name} missing") if self.flagged else (self.name,)

    def accepts(self, table: DataTable) -> bool:
        """Return whether the column of a table can be encoded as this kind."""
        if self.kind == "words":
            return True
        return numbers_or_dates(table, self.name, date=self.kind == "date") is not None

    def encode(self, table: DataTable, *, impute: bool) -> NDArray[np.float64]:
        """Return `[N features]`; a missing or unknown category is a row of zeros."""
        if self.kind == "words":
            strings = table.strings(self.name)
            self._check_missing(table, np.array([s is None for s in strings]), impute=impute)
            index = {category: i for i, category in enumerate(self.categories)}
            indices = np.array([index.get(string, -1) for string in strings])
            return (indices[:, None] == np.arange(len(self.categories))).astype(np.float64)
        values = numbers_or_dates(table, self.name, date=self.kind == "date")
        if values is None:
            row, string = first_mismatch(table, self.name, self.kind)
            raise InputError(
                f"column {self.name!r} must have {self.kind}s, as in the training table; "
                f"got {string!r} in {table.describe_row(row)}."
                f"{decimal_comma_advice([string])}"
            )
        check_finite(table, self.name, values)
        missing = np.isnan(values)
        self._check_missing(table, missing, impute=impute)
        filled = np.where(missing, self.typical, values).astype(np.float64)
        return np.stack([filled, missing.astype(np.float64)] if self.flagged else [filled], axis=1)

    def _check_missing(self, table: DataTable, missing: NDArray[np.bool_], *, impute: bool) -> None:
        if impute or not missing.any():
            return
        # The rest of a file that is read in blocks may have more of them.
        count = f"{int(missing.sum())} " if table.origin is None else ""
        raise InputError(
            f"column {self.name!r} has {count}missing values, the first in "
            f"{table.describe_row(int(missing.argmax()))}; fill them in, or fit with "
            "missing='impute' (`--missing impute`)."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary that can be written as JSON."""
        return {
            "name": self.name,
            "kind": self.kind,
            "typical": self.typical,
            "flagged": self.flagged,
            "words": list(self.categories),
        }

    @classmethod
    def from_dict(cls, values: Any) -> "ColumnEncoding":
        """Check the result of `to_dict` from an untrusted file, and return its encoding.

        Raises:
            ModelFileError: the value does not describe an encoding of a column.
        """
        if not isinstance(values, dict) or not _is_encoding(values):
            raise ModelFileError(f"describes an input as {values!r:.200}")
        fields = {name: values[name] for name in ("name", "kind", "typical", "flagged")}
        return cls(**fields, categories=tuple(values["words"]))


def _is_encoding(values: dict[Any, Any]) -> bool:
    """Return whether `ColumnEncoding.to_dict` might have returned these values."""
    if values.keys() != {"name", "kind", "typical", "flagged", "words"}:
        return False
    categories, typical = values["words"], values["typical"]
    if not isinstance(values["name"], str) or not isinstance(categories, list):
        return False
    if values["kind"] == "words":
        strings = all(isinstance(category, str) and category for category in categories)
        distinct = strings and len(set(categories)) == len(categories)
        return distinct and typical in categories and values["flagged"] is False
    number = isinstance(typical, float | int) and not isinstance(typical, bool)
    return (
        values["kind"] in ("number", "date")
        and type(values["flagged"]) is bool
        and number
        and isfinite(typical)
        and not categories
    )


class _TooManyCategoriesError(InputError):
    """A column of strings looks like identifiers rather than categories."""

    def __init__(self, message: str, column: str) -> None:
        super().__init__(message)
        self.column = column


def _learnt_encoding(table: DataTable, name: str, *, max_words: int) -> ColumnEncoding:
    for date in (False, True):
        values = numbers_or_dates(table, name, date=date)
        if values is not None:
            check_finite(table, name, values)
            missing = np.isnan(values)
            if missing.all():
                raise InputError(f"column {name!r} is empty; leave it out with `drop` (`--drop`).")
            typical = float(np.median(values[~missing]))
            return ColumnEncoding(name, "date" if date else "number", typical, bool(missing.any()))
    counts = Counter(string for string in table.strings(name) if string is not None)
    if advice := decimal_comma_advice(counts):
        example = next(string for string in counts if "," in string)[:40]
        raise InputError(
            f"column {name!r} holds strings, such as {example!r}.{advice} If they are categories, "
            "write them with a letter, or leave the column out with `drop` (`--drop`)."
        )
    if len(counts) > max_words:
        raise _TooManyCategoriesError(
            f"column {name!r} has {len(counts)} different strings, such as "
            f"{next(iter(counts))[:40]!r}, and {max_words} are allowed; leave it out with `drop` "
            "(`--drop`), use it as `id_column` (`--id`), or increase `max_words` (`--max-words`)."
            f"{_stray_strings(counts)}",
            name,
        )
    categories = tuple(string for string, _ in counts.most_common())
    return ColumnEncoding(name, "words", categories[0], categories=categories)


def numbers_or_dates(table: DataTable, name: str, *, date: bool) -> NDArray[np.float64] | None:
    """Return a column as numbers, or dates as days since 1970; None if it holds anything else."""
    if not date:
        return table.numbers(name)
    try:
        return np.array([np.nan if s is None else _days(s) for s in table.strings(name)])
    except ValueError:
        return None


def check_finite(table: DataTable, name: str, values: NDArray[np.float64]) -> None:
    """Raise an error that names the row of the first number that is infinite or above 1e150."""
    huge = np.abs(values) > 1e150
    if huge.any():
        row = int(huge.argmax())
        raise InputError(
            f"column {name!r} has {values[row]:g} in {table.describe_row(row)}; numbers must be "
            "finite and below 1e150."
        )


def first_mismatch(table: DataTable, name: str, kind: str) -> tuple[int, str]:
    """Return the row and text of the first string that is not of a kind; (−1, "") if none is."""
    for row, string in enumerate(table.strings(name)):
        if string is not None and not _is_kind(string, kind):
            return row, string[:40]
    return -1, ""


def decimal_comma_advice(strings: Iterable[str]) -> str:
    """Return advice if all strings are numbers and some have a decimal comma, else ""."""
    strings = list(strings)
    if any("," in string for string in strings) and all(map(_DECIMAL_COMMA.fullmatch, strings)):
        return " These look like numbers with decimal commas; write them with points."
    return ""


def _days(text: str) -> float:
    date = datetime.fromisoformat(text)
    date = date if date.tzinfo else date.replace(tzinfo=UTC)
    return date.timestamp() / _SECONDS_PER_DAY


def _is_kind(string: str, kind: str) -> bool:
    try:
        _days(string) if kind == "date" else parse_number(string)
    except ValueError:
        return False
    return True


def _stray_strings(counts: Counter[str]) -> str:
    """Return a sentence that names the strings among numbers, if they are few."""
    strays = [string for string in counts if not _is_kind(string, "number")]
    if 0 < len(strays) <= len(counts) // 10:
        shown = ", ".join(repr(string[:40]) for string in strays[:3])
        return f" All but {len(strays)} of them are numbers; the others are such as {shown}."
    return ""
