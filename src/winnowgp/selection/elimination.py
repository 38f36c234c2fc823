"""The state of a backward elimination, updated one point at a time."""

from dataclasses import dataclass
from functools import partial, reduce

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from winnowgp.bounds import Moments
from winnowgp.linalg import definite_cholesky, rank_one_update, residuals_and_duals, solve_lower
from winnowgp.selection.objective import SearchState

# Roots that say everything a collapsed bound needs about the data.
#
# With K_** + jitter·I = L Lᵀ, the moments C = V W Vᵀ and D = V W Y of the data in the coordinates
# V =
# L⁻¹K_*f, and I + C = R Rᵀ, the candidates have two covariances: the prior L Lᵀ, and
# S = K_** + K_*f W K_f* = (L R)(L R)ᵀ. S is never formed: its root L R is exact to rounding where S
# itself would square the condition number. Outputs whose rows have other weights have an S of their
# own and share L.


@dataclass(frozen=True, slots=True)
class DataRoot:
    """Root of one S, and the targets of its outputs seen through it.

    Attributes:
        R: root of I + C.
        LR: root of S.
        y: R⁻¹ D, so that K_*f W Y = L R y; a column for each output whose mean is learnt here.
        P: number of outputs whose covariance is learnt here. The same number, unless means and
            covariances have points of their own.
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
        data: one for each set of weights.
        empty: bound with no inducing points, in nats.
        N: observations behind the moments.
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
    """Roots from that of K_** + jitter·I and the moments whitened with it, O(K³) each.

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
    inner = moments.C.clone()
    inner.diagonal().add_(1.0)
    R = definite_cholesky(inner)
    return DataRoot(R=R, LR=L @ R, y=solve_lower(R, moments.D), P=moments.D.shape[1])


# The tableau: one subset, the exact effect of flipping every candidate, and moving to a neighbour.
#
# For each candidate k take the resolved rows (see `linalg.residuals_and_duals`) in two geometries: e of
# L,
# the prior, and h of L R, prior plus data. Outside the subset ‖e‖² and ‖h‖² are the variances of k
# given the subset under each; inside they are its precisions given the others. With s = +1 outside
# and −1 inside, the flip is exactly
#
#     L(Z ∪ k) − L(Z \ k) = ½ [ P (‖eᵀR‖²/‖e‖² − 1) + ‖hᵀy‖²/‖h‖² − s P log(‖h‖²/‖e‖²) ]:
#
# what k explains, how it fits the targets, what it costs in volume. Outputs with other weights have
# an R of their own and add up. A flip changes each matrix of rows by one rank-one term: O(K²),
# where
# a fresh tableau is O(K² M).


@dataclass(frozen=True, slots=True)
class DataRows:
    """Resolved rows that depend on the data, for outputs that share their weights.

    Attributes:
        ER: E R.
        H: resolved rows of L R.
    """

    ER: Float[Tensor, "J K"]
    H: Float[Tensor, "J K"]


