"""Random parts of the rows, one after another without end."""

from collections.abc import Mapping
from typing import Any, final

import torch
from jaxtyping import Int
from torch import Tensor


@final
class RowBatches:
    """Numbers of `size` random rows, in an order drawn anew whenever fewer than `size` are left.

    Every batch is a uniformly random part of the rows; all of them in order if there are no more.
    An iterator with a memory: `state_dict` says where it stands, to go on from there.

    >>> batches = RowBatches(5, 2, generator=torch.Generator().manual_seed(0))
    >>> [len(next(batches)) for _ in range(4)]
    [2, 2, 2, 2]

    Args:
        generator: drawn from when an order is needed, on its device.
        device: where the numbers are wanted.
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
        self._place = 0

    def __iter__(self) -> "RowBatches":
        return self

    def __next__(self) -> Int[Tensor, " B"]:
        if self._size == self._N:
            return torch.arange(self._N, device=self._device)
        if self._order is None or self._place + self._size > self._N:
            g = self._generator
            self._order, self._place = torch.randperm(self._N, generator=g, device=g.device), 0
        rows = self._order[self._place : self._place + self._size]
        self._place += self._size
        return rows.to(device=self._device)

    def state_dict(self) -> dict[str, Any]:
        """The order, and how much of it is used up."""
        return {"order": self._order, "place": self._place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Stand where another one stood."""
        order = state["order"]
        self._order = None if order is None else order.to(self._generator.device)
        self._place = state["place"]
