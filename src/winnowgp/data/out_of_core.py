"""Sources of rows that are read in chunks: arrays, memory maps and iterators."""

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from winnowgp.data.dataset import Dataset
from winnowgp.data.sources import Source, checked_rows, checked_size, share_range
from winnowgp.errors import InputError

# A source that is another one, seen differently.


@dataclass(frozen=True, slots=True)
class WrappedSource(Source):
    """As many rows and columns as another source has; its children say how they are read."""

    source: Source

    @property
    def N(self) -> int:
        return self.source.N

    @property
    def D(self) -> int:
        return self.source.D

    @property
    def P(self) -> int:
        return self.source.P

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @property
    def device(self) -> torch.device:
        return self.source.device

    @property
    def names(self) -> tuple[str, ...] | None:
        return self.source.names

    @property
    def observations(self) -> int | float:
        return self.source.observations


# Rows in numpy arrays, of which those on disk stay there.


@final
class ArraySource(Source):
    """Inputs `[N D]` and targets `[N]` or `[N P]` in arrays, memory maps included.

    Nothing is copied but the rows of a chunk, when it is read.

    >>> source = ArraySource(np.arange(6).reshape(3, 2), np.arange(3))
    >>> [chunk.Y.tolist() for chunk in source.chunks(2)]
    [[[0.0], [1.0]], [[2.0]]]

    Args:
        X: numbers of any dtype.
        y: as many rows of them.
        dtype: of the tensors that rows become.
    """

    def __init__(
        self, X: NDArray[Any], y: NDArray[Any], *, dtype: torch.dtype = torch.float64
    ) -> None:
        for name, array, axes in (("X", X, (2,)), ("y", y, (1, 2))):
            if not isinstance(array, np.ndarray):
                raise InputError(
                    f"`{name}` must be a numpy array; got a {type(array).__name__}. Tensors are "
                    "for `Dataset.of`; `np.asarray` makes arrays of most other things."
                )
            if array.ndim not in axes or array.dtype.kind not in "fiub":
                raise InputError(
                    f"`{name}` must be numbers in {' or '.join(map(str, axes))} dimensions; got "
                    f"{array.dtype} of shape {list(array.shape)}."
                )
        if len(X) != len(y):
            raise InputError(f"`X` has {len(X)} rows and `y` has {len(y)}; pair them.")
        if not len(X):
            raise InputError("`X` has no rows; a fit needs at least one.")
        self._X, self._y, self._dtype = X, y, dtype
        self._first = 0

    @classmethod
    def open(
        cls,
        X: str | os.PathLike[str],
        y: str | os.PathLike[str],
        *,
        dtype: torch.dtype = torch.float64,
    ) -> "ArraySource":
        """Of two `.npy` files, which are mapped and not read."""
        return cls(_mapped("X", X), _mapped("y", y), dtype=dtype)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def N(self) -> int:
        return len(self._X)

    @property
    def D(self) -> int:
        return self._X.shape[1]

    @property
    def P(self) -> int:
        return self._y.shape[1] if self._y.ndim == 2 else 1

    def chunks(self, size: int) -> Iterator[Dataset]:
        for start in range(0, self.N, checked_size(size)):
            yield self._read(slice(start, start + size))

    def part(self, rows: Int[Tensor, " B"]) -> Dataset:
        return self._read(checked_rows(rows, self.N).cpu().numpy())

    def share(self, rank: int, of: int) -> "ArraySource":
        rows = share_range(self.N, rank, of)
        shared = ArraySource(
            self._X[rows.start : rows.stop], self._y[rows.start : rows.stop], dtype=self._dtype
        )
        shared._first = self._first + rows.start
        return shared

    def _read(self, rows: slice | NDArray[np.int64]) -> Dataset:
        X, y = (self._tensor(n, a, rows) for n, a in (("X", self._X), ("y", self._y)))
        return Dataset(X, y if y.dim() == 2 else y[:, None])

    def _tensor(self, name: str, array: NDArray[Any], rows: slice | NDArray[np.int64]) -> Tensor:
        """A copy: a memory map may be read-only, or change."""
        made = torch.from_numpy(np.array(array[rows], dtype=np.float64, order="C")).to(self._dtype)
        bad = ~torch.isfinite(made)
        if bool(bad.any()):
            row, *column = (int(place) for place in bad.nonzero()[0])
            number = int(rows.start + row if isinstance(rows, slice) else rows[row])
            place = ", ".join(str(i) for i in (self._first + number, *column))
            raise InputError(
                f"`{name}[{place}]` is {array[(number, *column)]}; numbers must be finite in "
                f"{self._dtype}. Mend that row, or leave it out."
            )
        return made


