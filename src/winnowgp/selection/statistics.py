"""Subset statistics: the bound of any subset, independent of N."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from winnowgp.bounds import Moments, Subset
from winnowgp.errors import InputError
from winnowgp.linalg import subset_factors
from winnowgp.selection.elimination import EliminationState, Roots, search_state, whitened_roots
from winnowgp.selection.objective import SearchObjective, SearchState
from winnowgp.typing import Mask, Masks, Nats

# Subset statistics: the collapsed bound of any subset of the candidates, without the data.


_ELEMENTS = 2**22  # of the largest temporary in `value`: 32 MiB in float64


@final
@dataclass(frozen=True, slots=True)
class SubsetStatistics(SearchObjective):
    """Exact scores of subsets under Gaussian likelihoods, or sites, with fixed hyper-parameters.

    One pass over the data, O(N K²), is behind it (`chunked_moments`); after that nothing depends on
    N.
    """

    roots: Roots

    @property
    def K(self) -> int:
        """Number of candidates."""
        return self.roots.K

    @property
    def N(self) -> int | float:
        """Number of observations."""
        return self.roots.N

    @property
    def empty(self) -> Float[Tensor, ""]:
        """Bound with no inducing points, in nats."""
        return self.roots.empty

    def value(self, mask: Bool[Tensor, "S K"]) -> Float[Tensor, " S"]:
        """Collapsed bound of each subset in nats, summed over rows and outputs, O(S K M²).

        L(Z) = Σ_p log N(y_p | 0, Q_ff + W⁻¹) − (P/2) Σ_i w_i (k_ii − q_ii), with
        Q_ff = K_fI (K_II + jitter·I)⁻¹ K_If. The empty subset has Q_ff = 0.
        """
        if len(mask) == 0:
            return self.roots.empty.new_empty(0)
        width = max(int(mask.sum(dim=1).max()), 1)
        size = max(_ELEMENTS // (width * max(self.K, 1)), 1)
        gains = [_gain(self.roots, part) for part in mask.split(size)]
        return torch.cat(gains) + self.roots.empty

    def marginal_gains(self, mask: Bool[Tensor, " K"]) -> Float[Tensor, " K"]:
        """L(Z ∪ k) − L(Z \\ k) in nats for every candidate k at once, in O(K² M)."""
        return self.search_state(mask).marginal_gains()

    def search_state(self, mask: Bool[Tensor, " K"]) -> EliminationState:
        """A subset with all its flips, from which neighbours cost O(K²)."""
        return search_state(self.roots, mask)


def subset_statistics(L: Float[Tensor, "K K"], *moments: Moments) -> SubsetStatistics:
    """Statistics from the root of K_** + jitter·I and the moments whitened with it, O(K³).

    Args:
        moments: one for all outputs whose rows share their weights.
    """
    return SubsetStatistics(roots=whitened_roots(L, *moments))


def _gain(roots: Roots, mask: Bool[Tensor, "S K"]) -> Float[Tensor, " S"]:
    """L(Z) − L(∅) = ½ Σ [ b_Iᵀ S_II⁻¹ b_I − P log|S_II|/|K_II| + P tr(QᵀCQ) ], b = K_*f W Y."""
    subset = Subset.of(mask)
    indices, real = subset.index, subset.present
    T, _ = subset_factors(roots.L, indices, real=real)
    gain = roots.empty.new_zeros(len(mask))
    for data in roots.data:
        TS, fit = subset_factors(data.LR, indices, real=real, targets=data.y)
        # T⁻¹ (L R)_I = Qᵀ R, whose square is tr(I + QᵀCQ)
        QR = torch.linalg.solve_triangular(T, data.LR[indices] * real[:, :, None], upper=False)
        explained = QR.square().sum(dim=(1, 2)) - real.sum(dim=1)
        ratio = TS.diagonal(dim1=1, dim2=2) / T.diagonal(dim1=1, dim2=2)
        log_det = 2 * ratio.abs().log().sum(dim=1)
        gain += 0.5 * (fit.square().sum(dim=(1, 2)) + data.P * (explained - log_det))
    return gain


# Functions with kernels of their own that share their inducing points.


@final
@dataclass(frozen=True, slots=True)
class SummedState(SearchState):
    """One subset in the tableaux of several kernels; flips and bounds add up."""

    parts: tuple[EliminationState, ...]
    rows: Int[Tensor, " J"]
    included: Bool[Tensor, " J"]
    bound: Float[Tensor, ""]

    @classmethod
    def of(cls, parts: tuple[EliminationState, ...], *, bound: Float[Tensor, ""]) -> "SummedState":
        """Of parts that stand on the same subset."""
        return cls(parts, parts[0].rows, parts[0].included, bound)

    @property
    def mask(self) -> Bool[Tensor, " K"]:
        return self.parts[0].mask

    def marginal_gains(self) -> Float[Tensor, " J"]:
        return torch.stack([part.marginal_gains() for part in self.parts]).sum(0)

    def flip(self, at: int, *, worth: Float[Tensor, ""]) -> "SummedState":
        bound = self.bound - worth if bool(self.included[at]) else self.bound + worth
        # Only the sum's bound is read; those of the parts stay behind.
        parts = tuple(part.flip(at, worth=torch.zeros_like(worth)) for part in self.parts)
        return SummedState.of(parts, bound=bound)

    def drop(self, at: Int[Tensor, " 1"], *, worth: Float[Tensor, " 1"]) -> "SummedState":
        parts = tuple(part.drop(at, worth=torch.zeros_like(worth)) for part in self.parts)
        return SummedState.of(parts, bound=self.bound - worth[0])

    def only(self, keep: Bool[Tensor, " J"]) -> "SummedState":
        return SummedState.of(tuple(part.only(keep) for part in self.parts), bound=self.bound)


@final
@dataclass(frozen=True, slots=True)
class SummedStatistics(SearchObjective):
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

    def marginal_gains(self, mask: Mask) -> Float[Tensor, " K"]:
        return self.search_state(mask).marginal_gains()

    def search_state(self, mask: Mask) -> SummedState:
        parts = tuple(part.search_state(mask) for part in self.parts)
        return SummedState.of(parts, bound=torch.stack([part.bound for part in parts]).sum())
