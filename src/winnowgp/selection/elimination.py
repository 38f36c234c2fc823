"""Search states: a subset of the candidates, its marginal gains, and moves to other subsets.

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

Backward elimination uses only duals, and two facts about them make it fast:

- Removing a block B of inducing points projects the other duals off the span of the removed ones.
  With the LQ factorisation E_B = T Q, E ← E − (E Qᵀ) Q and ER ← ER − (E Qᵀ) Q R; H has a
  factorisation T' Q' of its own. One matrix product replaces |B| passes over the rows. When b is
  removed after those before it, its duals are e = T_bb q_b and h = T'_bb q'_b, so that its gain is
  ½ [ P (‖q_bᵀR‖² − 1) + ‖q'_bᵀy‖² + 2 P log|T'_bb/T_bb| ].
- Gains of c candidates, and their changes as these candidates leave, depend only on inner products
  among the c rows of E, of ER, and of H with y. The rows may be replaced by the triangles of their
  LQ factorisations, E_c = T Q with T of c by c. Inner products are never formed: they would square
  the condition number.

A subset I is a problem of its own with M = |I| candidates (`Roots.restrict`). With the LQ
factorisations L_I = T Q and Q R = R' Q', its roots are L' = T, R' and y' = Q' y.
"""

from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from winnowgp.linalg import rank_one_update, residuals_and_duals
from winnowgp.selection.contenders import ContenderRows, Contenders
from winnowgp.selection.objective import BlockRemoval, SearchState


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
    """Roots of the candidates' covariances, all lower triangular.

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

    def restrict(self, mask: Bool[Tensor, " K"]) -> "Roots":
        """Return the roots of a subset of the candidates, in M coordinates; O(K² M).

        With L_I = T Q and Q R = R' Q', K_II = T Tᵀ, S_II = (T R')(T R')ᵀ and b_I = T R' (Q' y).
        """
        Qt, Tt = torch.linalg.qr(self.L[mask].mT)
        data, M = [], Tt.shape[1]
        for root in self.data:
            triangle = torch.linalg.qr(torch.cat([root.R.mT @ Qt, root.y], 1), mode="r").R[:M]
            R = triangle[:, :M].mT.contiguous()
            data.append(DataRoot(R=R, LR=Tt.mT @ R, y=triangle[:, M:], P=root.P))
        return replace(self, L=Tt.mT.contiguous(), data=tuple(data))


@dataclass(frozen=True, slots=True)
class DataRows:
    """Rows of a search state that depend on the data, for outputs that share their row weights.

    Attributes:
        ER: E R.
        H: residuals and duals of L R.
        y: targets in the coordinates of H.
        P: number of outputs whose covariance is learnt here.
    """

    ER: Float[Tensor, "J C"]
    H: Float[Tensor, "J C"]
    y: Float[Tensor, "C Y"]
    P: int


@dataclass(frozen=True, slots=True)
class EliminationState(SearchState):
    """A subset, with the residual and dual rows of J candidates in C = K coordinates.

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
    E: Float[Tensor, "J C"]
    data: tuple[DataRows, ...]
    bound: Float[Tensor, ""]

    @classmethod
    def of(cls, roots: Roots, mask: Bool[Tensor, " K"]) -> "EliminationState":
        """Return the state of a subset, computed afresh; O(K² M)."""
        if bool(mask.all()):
            return cls.of_all(roots)
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

    @classmethod
    def of_all(cls, roots: Roots) -> "EliminationState":
        """Return the state of all candidates: the duals of a triangle are the rows of L⁻ᵀ; O(K³).

        L(Z*) − L(∅) = ½ Σ [‖y‖² + P (‖R‖² − K − 2 log|R|)].
        """
        E, bound, data = _inverse(roots.L).mT, roots.empty, []
        for root in roots.data:
            H = _inverse(root.LR).mT
            data.append(DataRows(ER=E @ root.R, H=H, y=root.y, P=root.P))
            log_det = 2 * root.R.diagonal().abs().log().sum()
            explained = root.R.square().sum() - roots.K
            bound = bound + 0.5 * (root.y.square().sum() + root.P * (explained - log_det))
        return cls(
            roots=roots,
            candidates=torch.arange(roots.K, device=E.device),
            included=torch.ones(roots.K, dtype=torch.bool, device=E.device),
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
        """Return L(Z ∪ k) − L(Z \\ k) in nats; positive values favour including k. O(J C)."""
        prior = _squared_norms(self.E)
        gains = []
        for rows in self.data:
            joint = _squared_norms(rows.H)
            explained = _squared_norms(rows.ER) / prior - 1
            volume = (joint / prior).log()
            fit = (rows.H @ rows.y).square().sum(dim=1) / joint
            covariance = explained + torch.where(self.included, volume, -volume)
            gains.append(torch.add(fit, covariance, alpha=rows.P))
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
            data.append(replace(rows, ER=ER, H=torch.addr(rows.H, b, p)))
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

    def cosines(self, rows: Int[Tensor, " c"]) -> Float[Tensor, "c c"]:
        return reduce(
            torch.maximum, [_cosines(A[rows]) for A in (self.E, *(of.H for of in self.data))]
        )

    def block_removal(self, rows: Int[Tensor, " B"]) -> BlockRemoval:
        T, Q = _lower_orthonormal(self.E[rows])
        bases, gains = [Q], []
        for root, of in zip(self.roots.data, self.data, strict=True):
            TS, QS = _lower_orthonormal(of.H[rows])
            QR = Q @ root.R
            fit = (QS @ of.y).square().sum(dim=1)
            volume = 2 * (TS.diagonal() / T.diagonal()).abs().log()
            covariance = _squared_norms(QR) - 1 + volume
            gains.append(torch.add(fit, covariance, alpha=of.P))
            bases += [QR, QS]
        return BlockRemoval(rows=rows, gains=0.5 * reduce(torch.add, gains), bases=tuple(bases))

    def remove_block(self, removal: BlockRemoval) -> "EliminationState":
        keep = torch.ones_like(self.included).index_fill_(0, removal.rows, False)
        rows = keep.nonzero()[:, 0]  # `index_select` takes a third of the time of a mask.
        Q, *bases = removal.bases
        E, data = self.E.index_select(0, rows), []
        A = E @ Q.mT
        for of, QR, QS in zip(self.data, bases[::2], bases[1::2], strict=True):
            ER, H = of.ER.index_select(0, rows), of.H.index_select(0, rows)
            data.append(
                replace(of, ER=ER.addmm_(A, QR, alpha=-1), H=H.addmm_(H @ QS.mT, QS, alpha=-1))
            )
        return replace(
            self,
            candidates=self.candidates[rows],
            included=self.included[rows],
            E=E.addmm_(A, Q, alpha=-1),
            data=tuple(data),
            bound=self.bound - removal.gains.sum(),
        )

    def contenders(self, rows: Int[Tensor, " c"]) -> Contenders:
        return Contenders([self.contender_rows(rows)])

    def contender_rows(
        self, rows: Int[Tensor, " c"]
    ) -> tuple[Float[Tensor, "c c"], tuple[ContenderRows, ...]]:
        """Return the triangles of a few candidates: E, and what depends on the data."""
        data = []
        for of in self.data:
            H, y = _triangle(of.H[rows], of.y)
            data.append(ContenderRows(_triangle(of.ER[rows])[0], H, y, P=of.P))
        return _triangle(self.E[rows])[0], tuple(data)


def _squared_norms(rows: Float[Tensor, "J C"]) -> Float[Tensor, " J"]:
    """Return ‖row‖² of each row, in a quarter of the time of squares and sums."""
    return torch.linalg.vector_norm(rows, dim=1).square()


def _inverse(L: Float[Tensor, "K K"]) -> Float[Tensor, "K K"]:
    """Return the inverse of a lower-triangular matrix; O(K³)."""
    eye = torch.eye(len(L), dtype=L.dtype, device=L.device)
    return torch.linalg.solve_triangular(L, eye, upper=False)


def _triangle(
    rows: Float[Tensor, "c C"], targets: Float[Tensor, "C Y"] | None = None
) -> tuple[Float[Tensor, "c c"], Float[Tensor, "c Y"]]:
    """Return T of the LQ factorisation T Q of c ≤ C rows, and Q targets, on the CPU; O(C c²).

    If there are as many rows as coordinates they are returned as they are: no entry would be saved.
    """
    if len(rows) == rows.shape[1]:
        return rows.cpu(), (rows[:, :0] if targets is None else targets).cpu()
    T, Q = _lower_orthonormal(rows)
    return T.cpu(), (rows[:, :0] if targets is None else Q @ targets).cpu()


def _cosines(rows: Float[Tensor, "c C"]) -> Float[Tensor, "c c"]:
    """Return the absolute cosine of the angle between any two rows."""
    unit = torch.nn.functional.normalize(rows, dim=1)
    return (unit @ unit.mT).abs_()


def _lower_orthonormal(
    rows: Float[Tensor, "B C"],
) -> tuple[Float[Tensor, "B B"], Float[Tensor, "B C"]]:
    """Return T and Q of the LQ factorisation T Q of B ≤ C rows.

    If no row is close to the span of those before, Q comes from the Cholesky factor of the cosines,
    applied twice (CholeskyQR2; Yamamoto et al. 2015): matrix products, which take a fraction of the
    time of Householder reflections on a GPU. Other rows need the reflections.
    """
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    unit = rows / norms
    first, failed = torch.linalg.cholesky_ex(unit @ unit.mT)
    least = torch.finfo(rows.dtype).eps ** 0.2  # Rounding is squared in the cosines.
    if not bool((failed == 0) & (first.diagonal() > least).all()):
        Qt, Tt = torch.linalg.qr(rows.mT)
        return Tt.mT.contiguous(), Qt.mT
    Q = torch.linalg.solve_triangular(first, unit, upper=False)
    second = torch.linalg.cholesky_ex(Q @ Q.mT).L
    return norms * (first @ second), torch.linalg.solve_triangular(second, Q, upper=False)


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
    return DataRows(ER=ER, H=H, y=root.y, P=root.P), gain


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

    def cosines(self, rows: Int[Tensor, " c"]) -> Float[Tensor, "c c"]:
        return reduce(torch.maximum, [term.cosines(rows) for term in self.terms])

    def block_removal(self, rows: Int[Tensor, " B"]) -> BlockRemoval:
        terms = [term.block_removal(rows) for term in self.terms]
        gains = torch.stack([term.gains for term in terms]).sum(0)
        bases = tuple(basis for term in terms for basis in term.bases)
        return BlockRemoval(rows=rows, gains=gains, bases=bases)

    def remove_block(self, removal: BlockRemoval) -> "SummedState":
        terms, start = [], 0
        for term in self.terms:
            end = start + 1 + 2 * len(term.data)
            terms.append(term.remove_block(replace(removal, bases=removal.bases[start:end])))
            start = end
        return SummedState.of(tuple(terms), bound=self.bound - removal.gains.sum())

    def contenders(self, rows: Int[Tensor, " c"]) -> Contenders:
        return Contenders([term.contender_rows(rows) for term in self.terms])
