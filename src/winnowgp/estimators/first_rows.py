"""The first rows of a stream, which are kept until a model of them can be trusted.

What inducing points remember of rows is as good as the hyper-parameters at the time. Those of some
ten rows are hardly known, and a constant has no inducing points at all: its memory does not say
where the rows were. So `partial_fit` keeps the first `FIRST_ROWS` rows, and as long as a constant
explains all rows, the latest `CONSTANT_ROWS`. Later batches are learnt together with them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch

from winnowgp.data import Dataset

FIRST_ROWS = 256
"""Number of rows up to which all of them are kept."""

CONSTANT_ROWS = 2048
"""Largest number of rows that are kept while a constant explains all of them."""

# Share of the observations that must have arrived since the last search for a function.
_SHARE = 1 / 3


@final
@dataclass(frozen=True, slots=True)
class FirstRows:
    """Rows of a stream that are kept, standardised.

    Attributes:
        rows: the rows, in the order of arrival.
        waiting: number of observations that have arrived since a function was last searched for.
    """

    rows: Dataset
    waiting: float

    def to(self, device: torch.device) -> "FirstRows":
        """Return the rows on another device."""
        return replace(self, rows=self.rows.to(device))

    def forget(self, factor: float) -> "FirstRows":
        """Return rows whose weights are multiplied by a factor, as in `Memory.forget`."""
        if factor == 1:
            return self
        return replace(self, rows=replace(self.rows, weights=factor * _weights(self.rows)))

    @classmethod
    def of(cls, batches: Sequence[Dataset], waiting: float = 0.0) -> "FirstRows":
        """Return the rows of several batches."""
        if any(part.weights is not None for part in batches):
            batches = [replace(part, weights=_weights(part)) for part in batches]
        return cls(Dataset.joined(batches), waiting)

    def plus(self, batch: Dataset) -> "FirstRows":
        """Return the rows with those of another batch."""
        return FirstRows.of([self.rows, batch], self.waiting + batch.observations)

    def is_search_due(self, N: float) -> bool:
        """Return whether enough of N observations are new to search for a function again."""
        return self.waiting >= _SHARE * N

    def kept(self, N: float, *, constant: bool) -> "FirstRows | None":
        """Return the rows that are kept after a batch.

        Args:
            N: number of observations that are remembered.
            constant: whether a constant explains all of them; otherwise all rows are kept, or none.
        """
        if not constant:
            complete = self.rows.observations >= (1 - 1e-9) * N
            return self if complete and self.rows.N <= FIRST_ROWS else None
        if self.rows.N <= CONSTANT_ROWS:
            return self
        latest = torch.arange(self.rows.N - CONSTANT_ROWS, self.rows.N)
        return replace(self, rows=self.rows.part(latest))


def _weights(rows: Dataset) -> torch.Tensor:
    return torch.ones_like(rows.X[:, 0]) if rows.weights is None else rows.weights
