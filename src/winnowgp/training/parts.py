"""What each step of a stochastic optimiser sees of the data."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.data import Dataset, Ranks, RowBatches
from winnowgp.errors import InputError, NotPositiveDefiniteError
from winnowgp.training.unshared import warn_unshared

_ALONE = Ranks.alone()


@final
class Parts:
    """A minibatch a step, or all rows every time.

    Processes that share a fit draw the same minibatches, and each one looks at its part of them;
    all rows are looked at by each. Either way they take the same steps.

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
        self.ranks = ranks
        """Those that take the same steps."""
        if size is not None and not whole and size % ranks.of:
            raise InputError(
                f"`batch_size` must be a multiple of the number of processes, {ranks.of}, each of "
                f"which looks at as many rows; got {size}."
            )
        if whole:
            warn_unshared(ranks, "minibatches are shared, with a `batch_size` below all rows")
        self.total = None if whole else data.N
        """What a bound is told that the rows are a part of."""
        self.scale = float(data.observations * data.P)
        """What nats are divided by before they are differentiated."""
        self.data = data
        """All rows."""
        self.rows = data.N if size is None or whole else size
        """Of a minibatch, of all processes together."""
        self._size, self._generator = size, generator
        self._batches = RowBatches(
            data.N, size or data.N, generator=generator, device=data.X.device
        )

    def next(self) -> Dataset:
        """The rows of the next step that this process looks at."""
        if self.total is None:
            return self.data
        rows = next(self._batches).tensor_split(self.ranks.of)[self.ranks.rank]
        return self.data.part(rows)

    def own(self, drawn: Sequence[Float[Tensor, "T B _"]]) -> list[Float[Tensor, "T b _"]]:
        """Of what was drawn for each row of the whole minibatch, that of this process's rows.

        So that a row meets the same numbers whoever looks at it.
        """
        if self.total is None:
            return list(drawn)
        return [each.tensor_split(self.ranks.of, dim=1)[self.ranks.rank] for each in drawn]

    def together(
        self, nats: Callable[[], Float[Tensor, "*S"]], shape: tuple[int, ...] = ()
    ) -> Float[Tensor, "*S"]:
        """Nats of the whole minibatch, from what this process makes of its part of it.

        The mean over processes, the same digits in each. The gradient is that of this process
        alone: the mean over processes of what follows from it is the gradient of the whole
        minibatch, also where other terms are added that each process has.

        Args:
            shape: of the nats.

        Raises:
            NotPositiveDefiniteError: some process cannot compute its part; raised in all of them,
                or the others would wait for it.
        """
        if self.ranks.of == 1:
            return nats()
        found, failure = None, None
        try:
            found = nats()
        except NotPositiveDefiniteError as error:
            failure = error
        # In one message, for which all must know how long it is.
        failed = self.data.X.new_tensor(0.0 if failure is None else 1.0)
        part = self.data.X.new_zeros(shape) if found is None else found
        failed, total = self.ranks.total(failed, part)
        if found is None or failed:
            raise failure or NotPositiveDefiniteError("another process cannot compute its part")
        # The latter is zero, and has the gradient.
        return total / self.ranks.of + (found - found.detach())

    def alike(self, data: Dataset) -> "Parts":
        """Of other rows, as many at a time and from the same generator."""
        return Parts(data, self._size, self._generator, ranks=self.ranks)

    def state_dict(self) -> dict[str, Any]:
        """Which rows were seen."""
        return self._batches.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another one stood."""
        self._batches.load_state_dict(state)
