"""The tableau: one subset, the exact effect of flipping every candidate, and moving to a neighbour.

For each candidate k take the resolved rows (see `linalg.resolved_rows`) in two geometries: e of L,
the prior, and h of L R, prior plus data. Outside the subset ‖e‖² and ‖h‖² are the variances of k
given the subset under each; inside they are its precisions given the others. With s = +1 outside
and −1 inside, the flip is exactly

    L(Z ∪ k) − L(Z \\ k) = ½ [ P (‖eᵀR‖²/‖e‖² − 1) + ‖hᵀy‖²/‖h‖² − s P log(‖h‖²/‖e‖²) ]:

what k explains, how it fits the targets, what it costs in volume. A flip changes each matrix of
rows by one rank-one term: O(K²), where a fresh tableau is O(K² M).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from winnowgp.linalg import flip_step, resolved_rows
from winnowgp.selection.roots import Roots


@dataclass(frozen=True, slots=True)
class Tableau:
    """A subset, with the resolved rows of J candidates (all K, or those a search still looks at).

    Attributes:
        roots: of the candidates' covariances.
        rows: which candidate each row belongs to.
        included: which of them are in the subset.
        E: resolved rows of L.
        ER: E R.
        H: resolved rows of L R.
        bound: L(Z) in nats.
    """

    roots: Roots
    rows: Int[Tensor, " J"]
    included: Bool[Tensor, " J"]
    E: Float[Tensor, "J K"]
    ER: Float[Tensor, "J K"]
    H: Float[Tensor, "J K"]
    bound: Float[Tensor, ""]

    @property
    def mask(self) -> Bool[Tensor, " K"]:
        """The subset as a mask over all candidates."""
        mask = torch.zeros(self.roots.K, dtype=torch.bool, device=self.E.device)
        mask[self.rows[self.included]] = True
        return mask

    def flips(self) -> Float[Tensor, " J"]:
        """L(Z ∪ k) − L(Z \\ k) in nats for the J rows; positive favours including k. O(J K)."""
        P = self.roots.P
        prior = self.E.square().sum(dim=1)
        joint = self.H.square().sum(dim=1)
        sign = 1.0 - 2.0 * self.included.to(self.E.dtype)
        explained = self.ER.square().sum(dim=1) / prior - 1
        fit = (self.H @ self.roots.y).square().sum(dim=1) / joint
        return 0.5 * (P * explained + fit - sign * P * (joint / prior).log())

    def flip(self, at: int, *, worth: Float[Tensor, ""]) -> "Tableau":
        """Tableau of the subset with row `at` on the other side, O(J K).

        Args:
            at: position among the rows.
            worth: entry `at` of `flips`; the bound gains it when the row enters, loses it when it
                leaves.
        """
        L, LR = self.roots.L, self.roots.LR
        a, q = flip_step(L, self.E, rows=self.rows, included=self.included, at=at)
        qR = self.ER[at] / torch.linalg.vector_norm(self.E[at])
        b, p = flip_step(LR, self.H, rows=self.rows, included=self.included, at=at)
        leaves = bool(self.included[at])
        included = self.included.clone()
        included[at] = not leaves
        return Tableau(
            roots=self.roots,
            rows=self.rows,
            included=included,
            E=torch.addr(self.E, a, q),
            ER=torch.addr(self.ER, a, qR),
            H=torch.addr(self.H, b, p),
            bound=self.bound - worth if leaves else self.bound + worth,
        )

    def only(self, keep: Bool[Tensor, " J"]) -> "Tableau":
        """The same subset, looking at fewer rows; included rows must be kept for `mask` to hold."""
        return Tableau(
            roots=self.roots,
            rows=self.rows[keep],
            included=self.included[keep],
            E=self.E[keep],
            ER=self.ER[keep],
            H=self.H[keep],
            bound=self.bound,
        )


def tableau(roots: Roots, mask: Bool[Tensor, " K"]) -> Tableau:
    """Fresh tableau of a subset, O(K² M)."""
    L, R, LR = roots.L, roots.R, roots.LR
    E, Q = resolved_rows(L, mask)
    H, QS = resolved_rows(LR, mask)
    inside = Q.shape[0]
    QR = Q @ R
    ER = torch.empty_like(E)
    # inside E = (E Qᵀ) Q; outside E = L − (L Qᵀ) Q, and L R is at hand: O(K M K), never O(K³)
    ER[mask] = (E[mask] @ Q.mT) @ QR
    ER[~mask] = LR[~mask] - (L[~mask] @ Q.mT) @ QR
    # log|S_II|/|K_II| = −Σ log pivots is read off the triangles T = (rows I) Qᵀ
    T, TS = (L[mask] @ Q.mT).diagonal(), (LR[mask] @ QS.mT).diagonal()
    log_det = 2 * (TS / T).abs().log().sum()
    fit = (QS @ roots.y).square().sum()
    gain = 0.5 * (fit + roots.P * (QR.square().sum() - inside - log_det))
    return Tableau(
        roots=roots,
        rows=torch.arange(len(L), device=L.device),
        included=mask.clone(),
        E=E,
        ER=ER,
        H=H,
        bound=roots.empty + gain,
    )
