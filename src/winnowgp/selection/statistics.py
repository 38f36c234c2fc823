"""Subset statistics: the collapsed bound of any subset of the candidates, without the data.

One pass over the data, O(N K²), gives the moments (`bounds.chunked`); nothing after that depends on
N. The statistics are exact at fixed hyper-parameters for Gaussian noise, and exact for the
surrogate of Gaussian sites otherwise.

A discrete search moves from subset to subset (`EliminationState`), one candidate at a time.
With K_** + jitter·I = L Lᵀ, the moments C = V W Vᵀ and D = V W Y in the coordinates V = L⁻¹ K_*f,
and I + C = R Rᵀ, the candidates have two covariances: the prior L Lᵀ, and
S = K_** + K_*f W K_f* = (L R)(L R)ᵀ. S is never formed: its root L R is exact to rounding, where S
would square the condition number. Outputs with different row weights have their own S and share L.

For each candidate k take the residual or dual row (see `linalg.residuals_and_duals`) in both
geometries: e of L, the prior, and h of L R, prior plus data. For k outside the subset ‖e‖² and ‖h‖²
are its variances given the subset; for k inside they are its precisions given the other inducing
points. With s = +1 outside and −1 inside, the marginal gain is exactly

    L(Z ∪ k) − L(Z \\ k) = ½ [ P (‖eᵀR‖²/‖e‖² − 1) + ‖hᵀy‖²/‖h‖² − s P log(‖h‖²/‖e‖²) ],

the sum of explained variance, fit to the targets and change of volume. Gains of outputs with their
own R add up. Adding or removing a candidate changes each matrix of rows by a rank-one term: O(K²),
where a new state costs O(K² M).
"""

from dataclasses import dataclass
from functools import partial, reduce
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from winnowgp.bounds.chunked import Moments
from winnowgp.bounds.collapsed import Subset
from winnowgp.errors import InputError
from winnowgp.linalg import (
    definite_cholesky,
    rank_one_update,
    residuals_and_duals,
    solve_lower,
    subset_factors,
)
from winnowgp.selection.objective import SearchObjective, SearchState
from winnowgp.typing import Mask, Masks, Nats


@dataclass(frozen=True, slots=True)
class DataRoot:
    """Root of one S, and the targets of its outputs in the coordinates of that root.

    Attributes:
        R: root of I + C.
        LR: root of S.
        y: R⁻¹ D, so that K_*f W Y = L R y; one column per output whose mean is learnt here.
        P: number of outputs whose covariance is learnt here; equal to the columns of `y` unless
            means and covariances have different inducing points.
    """

    R: Float[Tensor, "K K"]
    LR: Float[Tensor, "K K"]
    y: Float[Tensor, "K Y"]
    P: int


@dataclass(frozen=True, slots=True)
class Roots:
    """Roots of the candidates' covariances.

    Attributes:
        L: root of K_** + jitter·I, the prior covariance.
        data: one root per set of row weights.
        empty: bound without inducing points, in nats.
        N: number of observations behind the moments.
    """

    L: Float[Tensor, "K K"]
    data: tuple[DataRoot, ...]
    empty: Float[Tensor, ""]
    N: int | float

    @property
    def K(self) -> int:
        """Number of candidates."""
        return len(self.L)


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


@dataclass(frozen=True, slots=True)
class DataRows:
    """Rows of a search state that depend on the data, for outputs that share their row weights.

    Attributes:
        ER: E R.
        H: residuals and duals of L R.
    """

    ER: Float[Tensor, "J K"]
    H: Float[Tensor, "J K"]


