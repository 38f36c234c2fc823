"""Functions with kernels of their own that share their inducing points."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.selection.objective import Place, WalkObjective
from winnowgp.selection.statistics import SubsetStatistics
from winnowgp.selection.tableau import Tableau
from winnowgp.typing import Mask, Masks, Nats


@final
@dataclass(frozen=True, slots=True)
class SummedPlace(Place):
    """One subset in the tableaux of several kernels; flips and bounds add up."""

    parts: tuple[Tableau, ...]
    rows: Int[Tensor, " J"]
    included: Bool[Tensor, " J"]
    bound: Float[Tensor, ""]

    @classmethod
    def of(cls, parts: tuple[Tableau, ...], *, bound: Float[Tensor, ""]) -> "SummedPlace":
        """Of parts that stand on the same subset."""
        return cls(parts, parts[0].rows, parts[0].included, bound)

    @property
    def mask(self) -> Bool[Tensor, " K"]:
        return self.parts[0].mask

    def flips(self) -> Float[Tensor, " J"]:
        return torch.stack([part.flips() for part in self.parts]).sum(0)

    def flip(self, at: int, *, worth: Float[Tensor, ""]) -> "SummedPlace":
        bound = self.bound - worth if bool(self.included[at]) else self.bound + worth
        # Only the sum's bound is read; those of the parts stay behind.
        parts = tuple(part.flip(at, worth=torch.zeros_like(worth)) for part in self.parts)
        return SummedPlace.of(parts, bound=bound)

    def drop(self, at: Int[Tensor, " 1"], *, worth: Float[Tensor, " 1"]) -> "SummedPlace":
        parts = tuple(part.drop(at, worth=torch.zeros_like(worth)) for part in self.parts)
        return SummedPlace.of(parts, bound=self.bound - worth[0])

    def only(self, keep: Bool[Tensor, " J"]) -> "SummedPlace":
        return SummedPlace.of(tuple(part.only(keep) for part in self.parts), bound=self.bound)


@final
@dataclass(frozen=True, slots=True)
class SummedStatistics(WalkObjective):
    """L(Z) = Σ_f L_f(Z): exact scores of subsets that functions with other kernels share.

    Everything costs as much as for one function, times the number of kernels.
    """

    parts: tuple[SubsetStatistics, ...]

    def __post_init__(self) -> None:
        if len({(part.K, part.N) for part in self.parts}) != 1:
            raise InputError(
                "`parts` must be one or more statistics of the same candidates and rows; got "
                f"[K, N] of {[[part.K, part.N] for part in self.parts]}."
            )

    @property
    def K(self) -> int:
        return self.parts[0].K

    @property
    def N(self) -> int | float:
        return self.parts[0].N

    @property
    def empty(self) -> Float[Tensor, ""]:
        return torch.stack([part.empty for part in self.parts]).sum()

    def value(self, mask: Masks) -> Nats:
        return torch.stack([part.value(mask) for part in self.parts]).sum(0)

    def flips(self, mask: Mask) -> Float[Tensor, " K"]:
        return self.tableau(mask).flips()

    def tableau(self, mask: Mask) -> SummedPlace:
        parts = tuple(part.tableau(mask) for part in self.parts)
        return SummedPlace.of(parts, bound=torch.stack([part.bound for part in parts]).sum())
