"""Data sets in memory, with and without missing entries."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from winnowgp.data.sources import RowBatches, Source, checked_size, share_range
from winnowgp.errors import InputError

# Inputs and targets as tensors, checked.


@dataclass(frozen=True, slots=True)
class Dataset(Source):
    """N rows of D inputs and P targets, each of which may count as more or less than one.

    A row of weight w counts as w rows: its log-likelihood is multiplied by w.

    >>> Dataset.of(torch.zeros(3, 2), torch.zeros(3)).P
    1
    >>> Dataset.of(torch.zeros(2, 1), torch.zeros(2), weights=torch.tensor([2.0, 0.5])).observations
    2.5
    """

    X: Float[Tensor, "N D"]
    Y: Float[Tensor, "N P"]
    weights: Float[Tensor, " N"] | None = None
    """None where every row counts once."""

    @classmethod
    def of(cls, X: Tensor, y: Tensor, *, weights: Tensor | None = None) -> "Dataset":
        """Check and pair inputs `[N D]` with targets `[N]` or `[N P]`; one dtype, all finite.

        Args:
            weights: of the rows, `[N]`, positive; leave out rows that are not to count.
        """
        if X.dim() != 2 or y.dim() not in (1, 2):
            raise InputError(
                "`X` must be [N D] and `y` [N] or [N P]; "
                f"got shapes {list(X.shape)} and {list(y.shape)}."
            )
        if X.shape[0] != y.shape[0]:
            raise InputError(f"`X` has {X.shape[0]} rows and `y` has {y.shape[0]}; pair them.")
        if X.shape[0] == 0:
            raise InputError("`X` has no rows; a fit needs at least one.")
        if not (X.dtype.is_floating_point and y.dtype == X.dtype):
            raise InputError(f"`X` and `y` must share a float dtype; got {X.dtype} and {y.dtype}.")
        for name, values in (("X", X), ("y", y)):
            bad = int((~torch.isfinite(values)).sum())
            if bad:
                raise InputError(
                    f"`{name}` has {bad} entries that are NaN or infinite; drop or impute those "
                    "rows."
                )
        if weights is not None:
            _check_weights(weights, X)
        return cls(X, y if y.dim() == 2 else y[:, None], weights)

    @property
    def N(self) -> int:
        """Number of rows."""
        return self.X.shape[0]

    @property
    def D(self) -> int:
        """Number of input columns."""
        return self.X.shape[1]

    @property
    def P(self) -> int:
        """Number of target columns."""
        return self.Y.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Of inputs and targets."""
        return self.X.dtype

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.X.device

    @property
    def observations(self) -> int | float:
        """How many observations the rows stand for: Σ w_i, or N without weights."""
        return self.N if self.weights is None else float(self.weights.sum())

    def part(self, rows: slice | Int[Tensor, " B"]) -> "Dataset":
        """Some of the rows, with their weights."""
        weights = None if self.weights is None else self.weights[rows]
        return Dataset(self.X[rows], self.Y[rows], weights)

    def chunks(self, size: int) -> "Iterator[Dataset]":
        """All rows in order, `size` at a time and what is left at the end; no copies."""
        for start in range(0, self.N, checked_size(size)):
            yield self.part(slice(start, start + size))

    def held(self) -> "Dataset":
        """These."""
        return self

    def share(self, rank: int, of: int) -> "Dataset":
        """The rows of one of several processes; no copy."""
        rows = share_range(self.N, rank, of)
        return self.part(slice(rows.start, rows.stop))

    def to(self, device: torch.device) -> "Dataset":
        """The same on another device."""
        weights = None if self.weights is None else self.weights.to(device)
        return Dataset(self.X.to(device), self.Y.to(device), weights)

    def weighted(self, nats: Float[Tensor, "*S N P"]) -> Float[Tensor, "*S N P"]:
        """What each row contributes to a sum over observations."""
        return nats if self.weights is None else self.weights[:, None] * nats

    def merged(self) -> "Dataset":
        """The same observations in as few rows as possible: equal rows are one of their weight.

        Every bound is the same and cheaper. Rows that differ in weight are put in an order that
        depends on their values alone, so that a row of weight three and three equal rows become the
        very same data. Rows that all count once stay as they are. O(N log N).
        """
        if self.weights is None and not _may_repeat(self.X, self.Y):
            return self
        rows, place = torch.unique(torch.cat([self.X, self.Y], 1), dim=0, return_inverse=True)
        ones = torch.ones_like(self.X[:, 0])
        weights = ones.new_zeros(len(rows)).index_add_(
            0, place, ones if self.weights is None else self.weights
        )
        once = bool((weights == 1).all())
        if once and len(rows) == self.N:
            return Dataset(self.X, self.Y)
        X, Y = rows[:, : self.D].contiguous(), rows[:, self.D :].contiguous()
        return Dataset(X, Y, None if once else weights)