@dataclass(frozen=True, slots=True)
class EliminationState(SearchState):
    """A subset, with the residual and dual rows of J candidates.

    Attributes:
        roots: roots of the candidates' covariances.
        candidates: candidate of each row.
        included: which candidates are in the subset.
        E: residuals and duals of L.
        data: rows for each root of the data.
        bound: L(Z) in nats.
    """

    roots: Roots
    candidates: Int[Tensor, " J"]
    included: Bool[Tensor, " J"]
    E: Float[Tensor, "J K"]
    data: tuple[DataRows, ...]
    bound: Float[Tensor, ""]

    @classmethod
    def of(cls, roots: Roots, mask: Bool[Tensor, " K"]) -> "EliminationState":
        """Return the state of a subset, computed afresh; O(K² M)."""
        E, Q = residuals_and_duals(roots.L, mask)
        bound, data = roots.empty, []
        for root in roots.data:
            rows, gain = _data_rows(roots.L, root, mask, E=E, Q=Q)
            data.append(rows)
            bound = bound + gain
        return cls(
            roots=roots,
            candidates=torch.arange(roots.K, device=mask.device),
            included=mask.clone(),
            E=E,
            data=tuple(data),
            bound=bound,
        )

    @property
    def mask(self) -> Bool[Tensor, " K"]:
        mask = torch.zeros(self.roots.K, dtype=torch.bool, device=self.E.device)
        mask[self.candidates] = self.included
        return mask

    def marginal_gains(self) -> Float[Tensor, " J"]:
        """Return L(Z ∪ k) − L(Z \\ k) in nats; positive values favour including k. O(J K)."""
        prior = self.E.square().sum(dim=1)
        gains = []
        for root, rows in zip(self.roots.data, self.data, strict=True):
            joint = rows.H.square().sum(dim=1)
            explained = rows.ER.square().sum(dim=1) / prior - 1
            volume = (joint / prior).log()
            fit = (rows.H @ root.y).square().sum(dim=1) / joint
            covariance = explained + torch.where(self.included, volume, -volume)
            gains.append(torch.add(fit, covariance, alpha=root.P))
        return 0.5 * reduce(torch.add, gains)

    def toggle(self, index: int, *, gain: Float[Tensor, ""]) -> "EliminationState":
        """Return the state after adding or removing candidate `index`; O(J K)."""
        leaves = bool(self.included[index])
        same = self.included == leaves
        update = partial(
            rank_one_update,
            rows=self.candidates,
            same=None if bool(same.all()) else same,
            leaves=leaves,
            at=index,
        )
        a, q = update(self.roots.L, self.E)
        norm = torch.linalg.vector_norm(self.E[index])
        data = []
        for root, rows in zip(self.roots.data, self.data, strict=True):
            b, p = update(root.LR, rows.H)
            ER = torch.addr(rows.ER, a, rows.ER[index] / norm)
            data.append(DataRows(ER=ER, H=torch.addr(rows.H, b, p)))
        included = self.included.clone()
        included[index] = not leaves
        return EliminationState(
            roots=self.roots,
            candidates=self.candidates,
            included=included,
            E=torch.addr(self.E, a, q),
            data=tuple(data),
            bound=self.bound - gain if leaves else self.bound + gain,
        )

    def remove(self, index: Int[Tensor, " 1"], *, gain: Float[Tensor, " 1"]) -> "EliminationState":
        a, e = _removal(self.E, index)
        data = []
        for rows in self.data:
            b, h = _removal(rows.H, index)
            data.append(
                DataRows(
                    ER=torch.addr(rows.ER, a, rows.ER.index_select(0, index)[0], alpha=-1),
                    H=torch.addr(rows.H, b, h, alpha=-1),
                )
            )
        return EliminationState(
            roots=self.roots,
            candidates=self.candidates,
            included=self.included.index_fill(0, index, False),
            E=torch.addr(self.E, a, e, alpha=-1),
            data=tuple(data),
            bound=self.bound - gain[0],
        )

    def restrict(self, keep: Bool[Tensor, " J"]) -> "EliminationState":
        return EliminationState(
            roots=self.roots,
            candidates=self.candidates[keep],
            included=self.included[keep],
            E=self.E[keep],
            data=tuple(DataRows(ER=rows.ER[keep], H=rows.H[keep]) for rows in self.data),
            bound=self.bound,
        )


def _removal(
    E: Float[Tensor, "J K"], index: Int[Tensor, " 1"]
) -> tuple[Float[Tensor, " J"], Float[Tensor, " K"]]:
    """Return a and e for the update E − a eᵀ of the dual rows when row `index` is removed."""
    e = E.index_select(0, index)[0]
    along = E @ e
    return along / along.index_select(0, index), e


def _data_rows(
    L: Float[Tensor, "K K"],
    root: DataRoot,
    mask: Bool[Tensor, " K"],
    *,
    E: Float[Tensor, "K K"],
    Q: Float[Tensor, "M K"],
) -> tuple[DataRows, Float[Tensor, ""]]:
    """Return the data rows of a state, and the gain of the subset over the empty subset."""
    H, QS = residuals_and_duals(root.LR, mask)
    QR = Q @ root.R
    ER = torch.empty_like(E)
    # Inside E = (E Qᵀ) Q; outside E = L − (L Qᵀ) Q, and L R is known: O(K² M) instead of O(K³).
    ER[mask] = (E[mask] @ Q.mT) @ QR
    ER[~mask] = root.LR[~mask] - (L[~mask] @ Q.mT) @ QR
    # log|S_II|/|K_II| from the diagonals of the triangles T = (rows I) Qᵀ.
    T, TS = (L[mask] @ Q.mT).diagonal(), (root.LR[mask] @ QS.mT).diagonal()
    log_det = 2 * (TS / T).abs().log().sum()
    fit = (QS @ root.y).square().sum()
    gain = 0.5 * (fit + root.P * (QR.square().sum() - Q.shape[0] - log_det))
    return DataRows(ER=ER, H=H), gain


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
class SummedState(SearchState):
    """A subset under several kernels, whose bounds and marginal gains are summed."""

    terms: tuple[EliminationState, ...]
    candidates: Int[Tensor, " J"]
    included: Bool[Tensor, " J"]
    bound: Float[Tensor, ""]

    @classmethod
    def of(cls, terms: tuple[EliminationState, ...], *, bound: Float[Tensor, ""]) -> "SummedState":
        """Return the sum of states of the same subset; `bound` is the sum of their bounds."""
        return cls(terms, terms[0].candidates, terms[0].included, bound)

    @property
    def mask(self) -> Bool[Tensor, " K"]:
        return self.terms[0].mask

    def marginal_gains(self) -> Float[Tensor, " J"]:
        return torch.stack([term.marginal_gains() for term in self.terms]).sum(0)

    def toggle(self, index: int, *, gain: Float[Tensor, ""]) -> "SummedState":
        bound = self.bound - gain if bool(self.included[index]) else self.bound + gain
        # Only the bound of the sum is used; those of the terms are not updated.
        terms = tuple(term.toggle(index, gain=torch.zeros_like(gain)) for term in self.terms)
        return SummedState.of(terms, bound=bound)

    def remove(self, index: Int[Tensor, " 1"], *, gain: Float[Tensor, " 1"]) -> "SummedState":
        terms = tuple(term.remove(index, gain=torch.zeros_like(gain)) for term in self.terms)
        return SummedState.of(terms, bound=self.bound - gain[0])

    def restrict(self, keep: Bool[Tensor, " J"]) -> "SummedState":
        return SummedState.of(tuple(term.restrict(keep) for term in self.terms), bound=self.bound)


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
