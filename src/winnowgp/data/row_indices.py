"""Row indices: shards, random samples and minibatches."""

from collections.abc import Mapping
from typing import Any, final

import torch
from jaxtyping import Int
from torch import Tensor

from winnowgp.errors import InputError


def checked_rows(rows: Int[Tensor, " B"], N: int) -> Int[Tensor, " B"]:
    """Return row indices, or raise an error if one is outside 0 to N − 1."""
    if len(rows) and not bool(((rows >= 0) & (rows < N)).all()):
        raise InputError(
            f"`rows` must be indices from 0 to {N - 1}; got {int(rows.min())} to {int(rows.max())}."
        )
    return rows


def shard_range(N: int, index: int, count: int) -> range:
    """Return the rows of one of `count` shards; their lengths differ by at most one.

    >>> [shard_range(5, index, 2) for index in range(2)]
    [range(0, 2), range(2, 5)]
    """
    if not 0 <= index < count:
        raise InputError(f"`index` must be from 0 to below `count`; got {index} of {count}.")
    if count > N:
        raise InputError(f"{N} rows cannot be divided into {count} shards; use at most {N}.")
    return range(index * N // count, (index + 1) * N // count)


def sampled_rows(N: int, count: int, generator: torch.Generator) -> Int[Tensor, " B"]:
    """Return up to `count` distinct random row indices in random order.

    Memory grows with `count`, not with N. The result is on the generator's device.
    """
    device = generator.device
    if 4 * count >= N:
        return torch.randperm(N, generator=generator, device=device)[:count]
    # Draws with replacement: with N > 4 count few of the 2 count draws coincide.
    rows = torch.randint(N, (2 * count,), generator=generator, device=device).unique()
    return rows[torch.randperm(len(rows), generator=generator, device=device)[:count]]


@final
class RowBatches:
    """An endless iterator over minibatches of row indices, without replacement in each epoch.

    The rows are shuffled again whenever fewer than `size` are left, so every batch is a uniformly
    random subset. If `size` is at least N, every batch is all rows in order. `state_dict` and
    `load_state_dict` save and restore the position.

    >>> batches = RowBatches(5, 2, generator=torch.Generator().manual_seed(0))
    >>> [len(next(batches)) for _ in range(4)]
    [2, 2, 2, 2]

    Args:
        N: number of rows.
        size: rows per batch.
        generator: source of randomness; shuffling happens on its device.
        device: device of the returned indices.
    """

    def __init__(
        self,
        N: int,
        size: int,
        *,
        generator: torch.Generator,
        device: torch.device | None = None,
    ) -> None:
        self._N, self._size = N, min(size, N)
        self._generator, self._device = generator, device
        self._order: Int[Tensor, " N"] | None = None
        self._position = 0

    def __iter__(self) -> "RowBatches":
        return self

    def __next__(self) -> Int[Tensor, " B"]:
        if self._size == self._N:
            return torch.arange(self._N, device=self._device)
        if self._order is None or self._position + self._size > self._N:
            g = self._generator
            self._order, self._position = torch.randperm(self._N, generator=g, device=g.device), 0
        rows = self._order[self._position : self._position + self._size]
        self._position += self._size
        return rows.to(device=self._device)

    def state_dict(self) -> dict[str, Any]:
        """Return the current order of the rows and the position in it."""
        return {"order": self._order, "place": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position that `state_dict` returned."""
        order = state["order"]
        self._order = None if order is None else order.to(self._generator.device)
        self._position = state["place"]
