"""Subset statistics: the collapsed bound of any subset of the candidates, without the data.

One pass over the data, O(N K²), gives the `Moments` (`bounds`); nothing after that depends on
N. The statistics are exact at fixed hyper-parameters for Gaussian noise, and exact for the
surrogate of Gaussian sites otherwise.

A discrete search moves from subset to subset, one candidate or a block of them at a time; see
`elimination` for the states and the formulas.
"""

from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from winnowgp.bounds.collapsed import Moments, Subset
from winnowgp.errors import InputError
from winnowgp.linalg import definite_cholesky, solve_lower, subset_factors
from winnowgp.selection.elimination import DataRoot, EliminationState, Roots, SummedState
from winnowgp.selection.objective import SearchObjective
from winnowgp.typing import Mask, Masks, Nats


def whitened_roots(L: Float[Tensor, "K K"], *moments: Moments) -> Roots:
    """Return the roots for moments that were whitened with L; O(K³) each.

    L(∅) = Σ [P · constant − ½ (Σ w ‖y‖² + P Σ w k_ii)].
    """
    empty = [m.D.shape[1] * (m.constant - 0.5 * m.diagonal) - 0.5 * m.square for m in moments]
    return Roots(
        L=L,
        data=tuple(_data_root(L, m) for m in moments),
        empty=torch.stack(empty).sum(),
        N=moments[0].N,
    )


def _data_root(L: Float[Tensor, "K K"], moments: Moments) -> DataRoot:
    B = moments.C.clone()
    B.diagonal().add_(1.0)
    R = definite_cholesky(B)
    return DataRoot(R=R, LR=L @ R, y=solve_lower(R, moments.D), P=moments.D.shape[1])


_ELEMENTS = 2**22  # of the largest temporary in `value`: 32 MiB in float64


@final
@dataclass(frozen=True, slots=True)
class SubsetStatistics(SearchObjective):
    """Exact bounds of subsets at fixed hyper-parameters, for Gaussian noise or Gaussian sites."""

    roots: Roots

    @property
    def K(self) -> int:
        """Number of candidates."""
        return self.roots.K

    @property
    def N(self) -> int | float:
        """Number of observations; with sample weights, their sum."""
        return self.roots.N

    @property
    def empty(self) -> Float[Tensor, ""]:
        """Bound without inducing points, in nats."""
        return self.roots.empty

    def value(self, mask: Bool[Tensor, "S K"]) -> Float[Tensor, " S"]:
        """Return the collapsed bound of each subset in nats; O(S K M²).

        L(Z) = Σ_p log N(y_p | 0, Q_ff + W⁻¹) − (P/2) Σ_i w_i (k_ii − q_ii), with
        Q_ff = K_fI (K_II + jitter·I)⁻¹ K_If. The empty subset has Q_ff = 0.
        """
        if len(mask) == 0:
            return self.roots.empty.new_empty(0)
        width = max(int(mask.sum(dim=1).max()), 1)
        size = max(_ELEMENTS // (width * max(self.K, 1)), 1)
        gains = [_gain_over_empty(self.roots, masks) for masks in mask.split(size)]
        return torch.cat(gains) + self.roots.empty

    def marginal_gains(self, mask: Bool[Tensor, " K"]) -> Float[Tensor, " K"]:
        """Return L(Z ∪ k) − L(Z \\ k) in nats for every candidate k at once; O(K² M)."""
        return self.search_state(mask).marginal_gains()

    def search_state(self, mask: Bool[Tensor, " K"]) -> EliminationState:
        """Return the search state of a subset; moves to neighbouring subsets cost O(K²)."""
        return EliminationState.of(self.roots, mask)

    def restrict(self, mask: Bool[Tensor, " K"]) -> "SubsetStatistics":
        """Return the statistics of a subset of the candidates; O(K² M)."""
        return SubsetStatistics(roots=self.roots.restrict(mask))

    def correlations(self) -> Float[Tensor, "K K"]:
        """Return the prior correlations of the candidates; O(K³)."""
        rows = torch.nn.functional.normalize(self.roots.L, dim=1)
        return rows @ rows.mT

    def shifted(self, nats: float) -> "SubsetStatistics":
        """Return the statistics with a constant added to the bound of every subset."""
        return SubsetStatistics(roots=replace(self.roots, empty=self.roots.empty + nats))


def subset_statistics(L: Float[Tensor, "K K"], *moments: Moments) -> SubsetStatistics:
    """Return the statistics of moments that were whitened with L; O(K³).

    Args:
        L: root of K_** + jitter·I.
        moments: one for each group of outputs that share their row weights.
    """
    return SubsetStatistics(roots=whitened_roots(L, *moments))


def _gain_over_empty(roots: Roots, mask: Bool[Tensor, "S K"]) -> Float[Tensor, " S"]:
    """Return L(Z) − L(∅) of each subset, with b = K_*f W Y.

    ½ Σ [b_Iᵀ S_II⁻¹ b_I − P log|S_II|/|K_II| + P tr(QᵀCQ)]
    """
    subset = Subset.of(mask)
    indices, real = subset.index, subset.present
    T, _ = subset_factors(roots.L, indices, real=real)
    gain = roots.empty.new_zeros(len(mask))
    for data in roots.data:
        TS, fit = subset_factors(data.LR, indices, real=real, targets=data.y)
        # T⁻¹ (L R)_I = Qᵀ R, whose squared norm is tr(I + QᵀCQ).
        QR = torch.linalg.solve_triangular(T, data.LR[indices] * real[:, :, None], upper=False)
        explained = QR.square().sum(dim=(1, 2)) - real.sum(dim=1)
        ratio = TS.diagonal(dim1=1, dim2=2) / T.diagonal(dim1=1, dim2=2)
        log_det = 2 * ratio.abs().log().sum(dim=1)
        gain += 0.5 * (fit.square().sum(dim=(1, 2)) + data.P * (explained - log_det))
    return gain


@final
@dataclass(frozen=True, slots=True)
class SummedStatistics(SearchObjective):
    """L(Z) = Σ_f L_f(Z): latent functions with different kernels that share inducing points.

    Every operation costs as much as for one function, times the number of kernels.
    """

    terms: tuple[SubsetStatistics, ...]

    def __post_init__(self) -> None:
        if len({(term.K, term.N) for term in self.terms}) != 1:
            raise InputError(
                "`terms` must be statistics of the same candidates and observations; got [K, N] of "
                f"{[[term.K, term.N] for term in self.terms]}."
            )

    @property
    def K(self) -> int:
        return self.terms[0].K

    @property
    def N(self) -> int | float:
        return self.terms[0].N

    @property
    def empty(self) -> Float[Tensor, ""]:
        return torch.stack([term.empty for term in self.terms]).sum()

    def value(self, mask: Masks) -> Nats:
        return torch.stack([term.value(mask) for term in self.terms]).sum(0)

    def marginal_gains(self, mask: Mask) -> Float[Tensor, " K"]:
        return self.search_state(mask).marginal_gains()

    def search_state(self, mask: Mask) -> SummedState:
        terms = tuple(term.search_state(mask) for term in self.terms)
        return SummedState.of(terms, bound=torch.stack([term.bound for term in terms]).sum())

    def restrict(self, mask: Mask) -> "SummedStatistics":
        return SummedStatistics(tuple(term.restrict(mask) for term in self.terms))
