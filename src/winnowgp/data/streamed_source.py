"""Rows that come one after another, from a beginning to an end."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import final

import torch
from jaxtyping import Int
from torch import Tensor

from winnowgp.data.dataset import Dataset
from winnowgp.data.row_numbers import checked_rows, checked_size, share_range
from winnowgp.data.source import Source
from winnowgp.errors import InputError


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
