"""Groups of targets that are observed in the same rows with the same known noise, and their noise.

Target p of row i has the noise variance s_ip + σ_p², where s is known (zero if it is not given) and
σ² is learnt, one for all targets or one each. Targets with the same variance in all rows share
every matrix of a bound. Without known noise, targets with different σ² that are observed in the
same rows share the sum C = V R Vᵀ over rows, which each of them divides by its own σ².
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, final, runtime_checkable

import torch
from jaxtyping import Bool, Float
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
