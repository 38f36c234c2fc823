"""Sources that read their rows in chunks: arrays, memory maps and restartable iterators."""

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar, final, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from winnowgp.data.dataset import Dataset, Source, SourceInfo, checked_size
from winnowgp.data.row_indices import checked_rows, shard_range
from winnowgp.errors import InputError


@final
class ArraySource(Source):
    """Inputs `[N D]` and targets `[N]` or `[N P]` in NumPy arrays or memory maps.

    Rows are copied only when a chunk is read.

    >>> source = ArraySource(np.arange(6).reshape(3, 2), np.arange(3))
    >>> [chunk.Y.tolist() for chunk in source.chunks(2)]
    [[[0.0], [1.0]], [[2.0]]]

    Args:
        X: numeric array of any dtype.
        y: numeric array with as many rows.
        noise: known noise variances of the targets, of the shape of `y`, if there are any.
        dtype: dtype of the tensors that rows are converted to.
    """

    def __init__(
        self,
        X: NDArray[Any],
        y: NDArray[Any],
        *,
        noise: NDArray[Any] | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        arrays = [("X", X, (2,)), ("y", y, (1, 2))]
        arrays += [] if noise is None else [("noise", noise, (y.ndim,))]
        for name, array, dimensions in arrays:
            if not isinstance(array, np.ndarray):
                raise InputError(
                    f"`{name}` must be a numpy array; got a {type(array).__name__}. Use "
                    "`Dataset.of` for tensors, and `np.asarray` to convert other sequences."
                )
            if array.ndim not in dimensions or array.dtype.kind not in "fiub":
                raise InputError(
                    f"`{name}` must be numbers in {' or '.join(map(str, dimensions))} dimensions; "
                    f"got {array.dtype} of shape {list(array.shape)}."
                )
        if len(X) != len(y):
            raise InputError(
                f"`X` and `y` must have equally many rows; `X` has {len(X)} rows and `y` has "
                f"{len(y)}."
            )
        if noise is not None and noise.shape != y.shape:
            raise InputError(
                f"`noise` must be a variance for each target, {list(y.shape)}; got "
                f"{list(noise.shape)}."
            )
        if not len(X):
            raise InputError("`X` has no rows; a fit needs at least one.")
        self._X, self._y, self._noise = X, y, noise
        self._info = SourceInfo(len(X), X.shape[1], y.shape[1] if y.ndim == 2 else 1, dtype)
        self._offset = 0

    @classmethod
    def open(
        cls,
        X: str | os.PathLike[str],
        y: str | os.PathLike[str],
        *,
        dtype: torch.dtype = torch.float64,
    ) -> "ArraySource":
        """Open two `.npy` files as memory maps, without reading them.

        Args:
            X: file of the inputs.
            y: file of the targets.
            dtype: dtype of the tensors that rows are converted to.
        """
        return cls(_memory_map("X", X), _memory_map("y", y), dtype=dtype)

    @property
    def info(self) -> SourceInfo:
        return self._info

    @property
    def has_noise(self) -> bool:
        return self._noise is not None

    def chunks(self, size: int) -> Iterator[Dataset]:
        for start in range(0, self.N, checked_size(size)):
            yield self._read(slice(start, start + size))

    def part(self, rows: Int[Tensor, " B"]) -> Dataset:
        return self._read(checked_rows(rows, self.N).cpu().numpy())

    def shard(self, index: int, count: int) -> "ArraySource":
        rows = shard_range(self.N, index, count)
        own = slice(rows.start, rows.stop)
        noise = None if self._noise is None else self._noise[own]
        shard = ArraySource(self._X[own], self._y[own], noise=noise, dtype=self.dtype)
        shard._offset = self._offset + rows.start
        return shard

    def _read(self, rows: slice | NDArray[np.int64]) -> Dataset:
        X, y = (self._tensor(n, a, rows) for n, a in (("X", self._X), ("y", self._y)))
        if self._noise is None:
            return Dataset(X, y if y.dim() == 2 else y[:, None])
        # Negative variances are refused.
        return Dataset.of(X, y, noise=self._tensor("noise", self._noise, rows))

    def _tensor(self, name: str, array: NDArray[Any], rows: slice | NDArray[np.int64]) -> Tensor:
        """Convert a copy of some rows: a memory map may be read-only, or change."""
        tensor = torch.from_numpy(np.array(array[rows], dtype=np.float64, order="C")).to(self.dtype)
        bad = ~torch.isfinite(tensor)
        if bool(bad.any()):
            row, *column = (int(index) for index in bad.nonzero()[0])
            number = int(rows.start + row if isinstance(rows, slice) else rows[row])
            position = ", ".join(str(i) for i in (self._offset + number, *column))
            raise InputError(
                f"`{name}[{position}]` is {array[(number, *column)]}; numbers must be finite in "
                f"{self.dtype}. Correct that row, or leave it out."
            )
        return tensor


def _memory_map(name: str, path: str | os.PathLike[str]) -> NDArray[Any]:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(
            f"`{name}` must be a .npy file that can be memory-mapped; {path} cannot: {error}."
        ) from error
    if not isinstance(array, np.ndarray):
        raise InputError(f"`{name}` must be a .npy file with one array; {path} is an archive.")
    return array


class StreamedSource(Source):
    """A source whose rows can only be read in order; subclasses implement `between`."""

    @abstractmethod
    def between(self, start: int, stop: int) -> Iterator[Dataset]:
        """Yield the rows from `start` to before `stop` in order, in pieces of any size."""

    def rechunked(self, start: int, stop: int, sizes: Iterable[int]) -> Iterator[Dataset]:
        """Yield the rows from `start` to before `stop` in chunks of these sizes."""
        return rechunk(_complete(self.between(start, stop), stop - start), sizes)

    @final
    def chunks(self, size: int) -> Iterator[Dataset]:
        return self.rechunked(0, self.N, chunk_sizes(self.N, size))

    @final
    def part(self, rows: Int[Tensor, " B"]) -> Dataset:
        unique, inverse = torch.unique(checked_rows(rows, self.N).cpu(), return_inverse=True)
        if not len(unique):
            return next(self.chunks(1)).part(slice(0))
        # Rows are selected as pieces pass, so that only the requested ones stay in memory.
        widths = (self.D, self.P, self.P)
        X, Y, noise = (torch.empty(len(unique), n, dtype=self.dtype) for n in widths)
        start, stop = int(unique[0]), int(unique[-1]) + 1
        row, done = start, 0
        for piece in _complete(self.between(start, stop), stop - start):
            end = int(torch.searchsorted(unique, row + piece.N))
            selected = piece.part(unique[done:end] - row)
            X[done:end], Y[done:end] = selected.X, selected.Y
            if selected.noise is not None:
                noise[done:end] = selected.noise
            row, done = row + piece.N, end
        return Dataset(X, Y, noise=noise if self.has_noise else None).part(inverse)

    @final
    def shard(self, index: int, count: int) -> Source:
        return _RowRange(self, shard_range(self.N, index, count))


@final
class _RowRange(StreamedSource):
    """A contiguous range of rows of a streamed source."""

    def __init__(self, source: StreamedSource, rows: range) -> None:
        self._source, self._rows = source, rows

    @property
    def info(self) -> SourceInfo:
        return SourceInfo(len(self._rows), self._source.D, self._source.P, self._source.dtype)

    @property
    def has_noise(self) -> bool:
        return self._source.has_noise

    def between(self, start: int, stop: int) -> Iterator[Dataset]:
        return self._source.between(self._rows.start + start, self._rows.start + stop)


def _complete(pieces: Iterable[Dataset], N: int) -> Iterator[Dataset]:
    """Yield the pieces, and raise an error if they have fewer than N rows in all."""
    for piece in pieces:
        N -= piece.N
        yield piece
    if N > 0:
        raise InputError("a source yielded fewer rows than its `N`; open it again.")


@final
class BatchSource(StreamedSource):
    """Pairs of inputs `[B D]` and targets `[B]` or `[B P]` from a function that yields them.

    A third array is the known noise variances of the targets.

    The function is called once to count the rows and once per pass. It must yield the same rows in
    the same order each time. A shard reads up to its own last row.

    >>> source = BatchSource(lambda: ((np.full((2, 1), i), np.zeros(2)) for i in range(3)))
    >>> source.N, [chunk.X.ravel().tolist() for chunk in source.chunks(4)]
    (6, [[0.0, 0.0, 1.0, 1.0], [2.0, 2.0]])

    Args:
        batches: function that returns a new iterator of pairs, or of triples with noise, of arrays
            or tensors. They are copied, so it may reuse its buffers.
        dtype: dtype of the tensors that rows are converted to.
    """

    def __init__(
        self,
        batches: Callable[[], Iterator[tuple[Any, ...]]],
        *,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        if not callable(batches):
            raise InputError(
                f"`batches` must be a function that returns a new iterator each time it is called; "
                f"got a {type(batches).__name__}. Wrap a sequence as `lambda: iter(...)`."
            )
        self._batches, self._dtype = batches, dtype
        self._info: SourceInfo | None = None
        self._has_noise = False
        N = 0
        for batch in self._pieces():
            N += batch.N
            self._info, self._has_noise = SourceInfo(N, batch.D, batch.P, dtype), batch.has_noise
        if self._info is None:
            raise InputError("`batches` yielded no rows; a fit needs at least one.")

    @property
    def info(self) -> SourceInfo:
        assert self._info is not None
        return self._info

    @property
    def has_noise(self) -> bool:
        return self._has_noise

    def between(self, start: int, stop: int) -> Iterator[Dataset]:
        before = 0
        for batch in self._pieces():
            wanted = slice(max(start - before, 0), max(stop - before, 0))
            before += batch.N
            if before > self.N:
                raise self._changed(f"more than {self.N}")
            if (part := batch.part(wanted)).N:
                yield part
            if stop <= before and stop < self.N:
                return
        if before < self.N:
            raise self._changed(str(before))

    def _pieces(self) -> Iterator[Dataset]:
        batches: Any = self._batches()
        if not isinstance(batches, Iterable):
            raise InputError(
                "`batches` must return an iterator of pairs; it returned a "
                f"{type(batches).__name__}."
            )
        for number, pair in enumerate(batches):
            where = f"batch {number} (counted from 0) of `batches`"
            try:
                names = ("X", "y", "noise")
                arrays = [
                    _tensor(name, values, self._dtype)
                    for name, values in zip(names, _arrays(pair), strict=False)
                ]
                if not any(array.numel() for array in arrays[:2]):
                    continue
                batch = Dataset.of(arrays[0], arrays[1], noise=_noise(arrays))
            except InputError as error:
                raise InputError(f"{where}: {error}") from None
            info = self._info
            if info is not None and (info.D, info.P) != (batch.D, batch.P):
                raise InputError(
                    f"{where} has {batch.D} inputs and {batch.P} targets, and those before it "
                    f"{info.D} and {info.P}; give all batches the same columns."
                )
            if info is not None and batch.has_noise != self._has_noise:
                raise InputError(f"{where}: give the noise of all batches, or of none.")
            yield batch

    def _changed(self, rows: str) -> InputError:
        return InputError(
            f"`batches` gave {self.N} rows when they were counted and {rows} now; it must yield "
            "the same rows each time it is called, from the first one on."
        )


def _arrays(batch: Any) -> Sequence[Any]:
    """Return inputs and targets, and noise if the batch has it."""
    if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
        length = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
        raise InputError(
            "must be a pair of inputs and targets, or these and noise variances; got a "
            f"{type(batch).__name__}{length}."
        )
    return batch


def _noise(arrays: Sequence[Tensor]) -> Tensor | None:
    """Return the noise of a batch, if it has any, or raise an error if its shape is wrong."""
    if len(arrays) == 2:
        return None
    if arrays[2].shape != arrays[1].shape:
        raise InputError(
            f"the noise must be a variance for each target, {list(arrays[1].shape)}; got shape "
            f"{list(arrays[2].shape)}."
        )
    return arrays[2]


def _tensor(name: str, values: Any, dtype: torch.dtype) -> Tensor:
    """Copy the values: the next batch may come in the same buffer."""
    if isinstance(values, Tensor):
        return values.detach().to("cpu", dtype, copy=True)
    try:
        return torch.from_numpy(np.array(values, dtype=np.float64, order="C")).to(dtype)
    except (TypeError, ValueError) as error:
        raise InputError(f"`{name}` must be numbers; {error}.") from error


@dataclass(frozen=True, slots=True)
class WrappedSource(Source):
    """A source with the rows and columns of another one; subclasses change how they are read."""

    source: Source

    @property
    def info(self) -> SourceInfo:
        return self.source.info

    @property
    def device(self) -> torch.device:
        return self.source.device

    @property
    def observations(self) -> int | float:
        return self.source.observations

    @property
    def has_noise(self) -> bool:
        return self.source.has_noise


@runtime_checkable
class Rows(Protocol):
    """The interface that `rechunk` needs of a block of rows: a `Dataset` or a `DataTable`."""

    @property
    def N(self) -> int: ...

    def part(self, rows: slice, /) -> Self: ...

    @classmethod
    def joined(cls, parts: Sequence[Self], /) -> Self: ...


Block = TypeVar("Block", bound=Rows)


def rechunk(blocks: Iterable[Block], sizes: Iterable[int]) -> Iterator[Block]:
    """Yield the rows of `blocks`, in order, in chunks of these sizes; the last may be shorter.

    Memory is that of one chunk and one block. Once the sizes are used up the remaining blocks are
    read and discarded, so that an error at the end of a stream is raised.

    >>> from itertools import repeat
    >>> blocks = [Dataset.of(torch.ones(n, 1), torch.ones(n)) for n in (2, 3)]
    >>> [chunk.N for chunk in rechunk(blocks, repeat(2))]
    [2, 2, 1]
    """
    remaining, block = iter(blocks), None
    for size in sizes:
        pieces: list[Block] = []
        while size:
            if block is None or not block.N:
                block = next(remaining, None)
                if block is None:
                    break
            pieces.append(block.part(slice(size)))
            size -= pieces[-1].N
            block = block.part(slice(pieces[-1].N, None))
        if pieces:
            yield type(pieces[0]).joined(pieces)
        if size:
            return
    for _ in remaining:
        pass


def chunk_sizes(N: int, size: int) -> Iterator[int]:
    """Yield the lengths of the chunks of N rows, `size` at a time."""
    for start in range(0, N, checked_size(size)):
        yield min(size, N - start)
