"""Leave-one-out predictive log densities at fixed hyper-parameters, in closed form.

Row i is left out of the data, and stays among the inducing points if it is one. In whitened
coordinates, with V = L⁻¹ K_uf, sites of precision w_i and linear term λ_i (w_i y_i for Gaussian
noise), B = I + V W Vᵀ and D = V λ, the posterior without row i has B₋ᵢ = B − w_i v_i v_iᵀ and
D₋ᵢ = D − λ_i v_i. With m_i = v_iᵀ B⁻¹ D, s_i = v_iᵀ B⁻¹ v_i and t_i = k_ii − ‖v_i‖² its latent
function at x_i has

    mean (m_i − λ_i s_i)/(1 − w_i s_i),   variance t_i + s_i/(1 − w_i s_i)

by the Sherman-Morrison formula: no posterior is computed again, and all rows together cost
O(N M²). For Gaussian noise this is exact. For other likelihoods the sites of the other rows are
held; a fit without row i would change them a little.

A row of weight w is left out as a whole, as if all of its w observations were: predicting one of
them from the others would reward a model that interpolates them. The density is that of a single
observation, and averages over rows should use the weights (`PredictiveGap`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, log, pi, sqrt

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds.chunked import KernelChunk, Moments
from winnowgp.bounds.evidence import GaussianRows
from winnowgp.errors import InputError
from winnowgp.linalg import definite_cholesky, solve_lower
from winnowgp.typing import Scalar


@dataclass(frozen=True, slots=True)
class Cavity:
    """Mean and variance of each row's latent functions, given all other rows."""

    mean: Float[Tensor, "N P"]
    variance: Float[Tensor, "N P"]

    @classmethod
    def of(
        cls,
        mean: Float[Tensor, "N P"],
        spread: Float[Tensor, "N #P"],
        *,
        unexplained: Float[Tensor, " N"],
        explained: Float[Tensor, " N"],
        precision: Float[Tensor, "N #P"],
        linear: Float[Tensor, "N P"],
    ) -> "Cavity":
        """Remove each row's own site from its posterior.

        Sites of negative precision can leave other rows without a proper posterior: 1 − w_i s_i ≤ 0
        means that B₋ᵢ is not positive definite. The prior takes its place there.

        Args:
            mean: m_i.
            spread: s_i.
            unexplained: t_i = k_ii − ‖v_i‖².
            explained: ‖v_i‖².
            precision: w_i.
            linear: λ_i.
        """
        share = 1 - precision * spread
        proper = share > 4 * torch.finfo(share.dtype).eps
        share = torch.where(proper, share, 1.0)
        cavity_mean = torch.where(proper, (mean - linear * spread) / share, 0.0)
        inside = torch.where(proper, spread / share, explained[:, None])
        variance = (unexplained[:, None] + inside).expand(mean.shape)
        return cls(cavity_mean, variance)

    def log_density(self, Y: Float[Tensor, "N P"], *, noise: Scalar) -> Float[Tensor, " N"]:
        """Return log N(y_i | mean, variance + σ²) of each row, summed over outputs, in nats."""
        variance = self.variance + noise
        nats = (Y - self.mean).square() / variance + variance.log() + log(2 * pi)
        return -0.5 * nats.sum(1)


