"""Rows to predict that are unlike the training rows, whose predictions rest on the kernel alone."""

from collections.abc import Mapping
from typing import final

import numpy as np
from numpy.typing import NDArray

from winnowgp.data import DataTable, TableEncoder
from winnowgp.errors import ExtrapolationWarning
from winnowgp.estimators.effects import column_features
from winnowgp.report.summary import counted

# Unseen categories that are remembered per column, however large the table is.
_MOST_UNSEEN = 1000


@final
class Extrapolation:
    """Counts the rows to predict that are unlike the training rows, block by block.

    A row is far outside if a number or a date is beyond the training rows by more than half of
    their range. A category is unseen if no training row has it.

    Args:
        encoder: encoder of the training table.
        ranges: least and largest entry of each column of numbers or dates in the training rows.
    """

    def __init__(self, encoder: TableEncoder, ranges: Mapping[str, tuple[float, float]]) -> None:
        self._encoder, self._ranges = encoder, ranges
        self._dates = {column.name for column in encoder.columns if column.kind == "date"}
        self._rows = 0
        self._far: dict[str, tuple[int, int, float]] = {}
        self._unseen: dict[str, set[str]] = {}

    def add(self, table: DataTable, X: NDArray[np.float64]) -> None:
        """Look at the next rows.

        Args:
            X: the encoded rows.
        """
        for column, features in zip(
            self._encoder.columns, column_features(self._encoder), strict=True
        ):
            if column.name in self._ranges:
                self._add_numbers(column.name, X[:, features[0]])
        for name, categories in self._encoder.unseen(table).items():
            known = self._unseen.setdefault(name, set())
            known.update(sorted(set(categories) - known)[: _MOST_UNSEEN - len(known)])
        self._rows += table.N

    def _add_numbers(self, name: str, values: NDArray[np.float64]) -> None:
        low, high = self._ranges[name]
        far = np.maximum(low - values, values - high) > 0.5 * (high - low)
        if not far.any():
            return
        count, row, value = self._far.get(name, (0, -1, 0.0))
        if row < 0:
            row = int(far.argmax())
            row, value = self._rows + row, float(values[row])
        self._far[name] = (count + int(far.sum()), row, value)

    def warnings(self) -> list[ExtrapolationWarning]:
        """Return a warning of far rows, which names their column, and one per unseen column."""
        far = [] if not self._far else [self._far_warning()]
        return far + [self._unseen_warning(*item) for item in self._unseen.items()]

    def _far_warning(self) -> ExtrapolationWarning:
        name, (count, row, value) = max(self._far.items(), key=lambda item: item[1][0])
        given, least, most = (self._text(name, each) for each in (value, *self._ranges[name]))
        others = (
            f" (and {counted(len(self._far) - 1, 'other column')})" if len(self._far) > 1 else ""
        )
        return ExtrapolationWarning(
            f"{count} of {counted(self._rows, 'row')} lie far outside the training rows: column "
            f"{name!r} is {given} in row {row + 1}, and was {least} to {most} in training{others}. "
            "Predictions there rest on the kernel alone; fit again with such rows."
        )

    def _unseen_warning(self, name: str, categories: set[str]) -> ExtrapolationWarning:
        examples = ", ".join(repr(category[:30]) for category in sorted(categories)[:5])
        more = "or more " if len(categories) == _MOST_UNSEEN else ""
        values, that = ("value", "was") if len(categories) == 1 else ("values", "were")
        return ExtrapolationWarning(
            f"column {name!r} has {len(categories)} {more}{values} that {that} not in the training "
            f"rows ({examples}). Such rows are predicted as if the column were empty, and their "
            "intervals may be too narrow; fit again with such rows."
        )

    def _text(self, name: str, value: float) -> str:
        if name in self._dates:
            return str(np.array(value).astype("datetime64[D]"))
        return f"{value:.6g}"