def _mapped(name: str, path: str | os.PathLike[str]) -> NDArray[Any]:
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(
            f"`{name}` must be a .npy file that can be mapped; {path} cannot: {error}."
        ) from error
    if not isinstance(found, np.ndarray):
        raise InputError(f"`{name}` must be a .npy file with one array; {path} is an archive.")
    return found


# Rows that come one after another, from a beginning to an end.


class StreamedSource(Source):
    """A source that can say `between`; the rest follows."""

    @abstractmethod
    def between(self, start: int, stop: int) -> Iterator[Dataset]:
        """The rows from `start` to before `stop`, in order, in pieces of any size."""

    @final
    def chunks(self, size: int) -> Iterator[Dataset]:
        return cut(self.between(0, self.N), chunk_sizes(self.N, size))

    @final
    def part(self, rows: Int[Tensor, " B"]) -> Dataset:
        wanted, place = torch.unique(checked_rows(rows, self.N).cpu(), return_inverse=True)
        if not len(wanted):
            return next(self.chunks(1)).part(slice(0))
        # Rows are picked as pieces pass; only what is asked for is kept.
        X, Y = (torch.empty(len(wanted), n, dtype=self.dtype) for n in (self.D, self.P))
        start, done = int(wanted[0]), 0
        for piece in self.between(start, int(wanted[-1]) + 1):
            stop = start + piece.N
            until = int(torch.searchsorted(wanted, stop))
            inside = piece.part(wanted[done:until] - start)
            X[done:until], Y[done:until] = inside.X, inside.Y
            start, done = stop, until
        if done < len(wanted):
            raise _fewer()
        return Dataset(X, Y).part(place)

    @final
    def share(self, rank: int, of: int) -> Source:
        return _Share(self, share_range(self.N, rank, of))


@final
class _Share(StreamedSource):
    """Some rows of a source, one after another."""

    def __init__(self, source: StreamedSource, rows: range) -> None:
        self._source, self._rows = source, rows

    @property
    def dtype(self) -> torch.dtype:
        return self._source.dtype

    @property
    def N(self) -> int:
        return len(self._rows)

    @property
    def D(self) -> int:
        return self._source.D

    @property
    def P(self) -> int:
        return self._source.P

    def between(self, start: int, stop: int) -> Iterator[Dataset]:
        return self._source.between(self._rows.start + start, self._rows.start + stop)


def chunk_sizes(N: int, size: int) -> Iterator[int]:
    """Of N rows, `size` at a time and what is left at the end."""
    for start in range(0, N, checked_size(size)):
        yield min(size, N - start)


def cut(pieces: Iterable[Dataset], sizes: Iterable[int]) -> Iterator[Dataset]:
    """Rows that come in pieces of any size, in pieces of these."""
    coming, piece = iter(pieces), None
    for size in sizes:
        held: list[Dataset] = []
        while size:
            if piece is None or not piece.N:
                piece = next(coming, None)
                if piece is None:
                    raise _fewer()
            held.append(piece.part(slice(size)))
            size -= held[-1].N
            piece = piece.part(slice(held[-1].N, None))
        yield _joined(held)
    # What a source says at its end, that it has changed for example, is to be heard.
    for _ in coming:
        pass


def _fewer() -> InputError:
    return InputError("a source gave fewer rows than it said; open it again.")


