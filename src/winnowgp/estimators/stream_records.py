"""Records of a stream: what each batch did to a model, and what an estimator has seen."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from winnowgp.bounds.streaming import Memory
from winnowgp.estimators.first_rows import FirstRows

KEPT_BATCHES = 1000
"""Number of the latest batches that `batches_` has."""


@final
@dataclass(frozen=True, slots=True)
class BatchRecord:
    """What one batch of a stream did to a model."""

    rows: float
    """Number of observations."""
    points: int
    """Number of inducing points after the batch."""
    added: int
    """Rows of the batch that became inducing points."""
    dropped: int
    """Old inducing points that were given up."""
    moved: int
    elbo: float
    """ELBO of all rows that are remembered, in nats."""
    gap: float
    """Nats per observation of the batch that the selection gave up."""
    log_density: float
    """Mean log density of the targets before the batch was learnt; NaN for the first batch."""
    seconds: float


@final
@dataclass(frozen=True, slots=True)
class StreamRecord:
    """What an estimator has seen of a stream."""

    seen: float
    """Number of observations in all batches."""
    remembered: float
    """Number of observations, each multiplied by what forgetting has left of it; NaN if they had
    known noise or missing targets."""
    count: int
    """Number of batches."""
    given_up: float
    """Nats that all selections have given up."""
    batches: tuple[BatchRecord, ...]
    """The latest batches."""
    points: tuple[int, ...]
    """Number of each inducing point, in the order of arrival."""
    arrived: int
    """Number of inducing points that there ever were."""
    window: tuple[Memory, ...] = ()
    """Memories of the batches of a window, the oldest first; none without a window."""
    first: FirstRows | None = None
    """The first rows, as long as they are kept."""

    def plus(
        self,
        batch: BatchRecord,
        *,
        share: float,
        given_up: float,
        kept: Sequence[bool],
        window: tuple[Memory, ...],
        first: FirstRows | None,
    ) -> "StreamRecord":
        """Return the record after another batch.

        Args:
            share: share of the earlier observations that is still remembered.
            kept: which of the old inducing points are left.
        """
        old = tuple(n for n, stays in zip(self.points, kept, strict=True) if stays)
        return StreamRecord(
            seen=self.seen + batch.rows,
            remembered=share * self.remembered + batch.rows,
            count=self.count + 1,
            given_up=given_up,
            batches=(*self.batches, batch)[-KEPT_BATCHES:],
            points=(*old, *range(self.arrived, self.arrived + batch.points - len(old))),
            arrived=self.arrived + batch.points - len(old),
            window=window,
            first=first,
        )

    def renumbered(self, M: int, *, given_up: float) -> "StreamRecord":
        """Return the record of a model whose M inducing points are all new."""
        numbers = range(self.arrived, self.arrived + M)
        return replace(
            self, given_up=given_up, points=tuple(numbers), arrived=numbers.stop, window=()
        )


def first_record(N: float, *, gap: float, batches: tuple[BatchRecord, ...], M: int) -> StreamRecord:
    """Return the record of a fit to N observations."""
    return StreamRecord(N, N, 1, gap * N, batches, tuple(range(M)), M)
