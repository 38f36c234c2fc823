"""Rows of inputs and targets: the interface of sources, and data in memory."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, nan

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from winnowgp.data.distributed import SINGLE_PROCESS, ProcessGroup
from winnowgp.data.row_indices import RowBatches, shard_range
from winnowgp.errors import InputError


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """The dimensions of a source, the dtype of its tensors and the names of its inputs."""

    N: int
    D: int
    P: int
    dtype: torch.dtype
    names: tuple[str, ...] | None = None


class Source(ABC):
    """N rows of D inputs and P targets that need not be in memory all at once.

    `Dataset` holds its rows in memory. `ArraySource` (NumPy arrays and memory maps),
    `ParquetSource` (files and folders) and `BatchSource` (any iterator that can be restarted) read
    them in chunks. `standardise` scales the columns of a source; `shard` divides its rows among
    processes.

    The order of the rows is fixed, and they can be read any number of times. Values are converted
    to tensors of one dtype and checked when they are read; an error gives the position of a value
    that is not finite.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def info(self) -> SourceInfo:
        """Number of rows and columns, dtype and names."""

    @property
    def N(self) -> int:
        """Number of rows."""
        return self.info.N

    @property
    def D(self) -> int:
        """Number of input columns."""
        return self.info.D

    @property
    def P(self) -> int:
        """Number of target columns."""
        return self.info.P

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensors that rows are converted to."""
        return self.info.dtype

    @property
    def names(self) -> tuple[str, ...] | None:
        """Names of the input columns, or None if they have no names."""
        return self.info.names

    @property
    def device(self) -> torch.device:
        """Device of the tensors that are read."""
        return torch.device("cpu")

    @property
    def observations(self) -> int | float:
        """Number of observations that the rows count as: N, or the sum of the weights."""
        return self.N

    @property
    def has_noise(self) -> bool:
        """Whether the rows have noise of known variance."""
        return False

    @property
    def process_group(self) -> ProcessGroup:
        """Processes that the rows are sharded over; one, unless the source comes from `shard`."""
        return SINGLE_PROCESS

    @abstractmethod
    def chunks(self, size: int) -> "Iterator[Dataset]":
        """Yield all rows in order, `size` at a time; the last chunk may be shorter."""

    @abstractmethod
    def part(self, rows: Int[Tensor, " B"]) -> "Dataset":
        """Return the rows with these indices, in this order, in at most one pass."""

    @abstractmethod
    def shard(self, index: int, count: int) -> "Source":
        """Return one of `count` contiguous shards of nearly equal length.

        Args:
            index: number of the shard, from 0.
            count: number of shards; together they hold all rows.
        """

    def shards(self) -> "Sequence[Source]":
        """Return the shards that this process sums separately, before their sums are added.

        A sharded source has eight, divided among its processes. Sums over rows then have the same
        digits whether one, two, four or eight processes compute them.
        """
        return (self,)

    def shard_chunks(self, size: int) -> "Iterator[Iterator[Dataset]]":
        """Yield an iterator over the chunks of each shard; read them one after another."""
        return (shard.chunks(size) for shard in self.shards())

    def to(self, device: torch.device) -> "Source":
        """Move rows in memory to a device; rows that are read in chunks stay where they are."""
        return self

    def as_dataset(self) -> "Dataset | None":
        """Return all rows if this process has them in memory, else None."""
        return None

    def require_dataset(self, user: str) -> "Dataset":
        """Return all rows, for an algorithm that needs them at once.

        Args:
            user: name of the algorithm, for the error message.

        Raises:
            InputError: this process does not have the rows in memory.
        """
        dataset = self.as_dataset()
        if dataset is None:
            raise InputError(
                f"{user} needs all {self.N} rows in memory at once; read them with "
                "`next(source.chunks(source.N))`, and shard them after that, if at all. Regression "
                "with Gaussian noise and the fast schedule reads some rows at a time."
            )
        return dataset

    def with_rows(self, rows: "Dataset") -> "Source":
        """Return other rows, sharded over the same processes as this source."""
        return rows


@dataclass(frozen=True, slots=True)
class Dataset(Source):
    """N rows of D inputs and P targets in memory, with optional weights and known noise.

    A row of weight w counts as w rows: its log-likelihood is multiplied by w. A target that is NaN
    was not observed.

    >>> Dataset.of(torch.zeros(3, 2), torch.zeros(3)).P
    1
    >>> Dataset.of(torch.zeros(2, 1), torch.zeros(2), weights=torch.tensor([2.0, 0.5])).observations
    2.5
    """

    X: Float[Tensor, "N D"]
    Y: Float[Tensor, "N P"]
    weights: Float[Tensor, " N"] | None = None
    """Weights of the rows; None if every row has weight one."""
    noise: Float[Tensor, "N P"] | None = None
    """Known noise variances of the targets, in addition to the noise that a model learns."""

    @classmethod
    def of(
        cls,
        X: Tensor,
        y: Tensor,
        *,
        weights: Tensor | None = None,
        noise: Tensor | None = None,
        missing: bool = False,
    ) -> "Dataset":
        """Check inputs and targets and return them as a data set.

        Args:
            X: inputs `[N D]`, finite.
            y: targets `[N]` or `[N P]`, finite and of the dtype of `X`.
            weights: positive weights of the rows, `[N]`; leave out rows of weight zero.
            noise: known noise variances of the targets, of the shape of `y`, at least zero.
            missing: whether targets may be NaN in some rows, which then have another target.

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
        Y = y if y.dim() == 2 else y[:, None]
        absent = torch.isnan(Y) if missing else torch.zeros_like(Y, dtype=torch.bool)
        if bool(absent.all(1).any()):
            count = int(absent.all(1).sum())
            raise InputError(f"`y` has {count} rows without any target; drop those rows.")
        for name, values in (("X", X), ("y", Y[~absent])):
            bad = int((~torch.isfinite(values)).sum())
            if bad:
                raise InputError(
                    f"`{name}` has {bad} entries that are NaN or infinite; drop or impute those "
                    "rows."
                )
        if weights is not None:
            _check_weights(weights, X)
        if noise is not None:
            noise = _checked_noise(noise if noise.dim() == 2 else noise[:, None], Y)
        return cls(X, Y, weights, noise)

    @classmethod
    def joined(cls, parts: "Sequence[Dataset]") -> "Dataset":
        """Return the rows of several data sets, one after another."""
        if len(parts) == 1:
            return parts[0]
        for name in ("weights", "noise"):
            if len({getattr(part, name) is None for part in parts}) > 1:
                raise InputError(
                    f"`{name}` must be given for all parts, or for none; some have it."
                )
        weights = [part.weights for part in parts if part.weights is not None]
        noise = [part.noise for part in parts if part.noise is not None]
        return cls(
            torch.cat([part.X for part in parts]),
            torch.cat([part.Y for part in parts]),
            torch.cat(weights) if weights else None,
            torch.cat(noise) if noise else None,
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

    @property
    def counts(self) -> Float[Tensor, " N"]:
        """Number of observations that each row counts as: its weight, or one."""
        return torch.ones_like(self.X[:, 0]) if self.weights is None else self.weights

    @property
    def has_noise(self) -> bool:
        return self.noise is not None

    @property
    def complete(self) -> bool:
        """Whether no target is missing."""
        return not bool(torch.isnan(self.Y).any())

    def require_plain_targets(self, user: str) -> None:
        """Raise an error if targets are missing or have known noise, which few models accept."""
        if self.has_noise or not self.complete:
            raise InputError(
                f"{user} needs rows with all targets and without known noise; use `SparseGP`, "
                "whose noise is Gaussian, or leave such rows and the noise out."
            )

    def chunks(self, size: int) -> "Iterator[Dataset]":
        """Yield all rows in order, `size` at a time, as views."""
        for start in range(0, self.N, checked_size(size)):
            yield self.part(slice(start, start + size))

    def part(self, rows: slice | Int[Tensor, " B"]) -> "Dataset":
        """Return some of the rows, with their weights and their noise."""
        weights = None if self.weights is None else self.weights[rows]
        noise = None if self.noise is None else self.noise[rows]
        return Dataset(self.X[rows], self.Y[rows], weights, noise)

    def shard(self, index: int, count: int) -> "Dataset":
        """Return one of `count` contiguous shards of nearly equal length, as a view."""
        rows = shard_range(self.N, index, count)
        return self.part(slice(rows.start, rows.stop))

    def to(self, device: torch.device) -> "Dataset":
        """Return the rows on another device."""
        weights = None if self.weights is None else self.weights.to(device)
        noise = None if self.noise is None else self.noise.to(device)
        return Dataset(self.X.to(device), self.Y.to(device), weights, noise)

    def double(self) -> "Dataset":
        """Return the rows in double precision."""
        weights = None if self.weights is None else self.weights.double()
        noise = None if self.noise is None else self.noise.double()
        return Dataset(self.X.double(), self.Y.double(), weights, noise)

    def as_dataset(self) -> "Dataset":
        return self

    def weighted(self, nats: Float[Tensor, "*S N P"]) -> Float[Tensor, "*S N P"]:
        """Multiply the terms of a sum over observations by the weights of their rows."""
        return nats if self.weights is None else self.weights[:, None] * nats

    def mean_square(self, level: Tensor | float = 0.0) -> Float[Tensor, " P"]:
        """Return the mean of (y − level)² of each target over observations that have it."""
        square = (self.Y - level).square()
        observed = self.weighted((~torch.isnan(square)).to(square))
        return self.weighted(square).nansum(0) / observed.sum(0).clamp_min(1e-300)

    def merged(self) -> "Dataset":
        """Return the same observations with equal rows merged into one of their total weight.

        Every bound stays the same and is cheaper to compute. If weights differ, the rows are sorted
        by value, so that a row of weight three and three equal rows become the same data set. If
        all weights are one, the rows stay as they are. O(N log N).
        """
        table = torch.cat([self.X, self.Y, *(() if self.noise is None else (self.noise,))], 1)
        # NaN differs from itself: missing targets are compared as infinite, which no target is.
        table = torch.where(torch.isnan(table), inf, table)
        if self.weights is None and not _may_repeat(table):
            return self
        rows, inverse = torch.unique(table, dim=0, return_inverse=True)
        weights = self.X.new_zeros(len(rows)).index_add_(0, inverse, self.counts)
        unweighted = bool((weights == 1).all())
        if unweighted and len(rows) == self.N:
            return replace(self, weights=None)
        rows = torch.where(torch.isinf(rows), nan, rows)
        sizes = [self.D, self.P, rows.shape[1] - self.D - self.P]
        X, Y, noise = (part.contiguous() for part in rows.split(sizes, 1))
        noise = None if self.noise is None else noise
        return Dataset(X, Y, None if unweighted else weights, noise)


def _checked_noise(noise: Tensor, Y: Tensor) -> Tensor:
    if noise.shape != Y.shape or noise.dtype != Y.dtype:
        raise InputError(
            f"`noise` must be a {Y.dtype} variance for each target, {list(Y.shape)}; got "
            f"{noise.dtype} of shape {list(noise.shape)}."
        )
    # The noise of a missing target is not used.
    noise = torch.where(torch.isnan(Y), 0.0, noise)
    if not bool((torch.isfinite(noise) & (noise >= 0)).all()):
        raise InputError("`noise` must be finite variances of at least 0; some are not.")
    return noise


def _check_weights(weights: Tensor, X: Tensor) -> None:
    if weights.shape != X.shape[:1] or weights.dtype != X.dtype:
        raise InputError(
            f"`weights` must be one {X.dtype} number per row, [{X.shape[0]}]; got {weights.dtype} "
            f"of shape {list(weights.shape)}."
        )
    if not bool((torch.isfinite(weights) & (weights > 0)).all()):
        raise InputError("`weights` must be positive and finite; leave out rows of weight zero.")


def _may_repeat(table: Float[Tensor, "N C"]) -> bool:
    """Return False if no two rows are equal, because their weighted sums all differ.

    Sorting one number per row is ten times faster than sorting rows, and few tables have repeated
    rows.
    """
    total = torch.zeros_like(table[:, 0])
    for index, column in enumerate(table.unbind(1)):
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


def checked_size(size: int) -> int:
    """Return a chunk size, or raise an error if it is below one row."""
    if size < 1:
        raise InputError(f"`size` must be at least 1 row; got {size}.")
    return size
