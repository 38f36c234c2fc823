"""Rows from any iterator that can be started again."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from winnowgp.data.dataset import Dataset
from winnowgp.data.streamed_source import StreamedSource
from winnowgp.errors import InputError


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
