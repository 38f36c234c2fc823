"""Encoding the columns of a table as a numeric matrix."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from winnowgp.data.columns import ColumnKind, check_finite, column_kinds
from winnowgp.data.notation import Notation
from winnowgp.data.tables import DataTable
from winnowgp.errors import InputError, ModelFileError

_MISSING = ("error", "impute")
_FIELDS = {"name", "kind", "typical", "flagged", "categories"}
# Fields that a file has only where they differ from the default.
_OPTIONAL = {"notation", "literal"}


@dataclass(frozen=True, slots=True)
class TableEncoder:
    """Encodes tables as numeric matrices; the encoding is learnt from a training table.

    Numbers stay as they are. Dates become days since 1970. Strings are one-hot encoded; a category
    that was not in the training table becomes a row of zeros. Missing values
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
    target: Notation = Notation()
    """How strings write a numeric target."""

    @classmethod
    def learn(
        cls,
        table: DataTable,
        *,
        kinds: Mapping[str, ColumnKind] | None = None,
        rows: NDArray[Any] | None = None,
        missing: str = "error",
        max_categories: int = 30,
    ) -> "TableEncoder":
        """Learn the encoding of each column from its values.

        Args:
            table: training table, without the target.
            kinds: what each column holds, by default `winnowgp.data.columns.column_kinds`.
            rows: indices of the rows from which medians and categories are learnt, by default all.
            missing: "error" to refuse missing values, or "impute".
            max_categories: largest number of categories of a column of strings.
        """
        if missing not in _MISSING:
            raise InputError(f"`missing` must be 'error' or 'impute'; got {missing!r}.")
        if not table.names:
            raise InputError(
                "the table must have at least one input, and no columns are left to learn from; "
                "add columns, or leave fewer out."
            )
        kinds = column_kinds(table) if kinds is None else kinds
        train = table if rows is None else table.part(rows)
        encodings, refused = [], []
        for name in table.names:
            try:
                encodings.append(
                    _learnt_encoding(train, name, kinds[name], max_categories=max_categories)
                )
            except _TooManyCategoriesError as error:
                refused.append(error)
        if len(refused) > 1:
            names = ",".join(error.column for error in refused)
            raise InputError(
                f"{len(refused)} columns have more than {max_categories} different strings; leave "
                f"them out with `drop` (`--drop {names!r}`), or increase `max_categories` "
                "(`--max-categories`)."
            )
        if refused:
            raise refused[0]
        return cls(tuple(encodings), missing)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the columns of the matrix."""
        return tuple(feature for column in self.columns for feature in column.features)

    @property
    def feature_numbers(self) -> dict[str, list[int]]:
        """Numbers of the columns of the matrix that each column of the table becomes."""
        ends = np.cumsum([len(column.features) for column in self.columns]).tolist()
        ranges = zip([0, *ends], ends, strict=False)
        names = (column.name for column in self.columns)
        return {name: list(range(*each)) for name, each in zip(names, ranges, strict=True)}

    @property
    def dates(self) -> list[str]:
        """Names of the columns that hold dates."""
        return [column.name for column in self.columns if column.kind == "date"]

    def encode(self, table: DataTable) -> NDArray[np.float64]:
        """Return the matrix `[N features]`; columns are matched by name, and others ignored."""
        self.require_columns(table)
        impute = self.missing == "impute"
        return np.hstack([column.encode(table, impute=impute) for column in self.columns])

    def require_columns(self, table: DataTable) -> None:
        """Raise an error that names the columns of the training table that a table lacks."""
        absent = [c.name for c in self.columns if c.name not in table.values]
        if absent:
            lacks, has = (
                ", ".join(repr(name) for name in names[:12]) for names in (absent, table.names)
            )
            raise InputError(
                f"the table lacks columns that the model was fitted with: {lacks}; it has {has}. "
                "Add them, or rename columns as in the training table."
            )

    def unseen(self, table: DataTable) -> dict[str, list[str]]:
        """Return the categories of each column that were not in the training table."""
        unseen: dict[str, list[str]] = {}
        for column in self.columns:
            if column.kind == "category":
                strings = table.strings(column.name, literal=column.literal)
                new = set(strings) - set(column.categories) - {None}
                if new:
                    unseen[column.name] = sorted(new)
        return unseen

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary that can be written as JSON."""
        target = {} if self.target == Notation() else {"target": self.target.to_dict()}
        columns = [column.to_dict() for column in self.columns]
        return {"columns": columns, "missing": self.missing, **target}

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
        target = Notation.from_dict(values["target"]) if "target" in values else Notation()
        return cls(columns, values["missing"], target)


