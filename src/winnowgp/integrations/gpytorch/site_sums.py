"""Every function of a strategy as Gaussian regression on what the bound asks of it."""

from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from winnowgp.errors import NotPositiveDefiniteError
from winnowgp.integrations.gpytorch.frame import Frame, PriorBlocks
from winnowgp.integrations.gpytorch.gaussian_q import GaussianQ
from winnowgp.linalg import definite_cholesky, half_log_det, solve_lower
from winnowgp.selection import (
    DataRoot,
    Roots,
    SubsetStatistics,
    SummedStatistics,
    WalkObjective,
)


@final
@dataclass(frozen=True, slots=True)
class SiteTotals:
    """Sites of all rows, summed in a strategy's whitened coordinates (see `bounds.sites`).

    With V = L⁻¹ K_uf, λ and w the sites of f less its prior mean, and t what the points leave open
    of each row's variance:

        C = V W Vᵀ,  D = V λ,  open = Σ_i w_i t_i.

    The best q(v) for these sites is N((I + C)⁻¹ D, (I + C)⁻¹), and a subset of the points is worth
    what regression says: exactly where the likelihood is Gaussian and each function is seen alone,
    to first order elsewhere.
    """

    frame: Frame
    N: int
    C: Float[Tensor, "R F K K"]
    D: Float[Tensor, "R F K"]
    open: Float[Tensor, "R F"]

    @classmethod
    def none(cls, frame: Frame, N: int) -> "SiteTotals":
        """Of no rows yet."""
        found = frame.found
        D = frame.L.new_zeros(found.roles, found.F, found.K)
        return cls(frame, N, torch.diag_embed(D), D, D[..., 0].clone())

    def added(
        self,
        blocks: PriorBlocks,
        mean: Float[Tensor, "*batch B"],
        slope: Float[Tensor, "*batch B"],
        precision: Float[Tensor, "*batch B"],
    ) -> "SiteTotals":
        """With some rows more; O(F B K²)."""
        F, B = self.D.shape[1], mean.shape[-1]
        V = solve_lower(self.frame.L, blocks.Kuf)
        w = precision.reshape(F, B)
        t = (blocks.kff - V.square().sum(-2)).clamp_min(0)
        # λ = ∂E/∂μ + w (μ − prior mean); the mean is the first role's.
        linear = slope.reshape(F, B) + w * (mean.reshape(F, B) - blocks.mean[0])
        VW = V * w[:, None, :]
        return replace(
            self,
            C=self.C + VW @ V.mT,
            D=self.D + (V @ linear[..., None])[..., 0],
            open=self.open + (w * t).sum(-1),
        )

    def best_q(self) -> GaussianQ:
        """The q(v) that is best for the sites."""
        roots = self._roots()
        eye = torch.eye(roots.shape[-1]).to(roots)
        inverse = solve_lower(roots, eye)
        mean = inverse[0].mT @ (inverse[0] @ self.D[0][..., None])
        return GaussianQ(mean[..., 0], inverse[-1].mT)

    def excess(self, q: GaussianQ, best: Float[Tensor, "F K"], *, point: bool) -> float:
        """Nats that q(v) is below the best one for these sites: Σ_f KL[q ‖ best].

        Args:
            best: mean of the best one.
            point: whether q is a point mass, whose covariance is no choice.
        """
        B = self.C + torch.eye(self.C.shape[-1]).to(self.C)
        off = (q.mean - best)[..., None]
        total = 0.5 * (off * (B[0] @ off)).sum()
        if not point:
            inside = (q.factor * (B[-1] @ q.factor)).sum()
            volume = torch.linalg.slogdet(B[-1]).logabsdet + 2 * half_log_det(q.lower())
            total = total + 0.5 * (inside - off.numel() - volume.sum())
        return total.item()

    def statistics(self, bound: float) -> tuple[WalkObjective, ...]:
        """What any subset of each set of points is worth, on the CPU.

        Choosing is thousands of steps on small matrices, one after another.

        Args:
            bound: of all points, in nats; all sets with all points add up to it.
        """
        found = self.frame.found
        sets = [self._set(role, g) for role in range(found.roles) for g in self._members(role)]
        everything = torch.ones(1, found.K, dtype=torch.bool)
        total = sum(part.value(everything).item() for parts in sets for part in parts)
        offset = (bound - total) / len(sets)
        return tuple(_summed(parts, offset) for parts in sets)

    def _members(self, role: int) -> list[Bool[Tensor, " F"]]:
        """Which functions use each of the sets of a role."""
        index = self.frame.found.set_of(role)
        return [index == g for g in index.unique()]

    def _set(self, role: int, members: Bool[Tensor, " F"]) -> list[SubsetStatistics]:
        """One statistics for each kernel matrix that the functions of a set have."""
        decoupled = self.frame.found.roles == 2
        L = self.frame.L[role].cpu()
        roots, D, rest = self._roots()[role].cpu(), self.D[role].cpu(), self.open[role].cpu()
        C = self.C[role].cpu()
        groups: list[tuple[Tensor, list[int]]] = []
        for f in members.nonzero()[:, 0].tolist():
            own = L[0] if len(L) == 1 else L[f]
            same = next((g for factor, g in groups if torch.equal(factor, own)), None)
            groups.append((own, [f])) if same is None else same.append(f)
        made = []
        for factor, functions in groups:
            data, empty = [], factor.new_zeros(())
            for f in functions:
                y = solve_lower(roots[f], D[f][:, None])
                covariance = not decoupled or role == 1
                y = y[:, :0] if decoupled and role == 1 else y
                data.append(DataRoot(R=roots[f], LR=factor @ roots[f], y=y, P=int(covariance)))
                if covariance:
                    empty = empty - 0.5 * (rest[f] + C[f].diagonal().sum())
            made.append(SubsetStatistics(Roots(L=factor, data=tuple(data), empty=empty, N=self.N)))
        return made

    def _roots(self) -> Float[Tensor, "R F K K"]:
        """Of I + C."""
        inner = self.C.clone()
        inner.diagonal(dim1=-2, dim2=-1).add_(1.0)
        try:
            return definite_cholesky(inner)
        except NotPositiveDefiniteError as error:
            raise NotPositiveDefiniteError(
                f"the sites of `{self.frame.found.name}` are not finite; is the model trained, and "
                "are its inputs on the scale of its kernel?"
            ) from error


def _summed(parts: list[SubsetStatistics], offset: float) -> WalkObjective:
    first, *others = parts
    shifted = replace(first.roots, empty=first.roots.empty + offset)
    first = SubsetStatistics(shifted)
    return SummedStatistics((first, *others)) if others else first
