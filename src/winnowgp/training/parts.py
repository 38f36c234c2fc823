"""What each step of a stochastic optimiser sees of the data."""

from collections.abc import Mapping
from typing import Any, final

import torch

from winnowgp.data import Dataset, RowBatches


@final
class Parts:
    """A minibatch a step, or all rows every time.

    Args:
        size: rows of a minibatch; all of them if None.
    """

    def __init__(self, data: Dataset, size: int | None, generator: torch.Generator) -> None:
        whole = size is None or size >= data.N
        self.total = None if whole else data.N
        """What a bound is told that the rows are a part of."""
        self.scale = float(data.observations * data.P)
        """What nats are divided by before they are differentiated."""
        self.data = data
        """All rows."""
        self._size, self._generator = size, generator
        self._batches = RowBatches(
            data.N, size or data.N, generator=generator, device=data.X.device
        )

    def next(self) -> Dataset:
        """The rows of the next step."""
        if self.total is None:
            return self.data
        rows = next(self._batches)
        return self.data.part(rows)

    def alike(self, data: Dataset) -> "Parts":
        """Of other rows, as many at a time and from the same generator."""
        return Parts(data, self._size, self._generator)

    def state_dict(self) -> dict[str, Any]:
        """Which rows were seen."""
        return self._batches.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another one stood."""
        self._batches.load_state_dict(state)