def _check_weights(weights: Tensor, X: Tensor) -> None:
    if weights.shape != X.shape[:1] or weights.dtype != X.dtype:
        raise InputError(
            f"`weights` must be one {X.dtype} number a row, [{X.shape[0]}]; got {weights.dtype} "
            f"of shape {list(weights.shape)}."
        )
    if not bool((torch.isfinite(weights) & (weights > 0)).all()):
        raise InputError("`weights` must be positive and finite; leave out rows of weight zero.")


def _may_repeat(X: Float[Tensor, "N D"], Y: Float[Tensor, "N P"]) -> bool:
    """Whether some row may equal another: no if all have different sums with odd coefficients.

    Sorting numbers is ten times quicker than sorting rows, and few tables repeat themselves.
    """
    total = torch.zeros_like(X[:, 0])
    for place, column in enumerate([*X.unbind(1), *Y.unbind(1)]):
        # Entry by entry, so that equal rows are rounded alike.
        total += column * (1 + (place * 0.6180339887498949) % 1)
    ordered = total.sort().values
    return bool((ordered[1:] == ordered[:-1]).any())


# A table of which some entries may be missing.


@dataclass(frozen=True, slots=True)
class MaskedMatrix:
    """N rows of P columns, NaN where an entry is missing.

    >>> entries = MaskedMatrix.of(torch.tensor([[1.0, 2.0], [float("nan"), 3.0]]))
    >>> entries.count, entries.filled()[1, 0].item()
    (3, 0.0)
    """

    Y: Float[Tensor, "N P"]
    observed: Bool[Tensor, "N P"]

    @classmethod
    def of(cls, Y: Tensor) -> "MaskedMatrix":
        """Check a table `[N P]`: floating-point, no infinity, something observed."""
        if Y.dim() != 2 or not Y.dtype.is_floating_point:
            raise InputError(
                f"`Y` must be floating-point numbers [N P]; got {Y.dtype} of shape {list(Y.shape)}."
            )
        if bool(torch.isinf(Y).any()):
            raise InputError(
                f"`Y` has {int(torch.isinf(Y).sum())} infinite entries; use NaN for what is "
                "missing, and mend the others."
            )
        observed = ~torch.isnan(Y)
        if not bool(observed.any()):
            raise InputError(
                f"`Y` must have at least one entry that is observed; got shape {list(Y.shape)}."
            )
        return cls(Y, observed)

    @property
    def N(self) -> int:
        """Number of rows."""
        return self.Y.shape[0]

    @property
    def P(self) -> int:
        """Number of columns."""
        return self.Y.shape[1]

    @property
    def count(self) -> int:
        """Number of entries observed."""
        return int(self.observed.sum())

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return bool(self.observed.all())

    def filled(self, value: float = 0.0) -> Float[Tensor, "N P"]:
        """The table with missing entries replaced."""
        return torch.where(self.observed, self.Y, value)

    def patterns(self) -> tuple[Bool[Tensor, "G N"], Int[Tensor, " P"]]:
        """The distinct sets of rows that columns are observed in, and which one each column has."""
        if self.complete:
            zero = torch.zeros(self.P, dtype=torch.long, device=self.Y.device)
            return self.observed[:, :1].mT, zero
        return torch.unique(self.observed.mT, dim=0, return_inverse=True)

    def rows(self, index: Int[Tensor, " B"]) -> "MaskedMatrix":
        """Some of the rows."""
        return MaskedMatrix(self.Y[index], self.observed[index])

    def batches(self, size: int, *, generator: torch.Generator) -> RowBatches:
        """Numbers of `size` random rows without end, in an order drawn anew once it is used up."""
        return RowBatches(self.N, size, generator=generator, device=self.Y.device)
