"""Held-out log densities at fixed hyper-parameters, by cross-validation of the selection.

Inducing points that were selected among the rows suit these rows better than fresh ones. So a row's
own density is not that of a fresh row, even with the row left out of the data: neither if its
inducing point stays (optimistic by 0.01 to 0.09 nats on six tables) nor if it goes, because without
the row a neighbour would have been selected (pessimistic by 0.02 to 0.1). Here the selection itself
is repeated without the rows that are then predicted: a tenth of them at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf, sqrt
from typing import TypeAlias

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float, Int
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.linalg import threads_for
from winnowgp.models import SparseGP
from winnowgp.models.base import InducingModel
from winnowgp.models.exact_gp import exact_log_density
from winnowgp.models.kernels import cross_covariance
from winnowgp.selection import backward_elimination

FOLDS = 10
# Largest number of rows of a fold.
_MOST_ROWS = 2000
_TINY = 1e-300

Relocation: TypeAlias = Callable[[InducingModel, Dataset], InducingModel]
"""A function that returns a model with locations that suit some rows."""


@dataclass(frozen=True, slots=True)
class PredictiveGap:
    """How much better one model predicts held-out rows than another."""

    nats: float
    """Mean difference of the log densities per observation; positive if the reference is better."""
    standard_error: float
    """Standard error of this mean over rows, at fixed models; infinite for a single row."""

    @classmethod
    def of(
        cls,
        reference: Float[Tensor, " n"],
        other: Float[Tensor, " n"],
        *,
        weights: Float[Tensor, " n"] | None = None,
    ) -> "PredictiveGap":
        """Compare the log densities of two models for the same held-out rows.

        The rows are paired: with d_i = reference_i − other_i and weights w_i (one by default)

            nats = Σ w_i d_i / Σ w_i,   standard_error² = n/(n − 1) Σ w_i² (d_i − nats)² / (Σ w_i)².

        >>> PredictiveGap.of(torch.tensor([1.0, 3.0]), torch.tensor([0.0, 0.0]))
        PredictiveGap(nats=2.0, standard_error=1.0)
        """
        if reference.shape != other.shape or not len(other):
            raise InputError(
                "`reference` and `other` must be log densities of the same rows, at least one; got "
                f"{list(reference.shape)} and {list(other.shape)}."
            )
        n, difference = len(other), (reference - other).double()
        w = torch.ones_like(difference) if weights is None else weights.to(difference)
        nats = ((w * difference).sum() / w.sum()).item()
        if n == 1:
            return cls(nats, inf)
        scatter = ((w * (difference - nats)).square().sum() / w.sum().square()).item()
        return cls(nats, sqrt(n / (n - 1) * scatter))


@dataclass(frozen=True, slots=True)
class CrossValidation:
    """Rows in memory, some of which are held out in turn."""

    data: Dataset
    folds: tuple[Int[Tensor, " _"], ...]
    """Rows that are held out together."""

    @classmethod
    def of(cls, data: Dataset, order: Int[Tensor, " N"], *, folds: int) -> "CrossValidation":
        """Hold out up to `folds` tenths of the rows, the first ones of a random order."""
        size = min(ceil(data.N / FOLDS), _MOST_ROWS)
        return cls(data, order.split(size)[: max(1, min(folds, FOLDS))])

    @property
    def weights(self) -> Float[Tensor, " n"] | None:
        """Weights of the held-out rows, fold by fold."""
        return None if self.data.weights is None else self.data.weights[torch.cat(self.folds)]

    def mean(self, densities: Float[Tensor, " n"]) -> float:
        """Return the mean log density per observation."""
        weights = self.weights
        if weights is None:
            return densities.mean().item()
        return float(weights @ densities / weights.sum())

    def gap(self, reference: Float[Tensor, " n"], other: Float[Tensor, " n"]) -> PredictiveGap:
        """Compare two models by the log densities of the held-out rows."""
        return PredictiveGap.of(reference, other, weights=self.weights)

    def densities(
        self,
        model: InducingModel,
        M: int | None = None,
        *,
        relocate: Relocation | None = None,
    ) -> Float[Tensor, " n"]:
        """Return log densities of the held-out rows, in nats, summed over observed targets.

        Candidates at held-out rows give way to neighbours, unless another row has the same inputs.

        Args:
            M: number of inducing points that are selected from the model's candidates without the
                held-out rows; all candidates by default.
            relocate: optimises the locations without the held-out rows. Those that were optimised
                with them suit them better than fresh rows, by 0.003 nats on 67 draws of known GPs.
        """
        return self.path(model, [model.K if M is None else M], relocate=relocate)[0]

    @torch.no_grad()
    def path(
        self, model: InducingModel, sizes: Sequence[int], *, relocate: Relocation | None = None
    ) -> Float[Tensor, "S n"]:
        """Return log densities along the elimination, for several numbers of inducing points."""
        # Each of many small operations would wait for its threads beside busy processes.
        with threads_for(10.0 * model.K**3):
            return self._path(model, sizes, relocate)

    def _path(
        self, model: InducingModel, sizes: Sequence[int], relocate: Relocation | None
    ) -> Float[Tensor, "S n"]:
        results: list[list[Tensor]] = [[] for _ in sizes]
        for rest, rows in self._splits():
            Z = _without(model.kernel, model.candidates.detach(), rows.X, rest.X)
            pool = model.with_candidates(Z)
            if relocate is not None:
                pool = relocate(pool, rest)
            masks = None
            if min(sizes) < pool.K:
                statistics = pool.subset_statistics(rest)
                masks = backward_elimination(statistics, smallest=min(sizes)).masks
            for M, densities in zip(sizes, results, strict=True):
                selected = pool
                if masks is not None and pool.K > M:
                    selected = pool.prune(masks[pool.K - M])
                posterior = selected.with_best_q(rest).posterior(rest)
                nats = posterior.log_density(rows.X, rows.Y, noise=rows.noise)
                densities.append(nats.masked_fill(torch.isnan(rows.Y), 0.0).sum(1))
        return torch.stack([torch.cat(densities) for densities in results])

    def exact_densities(self, model: SparseGP) -> Float[Tensor, " n"]:
        """Return log densities of the held-out rows under the exact posterior; O(N³) per fold.

        Raises:
            NotPositiveDefiniteError: a covariance is singular to working precision.
        """
        densities = []
        for rest, rows in self._splits():
            densities.append(
                exact_log_density(
                    model.kernel, data=rest, mean=model.mean, noise=model.noise, rows=rows
                )
            )
        return torch.cat(densities)

    def _splits(self) -> Iterator[tuple[Dataset, Dataset]]:
        """Iterate over the rows without a fold, and the rows of the fold."""
        for held in self.folds:
            rest = torch.ones(self.data.N, dtype=torch.bool, device=held.device)
            rest[held] = False
            yield self.data.part(rest.nonzero().flatten()), self.data.part(held)

    def smallest(self, model: InducingModel, sizes: Sequence[int], *, tolerance: float) -> int:
        """Return the smallest of some sizes that predicts as well as all candidates do.

        The gap and its standard error together must not exceed the tolerance, at this size and all
        larger ones: one lucky small size among many is no evidence.

        Args:
            sizes: numbers of inducing points, in ascending order.
            tolerance: nats per observation.
        """
        reference, *others = self.path(model, [model.K, *sizes])
        best = model.K
        for M, densities in zip(reversed(sizes), reversed(others), strict=True):
            gap = self.gap(reference, densities)
            if gap.nats + gap.standard_error > tolerance:
                break
            best = M
        return best


def _without(
    kernel: Kernel, Z: Float[Tensor, "K D"], held: Float[Tensor, "n D"], rest: Float[Tensor, "m D"]
) -> Float[Tensor, "J D"]:
    """Return the points with those at held-out rows only replaced.

    Each gives way to the free row of the highest correlation, if there is one: without the held-out
    row, that neighbour would have become a candidate.
    """
    places = torch.cat([Z, held, rest]).unique(dim=0, return_inverse=True)[1]
    point, at_held, at_rest = places.split([len(Z), len(held), len(rest)])
    own = torch.isin(point, at_held) & ~torch.isin(point, at_rest)
    kept, free = Z[~own], rest[~torch.isin(at_rest, point)]
    if not own.any() or not len(free):
        return kept
    cross, variance = cross_covariance(kernel, Z[own])(free)
    nearest = (cross / variance.clamp_min(_TINY).sqrt()[:, None]).argmax(0).unique()
    return torch.cat([kept, free[nearest]])
