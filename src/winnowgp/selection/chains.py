"""Subsets of many Markov chains, with the marginal gains of every candidate in each.

Each chain has the rows of an `elimination.KernelRows`: residuals of the candidates outside
its subset and duals of those inside, in two geometries. A move changes one candidate per chain, in
all chains at once and in place, on the device of the statistics. This saves the overhead of small
matrices.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from winnowgp.bounds.collapsed import Subset
from winnowgp.errors import InputError
from winnowgp.selection.elimination import DataRoot, Roots
from winnowgp.selection.objective import SubsetStatistics
from winnowgp.typing import Masks, Nats

# Moves before all rows are computed afresh. After 1,024 moves bounds and gains were off by 5e-5
# nats on energy and 1e-6 on concrete (K = 200).
_REFRESH = 1024
_SMALL = 64  # candidates


@dataclass(slots=True)
class _DataRows:
    """Rows of C chains that depend on the data; see `elimination.DataRows`."""

    root: DataRoot
    ER: Float[Tensor, "C K K"]
    H: Float[Tensor, "C K K"]


@dataclass(slots=True)
class _Rows:
    """Residuals and duals of C chains for one kernel."""

    roots: Roots
    E: Float[Tensor, "C K K"]
    data: list[_DataRows]

    def gains(self, included: Masks) -> Float[Tensor, "C K"]:
        """Return the marginal gains; see `elimination` for the formula. O(C K²)."""
        prior = _squared_norms(self.E)
        total = torch.zeros_like(prior)
        for of in self.data:
            joint = _squared_norms(of.H)
            volume = (joint / prior).log()
            covariance = _squared_norms(of.ER) / prior - 1 + torch.where(included, volume, -volume)
            # Matrix times vector: matrices of few columns take ten times as long on a CPU.
            for y in of.root.y.unbind(1):
                total += (of.H @ y).square() / joint
            total += of.root.P * covariance
        return 0.5 * total

    def toggle(self, move: "_Move") -> None:
        """Add or remove one candidate in each chain, in place; O(C K²)."""
        a, q, norm = move.update(self.roots.L, self.E)
        for of in self.data:
            along = of.ER[move.chain, move.index] / norm[:, None]
            of.ER.addcmul_(a[:, :, None], along[:, None, :])
            b, p, _ = move.update(of.root.LR, of.H)
            of.H.addcmul_(b[:, :, None], p[:, None, :])
        self.E.addcmul_(a[:, :, None], q[:, None, :])


@dataclass(slots=True)
class Chains:
    """The subsets of C chains, their bounds and marginal gains; moves change them in place.

    Attributes:
        objective: L(Z).
        included: subset of each chain.
        bounds: L(Z) of each chain, in nats.
        gains: L(Z ∪ k) − L(Z \\ k) of every candidate in each chain, in nats.
    """

    objective: SubsetStatistics
    included: Bool[Tensor, "C K"]
    bounds: Float[Tensor, " C"]
    gains: Float[Tensor, "C K"]
    _terms: list[_Rows]
    _moves: int = 0

    @classmethod
    def at(cls, objective: SubsetStatistics, masks: Masks) -> "Chains":
        """Return chains at given subsets; O(K² M) each.

        Args:
            objective: statistics of the data.
            masks: subset of each chain.
        """
        if not isinstance(objective, SubsetStatistics):
            raise InputError(
                "`statistics` must be `SubsetStatistics`, as a model's `subset_statistics` "
                f"returns; got {type(objective).__name__}."
            )
        included = masks.to(objective.empty.device).clone()
        zeros = objective.empty.new_zeros(included.shape)
        chains = cls(objective, included, zeros.sum(1), zeros, [])
        chains._compute()
        return chains

    @property
    def sizes(self) -> Int[Tensor, " C"]:
        """Number of inducing points of each chain."""
        return self.included.sum(1)

    def toggle(self, index: Int[Tensor, " C"], *, active: Bool[Tensor, " C"]) -> None:
        """Add or remove candidate `index` of each active chain; O(C K²)."""
        chain = torch.arange(len(index), device=index.device)
        leaves = self.included[chain, index]
        gain = self.gains[chain, index].masked_fill(~active, 0.0)
        self.bounds = self.bounds + torch.where(leaves, -gain, gain)
        move = _Move(chain, index, leaves, active, same=self.included == leaves[:, None])
        for rows in self._terms:
            rows.toggle(move)
        self.included[chain, index] = leaves ^ active
        self._moves += 1
        self._set_gains()

    def refresh(self) -> None:
        """Compute all rows afresh if there were many moves since that was last done."""
        if self._moves >= _REFRESH:
            self._compute()

    def _compute(self) -> None:
        self._terms, self._moves = [], 0
        self.bounds = self.objective.empty.repeat(len(self.included))
        for roots in self.objective.terms:
            rows, gains = _fresh(roots, self.included)
            self._terms.append(rows)
            self.bounds = self.bounds + gains
        self._set_gains()

    def _set_gains(self) -> None:
        terms = [rows.gains(self.included) for rows in self._terms]
        self.gains = terms[0] if len(terms) == 1 else torch.stack(terms).sum(0)


@dataclass(frozen=True, slots=True)
class _Move:
    """One candidate per chain that is added or removed; see `linalg.rank_one_update`.

    Attributes:
        chain: 0..C−1.
        index: the candidate of each chain.
        leaves: whether it is removed.
        active: chains that move.
        same: candidates on the same side, inside or outside, as the one that changes.
    """

    chain: Int[Tensor, " C"]
    index: Int[Tensor, " C"]
    leaves: Bool[Tensor, " C"]
    active: Bool[Tensor, " C"]
    same: Bool[Tensor, "C K"]

    def update(
        self, L: Float[Tensor, "K K"], E: Float[Tensor, "C K K"]
    ) -> tuple[Float[Tensor, "C K"], Float[Tensor, "C K"], Float[Tensor, " C"]]:
        """Return a and q of the update E + a qᵀ of each chain, and ‖e‖; a is zero at rest."""
        e = E[self.chain, self.index]
        norm = torch.linalg.vector_norm(e, dim=1)
        q = e / norm[:, None]
        entering = -_products(E, L[self.index]) / norm[:, None]
        across = torch.where(self.leaves[:, None], q @ L.mT, entering)
        a = torch.where(self.same, -_products(E, q), across)
        a[self.chain, self.index] = 1 / norm - norm
        return a.masked_fill_(~self.active[:, None], 0.0), q, norm


def _fresh(roots: Roots, masks: Masks) -> tuple[_Rows, Nats]:
    """Return the rows of subsets, and L(Z) − L(∅) of each."""
    E, Q, T = _residuals_and_duals(roots.L, masks)
    data, gains = [], roots.empty.new_zeros(len(masks))
    for root in roots.data:
        H, QS, TS = _residuals_and_duals(root.LR, masks)
        QR = Q @ root.R
        inside = (E @ Q.mT) @ QR
        outside = root.LR - (roots.L @ Q.mT) @ QR
        data.append(_DataRows(root, torch.where(masks[:, :, None], inside, outside), H))
        log_det = 2 * (TS / T).abs().log().sum(1)
        fit = (QS @ root.y).square().sum((1, 2))
        explained = QR.square().sum((1, 2)) - masks.sum(1)
        gains = gains + 0.5 * (fit + root.P * (explained - log_det))
    return _Rows(roots, E, data), gains


def _residuals_and_duals(
    L: Float[Tensor, "K K"], masks: Masks
) -> tuple[Float[Tensor, "C K K"], Float[Tensor, "C M K"], Float[Tensor, "C M"]]:
    """Return `linalg.residuals_and_duals` of C subsets at once, Q and the diagonals of T.

    Subsets are padded to the size of the largest: Q has zeros there, and the diagonals ones.
    """
    subset = Subset.of(masks)
    index, real = subset.index, subset.present
    Qt, Tt = torch.linalg.qr((L[index] * real[:, :, None]).mT)
    Q = Qt.mT * real[:, :, None]
    Tt = Tt + torch.diag_embed((~real).to(L.dtype))
    duals = torch.linalg.solve_triangular(Tt, Q, upper=True)
    # Twice, as in `linalg.residual`.
    once = L - (L @ Q.mT) @ Q
    E = once - (once @ Q.mT) @ Q
    rows = torch.arange(len(masks), device=L.device)[:, None].expand_as(index)
    E[rows[real], index[real]] = duals[real]
    return E, Q, Tt.diagonal(dim1=1, dim2=2)


def _products(E: Float[Tensor, "C K K"], v: Float[Tensor, "C K"]) -> Float[Tensor, "C K"]:
    """Return E v of each chain."""
    if E.is_cuda or E.shape[1] < _SMALL:
        return (E @ v[:, :, None])[:, :, 0]
    # A batched product of 200 by 200 matrices takes ten times as long.
    return torch.stack([torch.mv(A, b) for A, b in zip(E, v, strict=True)])


def _squared_norms(rows: Float[Tensor, "C K K"]) -> Float[Tensor, "C K"]:
    return torch.linalg.vector_norm(rows, dim=2).square()