@dataclass(frozen=True, slots=True)
class ColumnEncoding:
    """The encoding of one column: a number, a date in days, or one-hot categories."""

    name: str
    kind: str
    """"number", "date", or "category" for a column of strings."""
    typical: float | str
    """The median, which replaces missing numbers, or the most frequent category."""
    flagged: bool = False
    """Whether an indicator column marks missing numbers."""
    categories: tuple[str, ...] = ()
    """Categories, the most frequent first."""
    notation: Notation = Notation()
    """How strings write numbers or dates."""
    literal: bool = False
    """Whether only empty strings are missing categories, so that NA is a category."""

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the columns of the matrix that this column becomes."""
        if self.kind == "category":
            return tuple(f"{self.name}={category}" for category in self.categories)
        return (self.name, f"{self.name} missing") if self.flagged else (self.name,)

    def encode(self, table: DataTable, *, impute: bool) -> NDArray[np.float64]:
        """Return `[N features]`; a missing or unknown category is a row of zeros."""
        if self.kind == "category":
            strings = table.strings(self.name, literal=self.literal)
            self._check_missing(table, np.array([s is None for s in strings]), impute=impute)
            index = {category: i for i, category in enumerate(self.categories)}
            indices = np.array([index.get(string, -1) for string in strings])
            return (indices[:, None] == np.arange(len(self.categories))).astype(np.float64)
        values = self.values(table)
        check_finite(table, self.name, values)
        missing = np.isnan(values)
        self._check_missing(table, missing, impute=impute)
        filled = np.where(missing, self.typical, values).astype(np.float64)
        return np.stack([filled, missing.astype(np.float64)] if self.flagged else [filled], axis=1)

    def values(self, table: DataTable) -> NDArray[np.float64]:
        """Return numbers, or dates as days; NaN where missing."""
        if self.kind == "number" and table.values[self.name].dtype != object:
            return table.values[self.name]
        strings = table.strings(self.name)
        values = self.notation.values(strings, self.kind)
        if values is not None:
            return values
        row, string = next(
            (row, string)
            for row, string in enumerate(strings)
            if string is not None and not self.notation.accepts(string, self.kind)
        )
        how = f" ({self.notation})" if str(self.notation) else ""
        raise InputError(
            f"column {self.name!r} must have {self.kind}s, as in the training table{how}; "
            f"got {string[:40]!r} in {table.describe_row(row)}. Correct that row, or leave it out."
        )

    def _check_missing(self, table: DataTable, missing: NDArray[np.bool_], *, impute: bool) -> None:
        if impute or not missing.any():
            return
        # The rest of a file that is read in blocks may have more of them.
        values = "missing values, the first"
        if table.origin is None:
            count = int(missing.sum())
            values = "a missing value" if count == 1 else f"{count} {values}"
        first = int(missing.argmax())
        string = table.values[self.name][first] if self.kind == "category" else None
        category = (
            f" If {string!r} is a category, use `categorical` (`--categorical {self.name!r}`)."
            if isinstance(string, str)
            else ""
        )
        raise InputError(
            f"column {self.name!r} has {values} in {table.describe_row(first)}; fill in what is "
            f"missing, or fit with missing='impute' (`--missing impute`).{category}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary that can be written as JSON."""
        return {
            "name": self.name,
            "kind": self.kind,
            "typical": self.typical,
            "flagged": self.flagged,
            "categories": list(self.categories),
            **({} if self.notation == Notation() else {"notation": self.notation.to_dict()}),
            **({"literal": True} if self.literal else {}),
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
        column = cls(**fields, categories=tuple(values["categories"]))
        if "notation" in values:
            column = replace(column, notation=Notation.from_dict(values["notation"]))
        return replace(column, literal="literal" in values)


def _is_encoding(values: dict[Any, Any]) -> bool:
    """Return whether `ColumnEncoding.to_dict` might have returned these values."""
    if values.keys() - _OPTIONAL != _FIELDS or values.get("literal", True) is not True:
        return False
    categories, typical = values["categories"], values["typical"]
    if not isinstance(values["name"], str) or not isinstance(categories, list):
        return False
    if values["kind"] == "category":
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


def _learnt_encoding(
    table: DataTable, name: str, kind: ColumnKind, *, max_categories: int
) -> ColumnEncoding:
    column = ColumnEncoding(name, kind.kind, 0.0, notation=kind.notation, literal=kind.literal)
    if kind.kind != "category":
        values = column.values(table)
        check_finite(table, name, values)
        missing = np.isnan(values)
        if missing.all():
            raise _empty_column(name)
        typical = float(np.median(values[~missing]))
        return replace(column, typical=typical, flagged=bool(missing.any()))
    strings = table.strings(name, literal=kind.literal)
    counts = Counter(string for string in strings if string is not None)
    if not counts:
        raise _empty_column(name)
    if len(counts) > max_categories:
        raise _TooManyCategoriesError(
            f"column {name!r} has {len(counts)} different strings, such as "
            f"{next(iter(counts))[:40]!r}, and {max_categories} are allowed; leave it out with "
            f"`drop` (`--drop {name!r}`), use it as `id_column` (`--id {name!r}`), or increase "
            "`max_categories` (`--max-categories`).",
            name,
        )
    categories = tuple(string for string, _ in counts.most_common())
    return replace(column, typical=categories[0], categories=categories)


def _empty_column(name: str) -> InputError:
    return InputError(f"column {name!r} is empty; leave it out with `drop` (`--drop {name!r}`).")
