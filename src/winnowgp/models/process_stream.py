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
from winnowgp.bounds.mixing import MixedTargets, mixed_moments
from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.linalg import cholesky, solve_lower
from winnowgp.models.kernels import covariance, prior_variance
from winnowgp.models.multi_output_posterior import MultiOutputPosterior
from winnowgp.models.observations import target_noise
from winnowgp.selection.statistics import SubsetStatistics, subset_statistics


@final
@dataclass(frozen=True, slots=True)
class ProcessStream:
    """Old inducing points and fresh candidates of all processes, and the moments of all rows."""

    posterior: MultiOutputPosterior
    candidates: tuple[Float[Tensor, "_ D"], ...]
    """Old inducing points of each process, then the fresh candidates."""
    L: tuple[Float[Tensor, "_ _"], ...]
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

        O(N M² + M³) for the M inducing points and candidates of all processes.

        Args:
            data: more rows; targets may be missing.
            fresh: candidates of each process.
        """
        posterior.require_gaussian("updates by more rows", "Fit all rows together.")
        if data.P != posterior.P:
            raise InputError(f"`data` must have {posterior.P} target columns; got {data.P}.")
        candidates, factors = [], []
        parts = zip(
            posterior.kernels, posterior.inducing_points, posterior.factors, fresh, strict=True
        )
        for kernel, Z, L, new in parts:
            candidates.append(torch.cat([Z, new]))
            S = solve_lower(L, covariance(kernel, Z, new))
            T = cholesky(covariance(kernel, new, new) - S.mT @ S).L
            upper = torch.cat([L, L.new_zeros(len(L), len(new))], 1)
            factors.append(torch.cat([upper, torch.cat([S.mT, T], 1)]))
        learnt = target_noise(posterior.likelihood)[None]
        noise = learnt if data.noise is None else learnt + data.noise
        pairs = list(zip(posterior.kernels, candidates, strict=True))
        new_rows = mixed_moments(
            factors,
            [covariance(kernel, Z, data.X) for kernel, Z in pairs],
            kff=torch.stack([prior_variance(kernel, data.X) for kernel, _ in pairs]),
            targets=MixedTargets.of(
                data.Y, mixing=posterior.mixing, noise=noise, weights=data.weights
            ),
        )
        masks = zip(posterior.sizes, candidates, strict=True)
        old = torch.cat([torch.arange(len(Z)) < size for size, Z in masks])
        at = old.nonzero().flatten().to(data.X.device)
        eye = torch.eye(posterior.M, dtype=data.X.dtype, device=data.X.device)
        inverse = torch.linalg.solve(posterior.q_factor, eye)
        B = inverse.mT @ inverse
        C, D = new_rows.C.clone(), new_rows.D.clone()
        C[at[:, None], at] += B - eye
        D[at, 0] += B @ posterior.q_mean
        diagonal = new_rows.diagonal + (B - eye).diagonal().sum()
        moments = replace(new_rows, C=C, D=D, diagonal=diagonal)
        return cls(posterior, tuple(candidates), tuple(factors), moments)

    def statistics(self) -> SubsetStatistics:
        """Return exact bounds of subsets, up to a constant; O(M³)."""
        return subset_statistics(torch.block_diag(*self.L), self.moments)

    @torch.no_grad()
    def selected(self, mask: Bool[Tensor, " K"]) -> MultiOutputPosterior:
        """Return the posterior of all rows with some of the candidates; O(M³)."""
        masks = mask.split([len(Z) for Z in self.candidates])
        points, factors, bases = [], [], []
        for Z, L, keep in zip(self.candidates, self.L, masks, strict=True):
            # L_I = Rᵀ Qᵀ, and V_I = Qᵀ V.
            Q, R = torch.linalg.qr(L[keep].mT)
            sign = torch.where(R.diagonal() < 0, -1.0, 1.0).to(R)
            points.append(Z[keep])
            factors.append((sign[:, None] * R).mT.contiguous())
            bases.append(Q * sign)
        basis = torch.block_diag(*bases)
        moments = replace(
            self.moments, C=basis.mT @ self.moments.C @ basis, D=basis.mT @ self.moments.D
        )
        q_mean, q_factor = moment_posterior(moments)
        return MultiOutputPosterior(
            self.posterior.kernels,
            points,
            mixing=self.posterior.mixing,
            likelihood=self.posterior.likelihood,
            q_mean=q_mean[:, 0],
            q_factor=q_factor[0],
            L=factors,
        )
