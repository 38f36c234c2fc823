"""What each step of a stochastic optimiser sees of the data."""

from typing import final

import torch

from winnowgp.data import Dataset, minibatches


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
        self.scale = float(data.N * data.P)
        """What nats are divided by before they are differentiated."""
        self._batches = minibatches(data, size or data.N, generator=generator)

    def next(self) -> Dataset:
        """The rows of the next step."""
        return next(self._batches)
