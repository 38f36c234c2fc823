"""Objectives of selection: the bound of a subset of the candidates, and its marginal gains.

A model that implements `SubsetObjective.value` can have its inducing points selected by the paper's
gradient estimators. Exact marginal gains (`MarginalGainObjective`) make natural gradients fast.

`SubsetStatistics` have the collapsed bound of any subset without the data. One pass over the data,
O(N K²), gives the `Moments` (`bounds`); nothing after that depends on N. They are exact at fixed
hyper-parameters for Gaussian noise, and exact for the surrogate of Gaussian sites otherwise. A
discrete search moves from subset to subset, one candidate or a block of them at a time; see
`elimination` for the states and the formulas.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from winnowgp.bounds.collapsed import Moments, Subset
from winnowgp.errors import InputError
from winnowgp.linalg import definite_cholesky, solve_lower, subset_factors
from winnowgp.selection.elimination import DataRoot, EliminationState, Roots
from winnowgp.typing import Mask, Masks, Nats, Weights

_ELEMENTS = 2**22  # of the largest temporary in `value`: 32 MiB in float64


class SubsetObjective(ABC):
    """The bound of a model on its data, as a function of the subset of candidates in use."""

    @property
    @abstractmethod
    def K(self) -> int:
        """Number of candidates."""

    @abstractmethod
    def value(self, mask: Masks) -> Nats:
        """Return the bound L(Z) of each of S subsets in nats, summed over the data.

        Differentiable with respect to the model's parameters where the model is.
        """


class MarginalGainObjective(SubsetObjective):
    """An objective that computes the marginal gains of all candidates exactly and cheaply."""

    @abstractmethod
    def marginal_gains(self, mask: Mask) -> Float[Tensor, " K"]:
        """Return L(Z ∪ k) − L(Z \\ k) in nats for every candidate k at once."""


class RelaxedObjective(SubsetObjective):
    """An objective that is also defined for weights in [0, 1] instead of masks."""

    @abstractmethod
    def relaxed_value(self, weights: Weights) -> Nats:
        """Return L̂(Z*; b) in nats, which equals `value` where every weight is 0 or 1."""


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


@final
@dataclass(frozen=True, slots=True)
class SubsetStatistics(MarginalGainObjective):
    """Exact bounds of subsets at fixed hyper-parameters, for Gaussian noise or Gaussian sites.

    Latent functions with different kernels that share inducing points have L(Z) = Σ_f L_f(Z), a
    term for each kernel; every operation then costs as much as for one, times their number.

    Attributes:
        terms: roots of the candidates' covariances under each kernel.
    """

    terms: tuple[Roots, ...]

    def __post_init__(self) -> None:
        if len({(term.K, term.N) for term in self.terms}) != 1:
            raise InputError(
                "`terms` must be roots of the same candidates and observations; got [K, N] of "
                f"{[[term.K, term.N] for term in self.terms]}."
            )

    @property
    def K(self) -> int:
        """Number of candidates."""
        return self.terms[0].K

    @property
    def N(self) -> int | float:
        """Number of observations; with sample weights, their sum."""
        return self.terms[0].N

    @property
    def empty(self) -> Float[Tensor, ""]:
        """Bound L(∅) without inducing points, in nats."""
        return torch.stack([term.empty for term in self.terms]).sum()

    def value(self, mask: Bool[Tensor, "S K"]) -> Float[Tensor, " S"]:
        """Return the collapsed bound of each subset in nats; O(S K M²).

        L(Z) = Σ_p log N(y_p | 0, Q_ff + W⁻¹) − (P/2) Σ_i w_i (k_ii − q_ii), with
        Q_ff = K_fI (K_II + jitter·I)⁻¹ K_If. The empty subset has Q_ff = 0.
        """
        if len(mask) == 0:
            return self.empty.new_empty(0)
        width = max(int(mask.sum(dim=1).max()), 1)
        size = max(_ELEMENTS // (width * max(self.K, 1)), 1)
        gains = [
            torch.stack([_gain_over_empty(roots, masks) for roots in self.terms]).sum(0)
            for masks in mask.split(size)
        ]
        return torch.cat(gains) + self.empty

    def marginal_gains(self, mask: Bool[Tensor, " K"]) -> Float[Tensor, " K"]:
        """Return L(Z ∪ k) − L(Z \\ k) in nats for every candidate k at once; O(K² M)."""
        return self.search_state(mask).marginal_gains()

    def search_state(self, mask: Bool[Tensor, " K"]) -> EliminationState:
        """Return the search state of a subset; moves to neighbouring subsets cost O(K²)."""
        return EliminationState.of(self.terms, mask)

    def restrict(self, mask: Bool[Tensor, " K"]) -> "SubsetStatistics":
        """Return the statistics of a subset of the candidates, numbered from zero; O(K² M)."""
        return SubsetStatistics(tuple(roots.restrict(mask) for roots in self.terms))

    def correlations(self) -> Float[Tensor, "K K"]:
        """Return the prior correlations of the candidates under the first kernel; O(K³)."""
        rows = torch.nn.functional.normalize(self.terms[0].L, dim=1)
        return rows @ rows.mT

    def shifted(self, nats: float) -> "SubsetStatistics":
        """Return the statistics with a constant added to the bound of every subset."""
        first, *others = self.terms
        return SubsetStatistics((replace(first, empty=first.empty + nats), *others))


def subset_statistics(L: Float[Tensor, "K K"], *moments: Moments) -> SubsetStatistics:
    """Return the statistics of moments that were whitened with L; O(K³).

    Args:
        L: root of K_** + jitter·I.
        moments: one for each group of outputs that share their row weights.
    """
    return SubsetStatistics((whitened_roots(L, *moments),))


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
