"""Groups of targets that are observed in the same rows with the same known noise."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from winnowgp.data.dataset import Source


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
