"""Search states: a subset of the candidates, its marginal gains, and moves to other subsets.

The algorithms that move, `backward_elimination` among them, are in `search`.

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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import islice
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from winnowgp.linalg import rank_one_update, residuals_and_duals, solve_lower
from winnowgp.selection.contenders import ContenderRows, Contenders
from winnowgp.typing import Scalar


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
class BlockRemoval:
    """Included candidates that are removed in turn.

    Attributes:
        rows: positions among the candidates of a state.
        gains: marginal gain of each when it is removed, those before it being removed, in nats.
        bases: matrices with orthonormal rows, from which the state computes what is left.
    """

    rows: Int[Tensor, " B"]
    gains: Float[Tensor, " B"]
    bases: tuple[Float[Tensor, "B C"], ...]


@dataclass(frozen=True, slots=True)
class KernelRows:
    """The rows of a search state for one kernel: those of J candidates in C = K coordinates.

    Attributes:
        roots: roots of the candidates' covariances.
        E: residuals and duals of L.
        data: rows for each root of the data.
    """

    roots: Roots
    E: Float[Tensor, "J C"]
    data: tuple[DataRows, ...]

    @classmethod
    def of(cls, roots: Roots, mask: Bool[Tensor, " K"]) -> tuple["KernelRows", Scalar]:
        """Return the rows of a subset, computed afresh, and its bound; O(K² M)."""
        if bool(mask.all()):
            return cls.of_all(roots)
        E, Q = residuals_and_duals(roots.L, mask)
        bound, data = roots.empty, []
        for root in roots.data:
            rows, gain = _data_rows(roots.L, root, mask, E=E, Q=Q)
            data.append(rows)
            bound = bound + gain
        return cls(roots, E, tuple(data)), bound

    @classmethod
    def of_all(cls, roots: Roots) -> tuple["KernelRows", Scalar]:
        """Return the rows of all candidates: the duals of a triangle are the rows of L⁻ᵀ; O(K³).

        L(Z*) − L(∅) = ½ Σ [‖y‖² + P (‖R‖² − K − 2 log|R|)].
        """
        eye = torch.eye(roots.K, dtype=roots.L.dtype, device=roots.L.device)
        E, bound, data = solve_lower(roots.L, eye).mT, roots.empty, []
        for root in roots.data:
            H = solve_lower(root.LR, eye).mT
            data.append(DataRows(ER=E @ root.R, H=H, y=root.y, P=root.P))
            log_det = 2 * root.R.diagonal().abs().log().sum()
            explained = root.R.square().sum() - roots.K
            bound = bound + 0.5 * (root.y.square().sum() + root.P * (explained - log_det))
        return cls(roots, E, tuple(data)), bound

    def marginal_gains(self, included: Bool[Tensor, " J"]) -> Float[Tensor, " J"]:
        """Return L(Z ∪ k) − L(Z \\ k) in nats; O(J C)."""
        prior = _squared_norms(self.E)
        gains = []
        for rows in self.data:
            joint = _squared_norms(rows.H)
            explained = _squared_norms(rows.ER) / prior - 1
            volume = (joint / prior).log()
            fit = (rows.H @ rows.y).square().sum(dim=1) / joint
            covariance = explained + torch.where(included, volume, -volume)
            gains.append(torch.add(fit, covariance, alpha=rows.P))
        return 0.5 * reduce(torch.add, gains)

    def toggle(
        self,
        index: int,
        *,
        candidates: Int[Tensor, " J"],
        same: Bool[Tensor, " J"] | None,
        leaves: bool,
    ) -> "KernelRows":
        """Return the rows after adding or removing candidate `index`; see `rank_one_update`."""
        update = partial(rank_one_update, rows=candidates, same=same, leaves=leaves, at=index)
        a, q = update(self.roots.L, self.E)
        norm = torch.linalg.vector_norm(self.E[index])
        data = []
        for root, rows in zip(self.roots.data, self.data, strict=True):
            b, p = update(root.LR, rows.H)
            ER = torch.addr(rows.ER, a, rows.ER[index] / norm)
            data.append(replace(rows, ER=ER, H=torch.addr(rows.H, b, p)))
        return replace(self, E=torch.addr(self.E, a, q), data=tuple(data))

    def block_removal(self, rows: Int[Tensor, " B"]) -> BlockRemoval:
        """Return the removal of several included candidates in turn."""
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

    def without(self, left: Int[Tensor, " J"], bases: Sequence[Tensor]) -> "KernelRows":
        """Return the rows of the candidates that are left, projected off those of a block."""
        Q, *others = bases
        E, data = self.E.index_select(0, left), []
        A = E @ Q.mT
        for of, QR, QS in zip(self.data, others[::2], others[1::2], strict=True):
            ER, H = of.ER.index_select(0, left), of.H.index_select(0, left)
            data.append(
                replace(of, ER=ER.addmm_(A, QR, alpha=-1), H=H.addmm_(H @ QS.mT, QS, alpha=-1))
            )
        return replace(self, E=E.addmm_(A, Q, alpha=-1), data=tuple(data))

    def contender_rows(
        self, rows: Int[Tensor, " c"]
    ) -> tuple[Float[Tensor, "c c"], tuple[ContenderRows, ...]]:
        """Return the triangles of a few candidates: E, and what depends on the data."""
        data = []
        for of in self.data:
            H, y = _triangle(of.H[rows], of.y)
            data.append(ContenderRows(_triangle(of.ER[rows])[0], H, y, P=of.P))
        return _triangle(self.E[rows])[0], tuple(data)


@final
@dataclass(frozen=True, slots=True)
class EliminationState:
    """A subset during a search, with its marginal gains and cheap moves to neighbouring subsets.

    Attributes:
        terms: rows of each kernel, whose bounds and marginal gains are summed.
        candidates: the J candidates that the search still considers.
        included: mask of these candidates: True for those in the subset.
        bound: L(Z) in nats.
    """

    terms: tuple[KernelRows, ...]
    candidates: Int[Tensor, " J"]
    included: Bool[Tensor, " J"]
    bound: Float[Tensor, ""]

    @classmethod
    def of(cls, roots: Sequence[Roots], mask: Bool[Tensor, " K"]) -> "EliminationState":
        """Return the state of a subset, computed afresh; O(K² M) for each kernel."""
        terms, bounds = zip(*(KernelRows.of(each, mask) for each in roots), strict=True)
        candidates = torch.arange(len(mask), device=mask.device)
        return cls(terms, candidates, mask.clone(), reduce(torch.add, bounds))

    @property
    def mask(self) -> Bool[Tensor, " K"]:
        """The subset as a mask over all K candidates."""
        K = self.terms[0].roots.K
        mask = torch.zeros(K, dtype=torch.bool, device=self.included.device)
        mask[self.candidates] = self.included
        return mask

    def marginal_gains(self) -> Float[Tensor, " J"]:
        """Return L(Z ∪ k) − L(Z \\ k) in nats; positive values favour including k. O(J C)."""
        return reduce(torch.add, [term.marginal_gains(self.included) for term in self.terms])

    def toggle(self, index: int, *, gain: Float[Tensor, ""]) -> "EliminationState":
        """Return the state after adding or removing candidate `index`; O(J K).

        Args:
            index: position among `candidates`.
            gain: entry `index` of `marginal_gains`; added to the bound, or subtracted from it.
        """
        leaves = bool(self.included[index])
        side = self.included == leaves
        same = None if bool(side.all()) else side
        included = self.included.clone()
        included[index] = not leaves
        return EliminationState(
            terms=tuple(
                term.toggle(index, candidates=self.candidates, same=same, leaves=leaves)
                for term in self.terms
            ),
            candidates=self.candidates,
            included=included,
            bound=self.bound - gain if leaves else self.bound + gain,
        )

    def cosines(self, rows: Int[Tensor, " c"]) -> Float[Tensor, "c c"]:
        """Return how strongly removals of a few included candidates affect each other, in [0, 1].

        If an entry is zero, removing one of the two candidates leaves the conditional precisions of
        the other as they are.
        """
        each = [A[rows] for term in self.terms for A in (term.E, *(of.H for of in term.data))]
        units = [torch.nn.functional.normalize(A, dim=1) for A in each]
        return reduce(torch.maximum, [(unit @ unit.mT).abs_() for unit in units])

    def block_removal(self, rows: Int[Tensor, " B"]) -> BlockRemoval:
        """Return the removal of several included candidates in turn; O(B² K).

        All J candidates must be included.
        """
        removals = [term.block_removal(rows) for term in self.terms]
        gains = reduce(torch.add, [removal.gains for removal in removals])
        return BlockRemoval(rows, gains, tuple(Q for removal in removals for Q in removal.bases))

    def remove_block(self, removal: BlockRemoval) -> "EliminationState":
        """Return the state without the candidates of a block, which are considered no more."""
        keep = torch.ones_like(self.included).index_fill_(0, removal.rows, False)
        left = keep.nonzero()[:, 0]  # `index_select` takes a third of the time of a mask.
        terms, bases = [], iter(removal.bases)
        for term in self.terms:
            terms.append(term.without(left, list(islice(bases, 1 + 2 * len(term.data)))))
        return EliminationState(
            terms=tuple(terms),
            candidates=self.candidates[left],
            included=self.included[left],
            bound=self.bound - removal.gains.sum(),
        )

    def contenders(self, rows: Int[Tensor, " c"]) -> Contenders:
        """Return a few included candidates on the CPU, of which some leave in O(c²) each.

        Their gains are those of the whole state as long as no other candidate leaves the subset.
        """
        return Contenders([term.contender_rows(rows) for term in self.terms])


def _squared_norms(rows: Float[Tensor, "J C"]) -> Float[Tensor, " J"]:
    """Return ‖row‖² of each row, in a quarter of the time of squares and sums."""
    return torch.linalg.vector_norm(rows, dim=1).square()


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