@torch.no_grad()
def collapsed_leave_one_out(
    L: Float[Tensor, "K K"], moments: Moments, *, chunks: Iterable[KernelChunk], noise: Scalar
) -> Float[Tensor, " N"]:
    """Return the leave-one-out log density of each row under the collapsed posterior; O(N K²).

    Args:
        L: factor of the inducing points' covariance, jitter included.
        moments: moments of all rows, whitened by L.
        chunks: the rows whose densities are returned; precisions are w_i/σ².
        noise: σ², the noise variance of a single observation.

    Returns:
        Nats, summed over outputs.
    """
    eye = torch.eye(len(L), dtype=L.dtype, device=L.device)
    LB = definite_cholesky(moments.C + eye)
    c = solve_lower(LB, moments.D)
    densities = []
    for Kuf, kff, Y, precision in chunks:
        V = solve_lower(L, Kuf)
        A = solve_lower(LB, V)
        explained = V.square().sum(0)
        cavity = Cavity.of(
            A.mT @ c,
            A.square().sum(0)[:, None],
            # k_ii − ‖v_i‖² is non-negative up to rounding.
            unexplained=(kff - explained).clamp_min(0),
            explained=explained,
            precision=precision[:, None],
            linear=precision[:, None] * Y,
        )
        densities.append(cavity.log_density(Y, noise=noise))
    return torch.cat(densities)


@torch.no_grad()
def exact_leave_one_out(rows: GaussianRows) -> Float[Tensor, " N"]:
    """Return the leave-one-out log density of each row under the exact posterior; O(N³).

    With K̂ = K_ff + Σ the latent function has mean y_i − [K̂⁻¹y]_i/[K̂⁻¹]_ii and variance
    1/[K̂⁻¹]_ii − Σ_ii (Rasmussen and Williams 2006, section 5.4.2). The memory is that of one N by N
    matrix: the diagonal of K̂⁻¹ comes from the columns of the inverse factor, some at a time.

    Returns:
        Nats, summed over outputs.

    Raises:
        NotPositiveDefiniteError: K̂ is not finite, or singular to working precision.
    """
    L = rows.factor()
    alpha = torch.cholesky_solve(rows.Y, L)
    diagonal = torch.empty_like(rows.kff)
    for block in rows.blocks():
        # Column i of L⁻¹ is zero above row i.
        corner = L[block.start :, block.start :]
        size = block.stop - block.start
        unit = torch.eye(len(corner), size, dtype=L.dtype, device=L.device)
        columns = torch.linalg.solve_triangular(corner, unit, upper=False)
        diagonal[block] = columns.square().sum(0)
    # Non-negative up to rounding.
    variance = (1 / diagonal - rows.variances()).clamp_min(0)
    mean = rows.Y - alpha / diagonal[:, None]
    cavity = Cavity(mean, variance[:, None].expand(mean.shape))
    return cavity.log_density(rows.Y, noise=rows.noise)


@dataclass(frozen=True, slots=True)
class PredictiveGap:
    """How much better one model predicts left-out rows than another."""

    nats: float
    """Mean difference of the log densities per observation; positive if the reference is better."""
    standard_error: float
    """Standard error of this mean over rows, at fixed models; infinite for a single row."""

    @classmethod
    def of(
        cls,
        reference: Float[Tensor, " N"],
        other: Float[Tensor, " N"],
        *,
        weights: Float[Tensor, " N"] | None = None,
    ) -> "PredictiveGap":
        """Compare the leave-one-out log densities of two models of the same rows.

        The rows are paired: with d_i = reference_i − other_i and weights w_i (one by default)

            nats = Σ w_i d_i / Σ w_i,   standard_error² = N/(N − 1) Σ w_i² (d_i − nats)² / (Σ w_i)².

        >>> PredictiveGap.of(torch.tensor([1.0, 3.0]), torch.tensor([0.0, 0.0]))
        PredictiveGap(nats=2.0, standard_error=1.0)
        """
        if reference.shape != other.shape or not len(other):
            raise InputError(
                "`reference` and `other` must be log densities of the same rows, at least one; got "
                f"{list(reference.shape)} and {list(other.shape)}."
            )
        N, difference = len(other), (reference - other).double()
        w = torch.ones_like(difference) if weights is None else weights.to(difference)
        nats = ((w * difference).sum() / w.sum()).item()
        if N == 1:
            return cls(nats, inf)
        scatter = ((w * (difference - nats)).square().sum() / w.sum().square()).item()
        return cls(nats, sqrt(N / (N - 1) * scatter))
