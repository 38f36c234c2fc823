"""Updates of several processes by more rows, without the rows before: points are added and dropped.

The posterior q(v) = N(m, F Fᵀ) of whitened inducing values holds what earlier rows say about them:
the moments C_a = (F Fᵀ)⁻¹ − I and D_a = (F Fᵀ)⁻¹ m. With fresh candidates after the old inducing
points of each process, the Cholesky factors keep their old rows, so that C_a and D_a are unchanged
and are added to the moments of the new rows. Earlier rows are explained up to the trace of C_a,

    Σ w k ← Σ w k + tr C_a,

which is the penalty ½ tr D_a⁻¹(K_aa − Q_aa) of the streaming bound (Bui et al. 2017) for dropping
an old point. So one backward elimination prices old points and fresh candidates of all processes
alike, at the hyper-parameters of the fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from winnowgp.bounds.collapsed import Moments, moment_posterior
from winnowgp.data import Dataset
from winnowgp.linalg import cholesky, definite_cholesky, half_log_det, solve_lower
from winnowgp.models.kernels import covariance
from winnowgp.models.multi_output_posterior import MultiOutputPosterior
from winnowgp.selection.objective import SubsetStatistics, subset_statistics


@final
@dataclass(frozen=True, slots=True)
class ProcessStream:
    """Old inducing points and fresh candidates of all processes, and the moments of all rows."""

    posterior: MultiOutputPosterior
    """The posterior of earlier rows, with fresh candidates after the old points of each process."""
    old: Bool[Tensor, " K"]
    """Which of them are old inducing points."""
    data: Dataset
    """The new rows."""
    moments: Moments

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        posterior: MultiOutputPosterior,
        data: Dataset,
        fresh: Sequence[Float[Tensor, "_ D"]],
    ) -> "ProcessStream":
        """Return the moments of earlier rows, which the posterior holds, and of more rows.

        O(N M² + M³) for the M inducing points and candidates of all processes. Rows of other
        likelihoods than Gaussian noise have the sites that all candidates together imply.

        Args:
            data: more rows; targets may be missing.
            fresh: candidates of each process.
        """
        extended, old = _extended(posterior, fresh)
        new_rows, (C_old, D_old) = extended.moments(data), _remembered(extended, old)
        root = definite_cholesky(C_old + torch.eye(len(C_old)).to(C_old))
        remembered = 0.5 * solve_lower(root, D_old).square().sum() - half_log_det(root)
        moments = replace(
            new_rows,
            C=new_rows.C + C_old,
            D=new_rows.D + D_old,
            diagonal=new_rows.diagonal + C_old.diagonal().sum(),
            constant=new_rows.constant - remembered,
        )
        return cls(extended, old, data, moments)

    @property
    def candidates(self) -> tuple[Float[Tensor, "_ D"], ...]:
        """Old inducing points of each process, then the fresh candidates."""
        return self.posterior.inducing_points

    def statistics(self) -> SubsetStatistics:
        """Return bounds on the log density of the new rows given earlier ones, of subsets; O(M³).

        They are exact for Gaussian noise, and for the Gaussian sites of all candidates otherwise.
        """
        return subset_statistics(torch.block_diag(*self.posterior.factors), self.moments)

    @torch.no_grad()
    def selected(self, mask: Bool[Tensor, " K"]) -> MultiOutputPosterior:
        """Return the posterior of all rows with some of the candidates; O(M³ + N M²)."""
        posterior = self.posterior
        masks = mask.split(posterior.sizes)
        points, factors, bases = [], [], []
        for Z, L, keep in zip(self.candidates, posterior.factors, masks, strict=True):
            # L_I = Rᵀ Qᵀ, and V_I = Qᵀ V.
            Q, R = torch.linalg.qr(L[keep].mT)
            sign = torch.where(R.diagonal() < 0, -1.0, 1.0).to(R)
            points.append(Z[keep])
            factors.append((sign[:, None] * R).mT.contiguous())
            bases.append(Q * sign)
        basis = torch.block_diag(*bases)
        C, D = _remembered(posterior, self.old)
        earlier = replace(self.moments, C=basis.mT @ C @ basis, D=basis.mT @ D)
        q_mean, q_factor = moment_posterior(earlier)
        return MultiOutputPosterior(
            posterior.kernels,
            points,
            mixing=posterior.mixing,
            likelihood=posterior.likelihood,
            q_mean=q_mean[:, 0],
            q_factor=q_factor[0],
            L=factors,
        ).condition_on(self.data)


def _extended(
    posterior: MultiOutputPosterior, fresh: Sequence[Float[Tensor, "_ D"]]
) -> tuple[MultiOutputPosterior, Bool[Tensor, " K"]]:
    """Return the same q(f) with more inducing points, and which of them are old.

    Given the old whitened values, the fresh ones have their prior, N(0, I).
    """
    candidates, factors, masks = [], [], []
    parts = zip(posterior.kernels, posterior.inducing_points, posterior.factors, fresh, strict=True)
    for kernel, Z, L, new in parts:
        candidates.append(torch.cat([Z, new]))
        S = solve_lower(L, covariance(kernel, Z, new))
        T = cholesky(covariance(kernel, new, new) - S.mT @ S).L
        upper = torch.cat([L, L.new_zeros(len(L), len(new))], 1)
        factors.append(torch.cat([upper, torch.cat([S.mT, T], 1)]))
        masks.append(torch.arange(len(Z) + len(new), device=Z.device) < len(Z))
    old = torch.cat(masks)
    at = old.nonzero().flatten()
    q_mean = posterior.q_mean.new_zeros(len(old))
    q_factor = torch.eye(len(old), dtype=q_mean.dtype, device=q_mean.device)
    q_mean[at], q_factor[at[:, None], at] = posterior.q_mean, posterior.q_factor
    extended = MultiOutputPosterior(
        posterior.kernels,
        candidates,
        mixing=posterior.mixing,
        likelihood=posterior.likelihood,
        q_mean=q_mean,
        q_factor=q_factor,
        L=factors,
    )
    return extended, old


def _remembered(
    posterior: MultiOutputPosterior, old: Bool[Tensor, " K"]
) -> tuple[Float[Tensor, "K K"], Float[Tensor, "K 1"]]:
    """Return the moments C_a and D_a of earlier rows; they concern old inducing points only."""
    at = old.nonzero().flatten()
    eye = torch.eye(len(at), dtype=posterior.q_mean.dtype, device=at.device)
    inverse = torch.linalg.solve(posterior.q_factor[at[:, None], at], eye)
    B = inverse.mT @ inverse
    C, D = torch.zeros_like(posterior.q_factor), posterior.q_mean.new_zeros(len(old), 1)
    C[at[:, None], at] = B - eye
    D[at, 0] = B @ posterior.q_mean[at]
    return C, D