def _joined(parts: list[Dataset]) -> Dataset:
    if len(parts) == 1:
        return parts[0]
    return Dataset(torch.cat([p.X for p in parts]), torch.cat([p.Y for p in parts]))


# Rows from any iterator that can be started again.


@final
class BatchSource(StreamedSource):
    """What a function yields: pairs of inputs `[B D]` and targets `[B]` or `[B P]`.

    It is called, and read to the end, once to count the rows and once a pass; whatever it yields
    must come in the same order each time. A share reads up to its own last row.

    >>> source = BatchSource(lambda: ((np.full((2, 1), i), np.zeros(2)) for i in range(3)))
    >>> source.N, [chunk.X.ravel().tolist() for chunk in source.chunks(4)]
    (6, [[0.0, 0.0, 1.0, 1.0], [2.0, 2.0]])

    Args:
        batches: makes a new iterator of pairs of arrays or tensors, which are copied: it may fill
            the same ones again.
        dtype: of the tensors that they become.
    """

    def __init__(
        self,
        batches: Callable[[], Iterator[tuple[Any, Any]]],
        *,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        if not callable(batches):
            raise InputError(
                f"`batches` must be a function that makes a new iterator each time it is called; "
                f"got a {type(batches).__name__}. Rows that are there already: `lambda: iter(...)`."
            )
        self._batches, self._dtype = batches, dtype
        self._N, self._shape = 0, None
        for batch in self._pieces():
            self._shape = (batch.D, batch.P)
            self._N += batch.N
        if self._shape is None:
            raise InputError("`batches` gave no rows; a fit needs at least one.")

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def N(self) -> int:
        return self._N

    @property
    def D(self) -> int:
        assert self._shape is not None
        return self._shape[0]

    @property
    def P(self) -> int:
        assert self._shape is not None
        return self._shape[1]

    def between(self, start: int, stop: int) -> Iterator[Dataset]:
        before = 0
        for batch in self._pieces():
            wanted = slice(max(start - before, 0), max(stop - before, 0))
            before += batch.N
            if before > self._N:
                raise self._changed(f"more than {self._N}")
            if (part := batch.part(wanted)).N:
                yield part
            if stop <= before and stop < self._N:
                return
        if before < self._N:
            raise self._changed(str(before))

    def _pieces(self) -> Iterator[Dataset]:
        batches: Any = self._batches()
        if not isinstance(batches, Iterable):
            raise InputError(
                f"`batches` must make an iterator of pairs; it made a {type(batches).__name__}."
            )
        for number, pair in enumerate(batches):
            try:
                X, y = _pair(pair)
                inputs, targets = _tensor("X", X, self._dtype), _tensor("y", y, self._dtype)
                if not len(inputs) and not len(targets):
                    continue
                batch = Dataset.of(inputs, targets)
            except InputError as error:
                raise InputError(f"batch {number} (counted from 0) of `batches`: {error}") from None
            if self._shape not in (None, (batch.D, batch.P)):
                raise InputError(
                    f"batch {number} (counted from 0) of `batches` has {batch.D} inputs and "
                    f"{batch.P} targets, and those before it {self._shape[0]} and "
                    f"{self._shape[1]}; give all batches the same columns."
                )
            yield batch

    def _changed(self, rows: str) -> InputError:
        return InputError(
            f"`batches` gave {self._N} rows when they were counted and {rows} now; it must yield "
            "the same rows each time it is called, from the first one on."
        )


def _pair(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        parts = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
        raise InputError(
            f"must be a pair of inputs and targets; got a {type(batch).__name__}{parts}."
        )
    return batch[0], batch[1]


def _tensor(name: str, values: Any, dtype: torch.dtype) -> Tensor:
    """A copy: rows wait for those of the next batch, which may come in the same place."""
    if isinstance(values, Tensor):
        return values.detach().to("cpu", dtype, copy=True)
    try:
        return torch.from_numpy(np.array(values, dtype=np.float64, order="C")).to(dtype)
    except (TypeError, ValueError) as error:
        raise InputError(f"`{name}` must be numbers; {error}.") from error
