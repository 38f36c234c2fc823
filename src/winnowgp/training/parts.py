"""What each step of a stochastic optimiser sees of the data."""

from collections.abc import Mapping
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.data import Dataset, Ranks, RowBatches
from winnowgp.errors import InputError

_ALONE = Ranks.alone()


@final
class Parts:
    """A minibatch a step, or all rows every time.

    Processes that share a fit draw the same minibatches, and each one looks at its part of them;
    all rows are looked at by each.

    Args:
        size: rows of a minibatch, of all processes together; all of them if None.
        ranks: the processes that share the fit.
    """

    def __init__(
        self,
        data: Dataset,
        size: int | None,
        generator: torch.Generator,
        *,
        ranks: Ranks = _ALONE,
    ) -> None:
        whole = size is None or size >= data.N
        self.ranks = _ALONE if whole else ranks
        """Those that look at different rows."""
        if size is not None and not whole and size % ranks.of:
            raise InputError(
                f"`batch_size` must be a multiple of the number of processes, {ranks.of}, each of "
                f"which looks at as many rows; got {size}."
            )
        self.total = None if whole else data.N
        """What a bound is told that the rows are a part of."""
        self.scale = float(data.observations * data.P)
        """What nats are divided by before they are differentiated."""
        self.data = data
        """All rows."""
        self._size, self._generator, self._given = size, generator, ranks
        self._batches = RowBatches(
            data.N, size or data.N, generator=generator, device=data.X.device
        )

    def next(self) -> Dataset:
        """The rows of the next step that this process looks at."""
        if self.total is None:
            return self.data
        rows = next(self._batches).tensor_split(self.ranks.of)[self.ranks.rank]
        return self.data.part(rows)

    def together(self, nats: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """Nats of the whole minibatch, from what this process made of its part of it.

        The mean over processes. The gradient is that of this process alone: the mean over processes
        of what follows from it is the gradient of the whole minibatch, also where other terms are
        added that each process has.
        """
        if self.ranks.of == 1:
            return nats
        (total,) = self.ranks.total(nats.detach())
        return nats + (total / self.ranks.of - nats).detach()

    def alike(self, data: Dataset) -> "Parts":
        """Of other rows, as many at a time and from the same generator."""
        return Parts(data, self._size, self._generator, ranks=self._given)

    def state_dict(self) -> dict[str, Any]:
        """Which rows were seen."""
        return self._batches.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another one stood."""
        self._batches.load_state_dict(state)
