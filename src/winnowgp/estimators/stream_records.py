"""Records of a stream: what each batch did to a model, and what an estimator keeps of its rows.

An estimator remembers rows at the points of a memory (`bounds.streaming`), which is as good as the
hyper-parameters at the time. Those of some ten rows are hardly known, and a constant has no
inducing points at all: its memory does not say where the rows were. So `partial_fit` also keeps the
first `FIRST_ROWS` rows, and as long as a constant explains all rows, the latest `CONSTANT_ROWS`.
Later batches are learnt together with them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds.streaming import Memory
from winnowgp.data import Dataset
from winnowgp.training.streaming import Steps

KEPT_BATCHES = 1000
"""Number of the latest batches that `batches_` has."""

FIRST_ROWS = 256
"""Number of rows up to which all of them are kept."""

CONSTANT_ROWS = 2048
"""Largest number of rows that are kept while a constant explains all of them."""

# Share of the observations that must have arrived since the last search for a function: of few,
# which are searched in seconds, and of more than `FIRST_ROWS`.
_SMALL_SHARE, _SHARE = 1 / 8, 1 / 3


@final
@dataclass(frozen=True, slots=True)
class BatchRecord:
    """What one batch of a stream did to a model."""

    rows: float
    """Number of observations."""
    points: int
    """Number of inducing points after the batch."""
    added: int
    """Inducing points that there were not before the batch."""
    dropped: int
    """Inducing points that there were before the batch only."""
    moved: int
    elbo: float
    """ELBO of all rows that are remembered, in nats."""
    gap: float
    """ELBO gap of all rows that are remembered, in nats per observation."""
    log_density: float
    """Mean log density of the targets before the batch was learnt; NaN for the first batch."""
    seconds: float


@final
@dataclass(frozen=True, slots=True)
class FirstRows:
    """Rows of a stream that are kept, standardised.

    Attributes:
        rows: the rows, in the order of arrival.
        waiting: number of observations that have arrived since a function was last searched for.
    """

    rows: Dataset
    waiting: float

    def to(self, device: torch.device) -> "FirstRows":
        """Return the rows on another device."""
        return replace(self, rows=self.rows.to(device))

    def forget(self, factor: float) -> "FirstRows":
        """Return rows whose weights are multiplied by a factor, as in `Memory.forget`."""
        if factor == 1:
            return self
        return replace(self, rows=replace(self.rows, weights=factor * _weights(self.rows)))

    @classmethod
    def of(cls, batches: Sequence[Dataset], waiting: float = 0.0) -> "FirstRows":
        """Return the rows of several batches."""
        if any(part.weights is not None for part in batches):
            batches = [replace(part, weights=_weights(part)) for part in batches]
        if any(part.noise is not None for part in batches):
            batches = [replace(part, noise=_noise(part)) for part in batches]
        return cls(Dataset.joined(batches), waiting)

    def plus(self, batch: Dataset) -> "FirstRows":
        """Return the rows with those of another batch."""
        return FirstRows.of([self.rows, batch], self.waiting + batch.observations)

    def is_search_due(self, N: float) -> bool:
        """Return whether enough of N observations are new to search for a function again."""
        return self.waiting >= (_SMALL_SHARE if N <= FIRST_ROWS else _SHARE) * N

    def kept(self, N: float, *, constant: bool) -> "FirstRows | None":
        """Return the rows that are kept after a batch.

        Args:
            N: number of observations that are remembered.
            constant: whether a constant explains all of them; otherwise all rows are kept, or none.
        """
        if not constant:
            complete = self.rows.observations >= (1 - 1e-9) * N
            return self if complete and self.rows.N <= FIRST_ROWS else None
        if self.rows.N <= CONSTANT_ROWS:
            return self
        latest = torch.arange(self.rows.N - CONSTANT_ROWS, self.rows.N)
        return replace(self, rows=self.rows.part(latest))


@final
@dataclass(frozen=True, slots=True)
class StreamRecord:
    """What an estimator has seen of a stream, and what it remembers."""

    seen: float
    """Number of observations in all batches."""
    remembered: float
    """Number of observations, each multiplied by what forgetting has left of it; NaN if targets
    were missing, or if a model with known noise was resized."""
    count: int
    """Number of batches."""
    given_up: float
    """ELBO gap of all batches together, in nats."""
    batches: tuple[BatchRecord, ...]
    """The latest batches."""
    points: tuple[int, ...]
    """Number of each inducing point, in the order of arrival."""
    memory_points: tuple[int, ...]
    """Number of each point of the memory."""
    arrived: int
    """Number of points that there ever were."""
    memories: tuple[Memory, ...] = ()
    """Memory of all rows, or of each batch of a window, the oldest first. None if the posterior
    is all that is remembered."""
    first: FirstRows | None = None
    """The first rows, as long as they are kept."""
    waiting: float = 0.0
    """Number of observations since the hyper-parameters were last optimised."""
    steps: Steps | None = None
    """The latest steps of the hyper-parameters."""
    noise_share: Float[Tensor, "*outputs"] | None = None
    """The noise variance of the posterior, relative to that which the bound has learnt."""

    @classmethod
    def of_fit(
        cls, N: float, *, gap: float, batches: tuple[BatchRecord, ...], M: int
    ) -> "StreamRecord":
        """Return the record of a fit to N observations."""
        points = tuple(range(M))
        return cls(N, N, 1, gap * N, batches, points, points, M)

    def plus(
        self,
        batch: BatchRecord,
        *,
        share: float,
        given_up: float,
        kept: Sequence[bool],
        selected: Sequence[bool],
        memories: tuple[Memory, ...],
        first: FirstRows | None,
        waiting: float,
        steps: Steps | None,
        noise_share: Float[Tensor, "*outputs"] | None,
    ) -> "StreamRecord":
        """Return the record after another batch, whose added and dropped points are counted.

        Args:
            share: share of the earlier observations that is still remembered.
            kept: which points of the old memory are left.
            selected: which points of the new memory are inducing points.
        """
        old = tuple(n for n, stays in zip(self.memory_points, kept, strict=True) if stays)
        arrived = self.arrived + len(selected) - len(old)
        memory_points = (*old, *range(self.arrived, arrived))
        points = tuple(n for n, own in zip(memory_points, selected, strict=True) if own)
        before, after = set(self.points), set(points)
        batch = replace(batch, added=len(after - before), dropped=len(before - after))
        return StreamRecord(
            seen=self.seen + batch.rows,
            remembered=share * self.remembered + batch.rows,
            count=self.count + 1,
            given_up=given_up,
            batches=(*self.batches, batch)[-KEPT_BATCHES:],
            points=points,
            memory_points=memory_points,
            arrived=arrived,
            memories=memories,
            first=first,
            waiting=waiting,
            steps=None if steps is None else steps.cpu(),
            noise_share=noise_share,
        )

    def renumbered(self, M: int, *, given_up: float) -> "StreamRecord":
        """Return the record of a model whose M inducing points are all new."""
        numbers = range(self.arrived, self.arrived + M)
        points = tuple(numbers)
        return replace(
            self,
            given_up=given_up,
            points=points,
            memory_points=points,
            arrived=numbers.stop,
            memories=(),
            noise_share=None,
        )


def _weights(rows: Dataset) -> Tensor:
    return torch.ones_like(rows.X[:, 0]) if rows.weights is None else rows.weights


def _noise(rows: Dataset) -> Tensor:
    return torch.zeros_like(rows.Y) if rows.noise is None else rows.noise
