"""From a table with words and holes to a matrix, and the same way for every later table."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from winnowgp.data.column_encoding import ColumnEncoding, TooManyWordsError, learnt_encoding
from winnowgp.data.columns import Columns
from winnowgp.errors import InputError, ModelFileError

MISSING = ("error", "impute")


@dataclass(frozen=True, slots=True)
class TableEncoder:
    """One encoding a column, learnt once.

    Numbers stay what they are. Dates in ISO form become days since 1970. Words become one column of
    zeros and ones for each category; a word never seen before is a row of zeros. What is missing is
    an error, or imputed: a number by the training median, with a further column that says where if
    the training table had holes in that column; a word by a row of zeros.

    >>> table = Columns.of({"size": ["1", "2", "4"], "colour": ["red", "blue", "red"]})
    >>> encoder = TableEncoder.learn(table)
    >>> encoder.features
    ('size', 'colour=red', 'colour=blue')
    >>> encoder.encode(Columns.of({"size": ["3"], "colour": ["green"]})).tolist()
    [[3.0, 0.0, 0.0]]
    """

    columns: tuple[ColumnEncoding, ...]
    missing: str = "error"

    @classmethod
    def learn(
        cls, table: Columns, *, missing: str = "error", max_words: int = 30
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

    def encode(self, table: Columns) -> NDArray[np.float64]:
        """The matrix `[N features]`; columns are found by name, others ignored."""
        self.check_has_columns(table)
        impute = self.missing == "impute"
        return np.hstack([column.encode(table, impute=impute) for column in self.columns])

    def check_has_columns(self, table: Columns) -> None:
        """An error that names the columns which a table lacks, if it does."""
        absent = [c.name for c in self.columns if c.name not in table.values]
        if absent:
            shown = ", ".join(repr(name) for name in absent[:12])
            raise InputError(f"the table lacks columns that the model was fitted with: {shown}.")

    def unseen(self, table: Columns) -> dict[str, list[str]]:
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
