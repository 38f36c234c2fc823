"""Data in memory: pairs of inputs and targets, and matrices with missing entries."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from winnowgp.data.sources import RowBatches, Source, SourceInfo, checked_size, shard_range
from winnowgp.errors import InputError


@dataclass(frozen=True, slots=True)
class Dataset(Source):
    """N rows of D inputs and P targets in memory, with optional weights.

    A row of weight w counts as w rows: its log-likelihood is multiplied by w.

    >>> Dataset.of(torch.zeros(3, 2), torch.zeros(3)).P
    1
    >>> Dataset.of(torch.zeros(2, 1), torch.zeros(2), weights=torch.tensor([2.0, 0.5])).observations
    2.5
    """

    X: Float[Tensor, "N D"]
    Y: Float[Tensor, "N P"]
    weights: Float[Tensor, " N"] | None = None
    """Weights of the rows; None if every row has weight one."""

    @classmethod
    def of(cls, X: Tensor, y: Tensor, *, weights: Tensor | None = None) -> "Dataset":
        """Check inputs and targets and return them as a data set.

        Args:
            X: inputs `[N D]`, finite.
            y: targets `[N]` or `[N P]`, finite and of the dtype of `X`.
            weights: positive weights of the rows, `[N]`; leave out rows of weight zero.

        Raises:
            InputError: shapes or dtypes do not match, there are no rows, or a value is not finite.
        """
        if X.dim() != 2 or y.dim() not in (1, 2):
            raise InputError(
                "`X` must be [N D] and `y` [N] or [N P]; "
                f"got shapes {list(X.shape)} and {list(y.shape)}."
            )
        if X.shape[0] != y.shape[0]:
            raise InputError(
                f"`X` and `y` must have equally many rows; `X` has {X.shape[0]} rows and `y` has "
                f"{y.shape[0]}."
            )
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

    @classmethod
    def joined(cls, parts: "Sequence[Dataset]") -> "Dataset":
        """Return the rows of several data sets, one after another."""
        if len(parts) == 1:
            return parts[0]
        weights = [part.weights for part in parts if part.weights is not None]
        return cls(
            torch.cat([part.X for part in parts]),
            torch.cat([part.Y for part in parts]),
            torch.cat(weights) if weights else None,
        )

    @property
    def info(self) -> SourceInfo:
        return SourceInfo(self.X.shape[0], self.X.shape[1], self.Y.shape[1], self.X.dtype)

    @property
    def device(self) -> torch.device:
        return self.X.device

    @property
    def observations(self) -> int | float:
        return self.N if self.weights is None else float(self.weights.sum())

    def chunks(self, size: int) -> "Iterator[Dataset]":
        """Yield all rows in order, `size` at a time, as views."""
        for start in range(0, self.N, checked_size(size)):
            yield self.part(slice(start, start + size))

    def part(self, rows: slice | Int[Tensor, " B"]) -> "Dataset":
        """Return some of the rows, with their weights."""
        weights = None if self.weights is None else self.weights[rows]
        return Dataset(self.X[rows], self.Y[rows], weights)

    def shard(self, index: int, count: int) -> "Dataset":
        """Return one of `count` contiguous shards of nearly equal length, as a view."""
        rows = shard_range(self.N, index, count)
        return self.part(slice(rows.start, rows.stop))

    def to(self, device: torch.device) -> "Dataset":
        """Return the rows on another device."""
        weights = None if self.weights is None else self.weights.to(device)
        return Dataset(self.X.to(device), self.Y.to(device), weights)

    def as_dataset(self) -> "Dataset":
        return self

    def weighted(self, nats: Float[Tensor, "*S N P"]) -> Float[Tensor, "*S N P"]:
        """Multiply the terms of a sum over observations by the weights of their rows."""
        return nats if self.weights is None else self.weights[:, None] * nats

    def merged(self) -> "Dataset":
        """Return the same observations with equal rows merged into one of their total weight.

        Every bound stays the same and is cheaper to compute. If weights differ, the rows are sorted
        by value, so that a row of weight three and three equal rows become the same data set. If
        all weights are one, the rows stay as they are. O(N log N).
        """
        if self.weights is None and not _may_repeat(self.X, self.Y):
            return self
        rows, inverse = torch.unique(torch.cat([self.X, self.Y], 1), dim=0, return_inverse=True)
        ones = torch.ones_like(self.X[:, 0])
        weights = ones.new_zeros(len(rows)).index_add_(
            0, inverse, ones if self.weights is None else self.weights
        )
        unweighted = bool((weights == 1).all())
        if unweighted and len(rows) == self.N:
            return Dataset(self.X, self.Y)
        X, Y = rows[:, : self.D].contiguous(), rows[:, self.D :].contiguous()
        return Dataset(X, Y, None if unweighted else weights)


def _check_weights(weights: Tensor, X: Tensor) -> None:
    if weights.shape != X.shape[:1] or weights.dtype != X.dtype:
        raise InputError(
            f"`weights` must be one {X.dtype} number per row, [{X.shape[0]}]; got {weights.dtype} "
            f"of shape {list(weights.shape)}."
        )
    if not bool((torch.isfinite(weights) & (weights > 0)).all()):
        raise InputError("`weights` must be positive and finite; leave out rows of weight zero.")


def _may_repeat(X: Float[Tensor, "N D"], Y: Float[Tensor, "N P"]) -> bool:
    """Return False if no two rows are equal, because their weighted sums all differ.

    Sorting one number per row is ten times faster than sorting rows, and few tables have repeated
    rows.
    """
    total = torch.zeros_like(X[:, 0])
    for index, column in enumerate([*X.unbind(1), *Y.unbind(1)]):
        # Added column by column, so that equal rows are rounded alike.
        total += column * (1 + (index * 0.6180339887498949) % 1)
    ordered = total.sort().values
    return bool((ordered[1:] == ordered[:-1]).any())


@dataclass(frozen=True, slots=True)
class MaskedMatrix:
    """A matrix of N rows and P columns with missing entries, which are NaN.

    >>> matrix = MaskedMatrix.of(torch.tensor([[1.0, 2.0], [float("nan"), 3.0]]))
    >>> matrix.count, matrix.filled()[1, 0].item()
    (3, 0.0)
    """

    Y: Float[Tensor, "N P"]
    observed: Bool[Tensor, "N P"]

    @classmethod
    def of(cls, Y: Tensor) -> "MaskedMatrix":
        """Check a matrix `[N P]` and find its missing entries.

        Args:
            Y: floating-point numbers, NaN where an entry is missing; at least one is observed.
        """
        if Y.dim() != 2 or not Y.dtype.is_floating_point:
            raise InputError(
                f"`Y` must be floating-point numbers [N P]; got {Y.dtype} of shape {list(Y.shape)}."
            )
        if bool(torch.isinf(Y).any()):
            raise InputError(
                f"`Y` must be finite or NaN; got {int(torch.isinf(Y).sum())} infinite entries. Use "
                "NaN for missing entries, and correct the others."
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
        """Number of observed entries."""
        return int(self.observed.sum())

    @property
    def complete(self) -> bool:
        """Whether no entry is missing."""
        return bool(self.observed.all())

    def filled(self, value: float = 0.0) -> Float[Tensor, "N P"]:
        """Return the matrix with missing entries replaced by `value`."""
        return torch.where(self.observed, self.Y, value)

    def patterns(self) -> tuple[Bool[Tensor, "G N"], Int[Tensor, " P"]]:
        """Return the G distinct patterns of observed rows, and the index of each column's."""
        if self.complete:
            zero = torch.zeros(self.P, dtype=torch.long, device=self.Y.device)
            return self.observed[:, :1].mT, zero
        return torch.unique(self.observed.mT, dim=0, return_inverse=True)

    def rows(self, index: Int[Tensor, " B"]) -> "MaskedMatrix":
        """Return some of the rows."""
        return MaskedMatrix(self.Y[index], self.observed[index])

    def batches(self, size: int, *, generator: torch.Generator) -> RowBatches:
        """Return an endless iterator over minibatches of row indices (see `RowBatches`)."""
        return RowBatches(self.N, size, generator=generator, device=self.Y.device)