@dataclass(frozen=True, slots=True)
class EliminationState(SearchState):
    """A subset, with the resolved rows of J candidates (all K, or those a search still looks at).

    Attributes:
        roots: of the candidates' covariances.
        rows: which candidate each row belongs to.
        included: which of them are in the subset.
        E: resolved rows of L.
        data: what belongs to each root of the data.
        bound: L(Z) in nats.
    """

    roots: Roots
    rows: Int[Tensor, " J"]
    included: Bool[Tensor, " J"]
    E: Float[Tensor, "J K"]
    data: tuple[DataRows, ...]
    bound: Float[Tensor, ""]

    @property
    def mask(self) -> Bool[Tensor, " K"]:
        """The subset as a mask over all candidates."""
        mask = torch.zeros(self.roots.K, dtype=torch.bool, device=self.E.device)
        mask[self.rows] = self.included
        return mask

    def marginal_gains(self) -> Float[Tensor, " J"]:
        """L(Z ∪ k) − L(Z \\ k) in nats for the J rows; positive favours including k. O(J K)."""
        prior = self.E.square().sum(dim=1)
        parts = []
        for root, rows in zip(self.roots.data, self.data, strict=True):
            joint = rows.H.square().sum(dim=1)
            explained = rows.ER.square().sum(dim=1) / prior - 1
            volume = (joint / prior).log()
            fit = (rows.H @ root.y).square().sum(dim=1) / joint
            learnt = explained + torch.where(self.included, volume, -volume)
            parts.append(torch.add(fit, learnt, alpha=root.P))
        return 0.5 * reduce(torch.add, parts)

    def flip(self, at: int, *, worth: Float[Tensor, ""]) -> "EliminationState":
        """EliminationState of the subset with row `at` on the other side, O(J K).

        Args:
            at: position among the rows.
            worth: entry `at` of `flips`; the bound gains it when the row enters, loses it when it
                leaves.
        """
        leaves = bool(self.included[at])
        same = self.included == leaves
        among = None if bool(same.all()) else same
        step = partial(rank_one_update, rows=self.rows, same=among, leaves=leaves, at=at)
        a, q = step(self.roots.L, self.E)
        norm = torch.linalg.vector_norm(self.E[at])
        data = []
        for root, part in zip(self.roots.data, self.data, strict=True):
            b, p = step(root.LR, part.H)
            ER = torch.addr(part.ER, a, part.ER[at] / norm)
            data.append(DataRows(ER=ER, H=torch.addr(part.H, b, p)))
        included = self.included.clone()
        included[at] = not leaves
        return EliminationState(
            roots=self.roots,
            rows=self.rows,
            included=included,
            E=torch.addr(self.E, a, q),
            data=tuple(data),
            bound=self.bound - worth if leaves else self.bound + worth,
        )

    def drop(self, at: Int[Tensor, " 1"], *, worth: Float[Tensor, " 1"]) -> "EliminationState":
        a, e = _left(self.E, at)
        data = []
        for part in self.data:
            b, h = _left(part.H, at)
            data.append(
                DataRows(
                    ER=torch.addr(part.ER, a, part.ER.index_select(0, at)[0], alpha=-1),
                    H=torch.addr(part.H, b, h, alpha=-1),
                )
            )
        return EliminationState(
            roots=self.roots,
            rows=self.rows,
            included=self.included.index_fill(0, at, False),
            E=torch.addr(self.E, a, e, alpha=-1),
            data=tuple(data),
            bound=self.bound - worth[0],
        )

    def only(self, keep: Bool[Tensor, " J"]) -> "EliminationState":
        """The same subset, looking at fewer rows; included rows must be kept for `mask` to hold."""
        return EliminationState(
            roots=self.roots,
            rows=self.rows[keep],
            included=self.included[keep],
            E=self.E[keep],
            data=tuple(DataRows(ER=part.ER[keep], H=part.H[keep]) for part in self.data),
            bound=self.bound,
        )


def _left(
    E: Float[Tensor, "J K"], at: Int[Tensor, " 1"]
) -> tuple[Float[Tensor, " J"], Float[Tensor, " K"]]:
    """Duals, when one of them leaves, lose their components along it: E becomes E − a eᵀ."""
    e = E.index_select(0, at)[0]
    along = E @ e
    return along / along.index_select(0, at), e


def search_state(roots: Roots, mask: Bool[Tensor, " K"]) -> EliminationState:
    """Fresh tableau of a subset, O(K² M)."""
    E, Q = residuals_and_duals(roots.L, mask)
    bound, data = roots.empty, []
    for root in roots.data:
        rows, gain = _data_rows(roots.L, root, mask, E=E, Q=Q)
        data.append(rows)
        bound = bound + gain
    return EliminationState(
        roots=roots,
        rows=torch.arange(roots.K, device=mask.device),
        included=mask.clone(),
        E=E,
        data=tuple(data),
        bound=bound,
    )


def _data_rows(
    L: Float[Tensor, "K K"],
    root: DataRoot,
    mask: Bool[Tensor, " K"],
    *,
    E: Float[Tensor, "K K"],
    Q: Float[Tensor, "M K"],
) -> tuple[DataRows, Float[Tensor, ""]]:
    """The data's part of a tableau, and what the subset gains over the empty one."""
    H, QS = residuals_and_duals(root.LR, mask)
    QR = Q @ root.R
    ER = torch.empty_like(E)
    # inside E = (E Qᵀ) Q; outside E = L − (L Qᵀ) Q, and L R is at hand: O(K M K), never O(K³)
    ER[mask] = (E[mask] @ Q.mT) @ QR
    ER[~mask] = root.LR[~mask] - (L[~mask] @ Q.mT) @ QR
    # log|S_II|/|K_II| = −Σ log pivots is read off the triangles T = (rows I) Qᵀ
    T, TS = (L[mask] @ Q.mT).diagonal(), (root.LR[mask] @ QS.mT).diagonal()
    log_det = 2 * (TS / T).abs().log().sum()
    fit = (QS @ root.y).square().sum()
    gain = 0.5 * (fit + root.P * (QR.square().sum() - Q.shape[0] - log_det))
    return DataRows(ER=ER, H=H), gain
