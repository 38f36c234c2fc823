"""Rows in numpy arrays, of which those on disk stay there."""

import os
from collections.abc import Iterator
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from winnowgp.data.dataset import Dataset
from winnowgp.data.row_numbers import checked_rows, checked_size, share_range
from winnowgp.data.source import Source
from winnowgp.errors import InputError


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
