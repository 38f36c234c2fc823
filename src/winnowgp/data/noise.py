"""The noise of observations: groups of targets that share it, and repeated measurements.

Target p of row i has the noise variance s_ip + σ_p², where s is known (zero if it is not given) and
σ² is learnt, one for all targets or one each. Targets with the same variance in all rows share
every matrix of a bound. Without known noise, targets with different σ² that are observed in the
same rows share the sum C = V R Vᵀ over rows, which each of them divides by its own σ².

`pooled` replaces many observations at the same inputs without loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, final, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from winnowgp.data.dataset import Dataset, Source
from winnowgp.typing import Noise, TargetNoise


@runtime_checkable
class WeightedRows(Protocol):
    """Rows with their weights and known noise variances, if there are any: a part of a source."""

    @property
    def weights(self) -> Float[Tensor, " N"] | None: ...

    @property
    def noise(self) -> Float[Tensor, "N P"] | None: ...


@final
@dataclass(frozen=True, slots=True)
class TargetGroup:
    """Targets that are observed in the same rows, and have the same known noise there.

    Attributes:
        targets: their positions among all targets.
        complete: whether no row misses them.
        known: whether the rows have noise of known variance.
        every: whether these are all targets.
    """

    targets: tuple[int, ...]
    complete: bool = True
    known: bool = False
    every: bool = True

    @property
    def P(self) -> int:
        """Number of targets of the group."""
        return len(self.targets)

    @property
    def plain(self) -> bool:
        """Whether every row has all targets of the group, and none has known noise."""
        return self.complete and not self.known

    def columns(self, A: Float[Tensor, "N P"]) -> Float[Tensor, "N p"]:
        """Return the columns of the group."""
        return A if self.every else A[:, list(self.targets)]

    def observed(self, Y: Float[Tensor, "N p"]) -> Bool[Tensor, " N"] | None:
        """Return the rows that have the targets of the group; None if all have."""
        return None if self.complete else ~torch.isnan(Y[:, 0])

    def split(self) -> "tuple[TargetGroup, ...]":
        """Return a group for each target."""
        if self.P == 1:
            return (self,)
        return tuple(TargetGroup((p,), self.complete, self.known, False) for p in self.targets)


def target_groups(source: Source) -> tuple[TargetGroup, ...]:
    """Return the groups of the targets of a source.

    Rows that are not in memory have all targets. Whether their known noise is the same for several
    targets is not compared.
    """
    P, data = source.P, source.as_dataset()
    if data is None:
        every = TargetGroup(tuple(range(P)), known=source.has_noise)
        return every.split() if source.has_noise else (every,)
    missing = torch.isnan(data.Y)
    if P == 1 or (data.noise is None and not bool(missing.any())):
        return (TargetGroup(tuple(range(P)), known=data.noise is not None),)
    key = missing.mT.to(data.Y)
    if data.noise is not None:
        key = torch.cat([key, torch.where(missing, 0.0, data.noise).mT], 1)
    _, index = torch.unique(key, dim=0, return_inverse=True)
    members = [[p for p in range(P) if index[p] == g] for g in index.unique().tolist()]
    return tuple(
        TargetGroup(
            tuple(targets),
            complete=not bool(missing[:, targets[0]].any()),
            known=data.noise is not None,
            every=len(targets) == P,
        )
        for targets in sorted(members)
    )


@final
@dataclass(frozen=True, slots=True)
class GroupRows:
    """The targets of a group in some rows."""

    Y: Float[Tensor, "N p"]
    """Targets minus the prior mean; zero where they are missing."""
    counts: Float[Tensor, " N"] | None
    """Observations that a row counts as: its weight, or zero; None if it is one for every row."""
    variance: Float[Tensor, " N"] | None
    """s_i + σ² if noise is known in part, else None."""

    @property
    def weights(self) -> Float[Tensor, " N"] | None:
        """Factors of the rows in sums that are divided by `NoiseGroup.unit` afterwards."""
        if self.variance is None:
            return self.counts
        return 1 / self.variance if self.counts is None else self.counts / self.variance


@final
@dataclass(frozen=True, slots=True)
class NoiseGroup:
    """A group of targets and their learnt noise variance: one of all of them, or one each."""

    group: TargetGroup
    noise: TargetNoise

    @property
    def separate(self) -> bool:
        """Whether every target of the group has a variance of its own."""
        return self.noise.dim() == 1

    @property
    def unit(self) -> Float[Tensor, ""]:
        """The variance of a row of weight one, where all rows and targets have the same, else 1."""
        return torch.ones_like(self.noise) if self.group.known else self.noise

    def variances(self) -> list[tuple[slice, Float[Tensor, ""]]]:
        """Return the columns that share a variance, and this variance (see `unit`)."""
        if not self.separate:
            return [(slice(None), self.unit)]
        return [(slice(p, p + 1), noise) for p, noise in enumerate(self.noise)]

    def rows(self, rows: WeightedRows, Y: Float[Tensor, "N P"]) -> GroupRows:
        """Return the targets of the group.

        Args:
            rows: rows with their weights and known noise.
            Y: targets of all groups minus the prior mean, NaN where they are missing.
        """
        own, counts, variance = self.group.columns(Y), rows.weights, None
        observed = self.group.observed(own)
        if observed is not None:
            counts = observed.to(Y) if counts is None else observed * counts
            own = torch.where(observed[:, None], own, 0.0)
        if self.group.known:
            assert rows.noise is not None
            variance = rows.noise[:, self.group.targets[0]] + self.noise
        return GroupRows(own, counts, variance)

    def observed_rows(self, data: Dataset) -> Dataset:
        """Return the rows that have the targets of the group, and these targets only."""
        Y = self.group.columns(data.Y)
        observed = self.group.observed(Y)
        part = data if observed is None else data.part(observed.nonzero().flatten())
        noise = None if part.noise is None else self.group.columns(part.noise)
        return Dataset(part.X, self.group.columns(part.Y), part.weights, noise)

    def row_noise(self, rows: WeightedRows) -> Noise:
        """Return s_i + σ² of rows that all have the targets; one number without known noise."""
        if not self.group.known:
            return self.noise
        assert rows.noise is not None
        return rows.noise[:, 0] + self.noise


def noise_groups(
    groups: Sequence[TargetGroup], noise: TargetNoise, *, separate: bool = False
) -> list[NoiseGroup]:
    """Return the groups of targets with their learnt noise.

    Args:
        groups: groups of targets.
        noise: σ², one for all targets or one each.
        separate: whether every variance σ² has a group, also where sums over rows are shared.
    """
    if noise.dim() == 0:
        return [NoiseGroup(group, noise) for group in groups]
    result = []
    for group in groups:
        if separate or group.known or group.P == 1:
            result += [NoiseGroup(single, noise[single.targets[0]]) for single in group.split()]
        else:
            result.append(NoiseGroup(group, noise[list(group.targets)]))
    return result


# Rows are pooled if that leaves at most this share of them.
_MOST_LEFT = 0.5
# Smallest share of the rows of weight above one that have another row at their inputs.
_SEVERAL = 0.25


@torch.no_grad()
def pooled(data: Dataset, *, known: float | None = None) -> Dataset:
    """Return three or more observations at the same inputs as two, with the same likelihood.

    Of observations y_j with noise variances s_j and weights w_j, two observations ȳ ± δ of weight
    c/2 and noise variance s have the Gaussian log-likelihood, whatever the function is there:

        c = Σ w_j,   Λ = Σ w_j/s_j,   s = c/Λ,   ȳ = Σ (w_j/s_j) y_j / Λ,
        δ² = [Σ (w_j/s_j) (y_j − ȳ)² + Σ w_j log(s_j/s)] / Λ ≥ 0

    So does every bound, its gradient and every prediction, at a cost that depends on the number of
    different inputs. If noise is learnt, s_j has an unknown part, which may also depend on the
    inputs: then only rows with the same known noise are pooled, for which ȳ and δ² are the mean
    and the variance of y_j. The rows are returned as they are if fewer than half of them could be
    left out.

    >>> X = torch.zeros(4, 1)
    >>> pooled(Dataset.of(X, torch.tensor([1.0, 2.0, 3.0, 6.0]))).weights
    tensor([2., 2.])

    Args:
        data: rows; targets that are missing (NaN) are so in the whole of a group.
        known: variance of all noise that is not in `data.noise`; None if it is learnt.
    """
    groups, count = _row_groups(data, by_noise=known is None)
    large = count[groups] > 2
    if len(count[count > 2]) * 2 + int((~large).sum()) > _MOST_LEFT * data.N:
        return data
    rest, rows = data.part((~large).nonzero()[:, 0]), data.part(large.nonzero()[:, 0])
    _, index = torch.unique(groups[large], return_inverse=True)
    first = _first(index)
    w = rows.counts[:, None]
    s = torch.ones_like(rows.Y)
    if known is not None:
        s = known + (torch.zeros_like(s) if rows.noise is None else rows.noise)

    def total(terms: Float[Tensor, "N P"]) -> Float[Tensor, "G P"]:
        return terms.new_zeros(len(first), terms.shape[1]).index_add_(0, index, terms)

    c, precision = total(w), total(w / s)
    mean, level = total(w / s * rows.Y) / precision, c / precision
    square = total(w / s * (rows.Y - mean[index]).square() + w * (s / level[index]).log())
    offset = (square / precision).clamp_min(0).sqrt()
    noise = None if rows.noise is None else rows.noise[first]
    if known is not None and noise is not None:
        noise = (level - known).clamp_min(0)
    pair = Dataset(rows.X[first], mean + offset, 0.5 * c[:, 0], noise)
    parts = [pair, replace(pair, Y=mean - offset)]
    if rest.N:
        parts.append(replace(rest, weights=rest.counts))
    return Dataset.joined(parts)


def measured_repeatedly(data: Dataset) -> bool:
    """Return whether a quarter of the rows of weight above one or more have others at their inputs.

    Their differences determine the noise; equal observations alone would imply that there is none.
    A quarter is enough: rounded targets of few different inputs often agree, and copies of rows by
    mistake have no other observations at their inputs.

    >>> X, y = torch.tensor([0.0, 0.0, 1.0])[:, None], torch.tensor([1.0, 2.0, 3.0])
    >>> measured_repeatedly(Dataset.of(X, y, weights=torch.tensor([2.0, 1.0, 2.0])))
    True
    >>> measured_repeatedly(Dataset.of(X, y, weights=torch.tensor([1.0, 1.0, 2.0])))
    False
    """
    if data.weights is None or not bool((data.weights > 1).any()):
        return False
    _, index, count = torch.unique(data.X, dim=0, return_inverse=True, return_counts=True)
    several = count[index][data.weights > 1] > 1
    return several.double().mean().item() >= _SEVERAL


def _row_groups(data: Dataset, *, by_noise: bool) -> tuple[Int[Tensor, " N"], Int[Tensor, " G"]]:
    """Return the group of each row, and the number of rows of each group."""
    columns = [data.X, torch.isnan(data.Y).to(data.X)]
    if by_noise and data.noise is not None:
        columns.append(data.noise)
    _, index, count = torch.unique(
        torch.cat(columns, 1), dim=0, return_inverse=True, return_counts=True
    )
    return index, count


def _first(index: Int[Tensor, " N"]) -> Int[Tensor, " G"]:
    """Return the first row of each group."""
    rows = torch.arange(len(index), device=index.device)
    first = torch.full((int(index.max()) + 1,), len(index), device=index.device)
    return first.scatter_reduce(0, index, rows, "amin")
