"""Gaussian sites: any likelihood as regression with one precision and pseudo-target per row.

Write q(u) ∝ p(u) Π_i exp E[λ_i f_i − ½ w_i f_i² | u], with one site per row and latent function.
The optimal Gaussian q(u) has this form, with w_i = −2 ∂E_i/∂σ_i² and λ_i = ∂E_i/∂μ_i + w_i μ_i,
where E_i is the expected log-likelihood of row i and (μ_i, σ_i²) its marginal under q. Moving the
sites towards these values is a natural-gradient step on q(u) (Khan & Lin 2017; Adam et al. 2021).

With V = L⁻¹ K_uf, B_p = I + V W_p Vᵀ, D_p = V λ_p and t_i = k_ii − ‖v_i‖², the sites' evidence is

    G = Σ_p [ −½ log|B_p| + ½ D_pᵀ B_p⁻¹ D_p − ½ Σ_i w_ip t_i ],

and the bound at their q is G + Σ_i c_i, c_i = E_i − E_q[λ_i f_i − ½ w_i f_i²]. At the optimal sites
every c_i is stationary in (μ_i, σ_i²): the gradient of the bound with respect to the kernel is that
of G, and to first order G gives the change of the bound for a subset of the inducing points.
Precisions may be negative where the likelihood is not log-concave; only B_p must be positive
definite.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds import panels, row_blocks
from winnowgp.bounds.collapsed import Moments, optimal_posterior
from winnowgp.linalg import definite_cholesky, half_log_det, solve_lower
from winnowgp.typing import Scalar


@dataclass(frozen=True, slots=True)
class Sites:
    """Unnormalised Gaussian sites exp(λ f − ½ w f²), one per row and latent function."""

    linear: Float[Tensor, "N P"]
    """λ."""
    precision: Float[Tensor, "N P"]
    """w."""


@dataclass(frozen=True, slots=True)
class SiteSums:
    """Sums of the sites over rows, in whitened coordinates.

    Attributes:
        roots: Cholesky factors of B_p = I + V W_p Vᵀ.
        D: V λ_p.
        open: Σ_i w_ip t_i, over the variance that the inducing points leave unexplained.
    """

    roots: Float[Tensor, "P M M"]
    D: Float[Tensor, "M P"]
    open: Float[Tensor, " P"]

    def posterior(self) -> tuple[Float[Tensor, "M P"], Float[Tensor, "P M M"]]:
        """Return means and covariance factors of q(v_p) = N(B_p⁻¹ D_p, B_p⁻¹)."""
        mean, F = optimal_posterior(self.roots, self.D.mT[..., None])
        return mean[..., 0].mT, F

    def inverse(self, rows: int) -> Float[Tensor, "P M M"] | None:
        """Return root⁻¹ if products with it are cheaper than solves for `rows` rows, else None."""
        M = self.roots.shape[-1]
        if rows <= M:
            return None
        return solve_lower(self.roots, torch.eye(M, dtype=self.D.dtype, device=self.D.device))

    def variance(
        self, chunk: row_blocks.WhitenedChunk, inverse: Float[Tensor, "P M M"] | None
    ) -> Float[Tensor, "B P"]:
        """Return Var f_ip = t_i + ‖root_p⁻¹ v_i‖² of the rows of a chunk under q; O(P B M²).

        Args:
            chunk: some rows.
            inverse: root⁻¹ if it has been computed.
        """
        P = len(self.roots)
        variance = chunk.t.new_empty(P, len(chunk.t))
        for p in range(P):
            A = (
                solve_lower(self.roots[p], chunk.V)
                if inverse is None
                else panels.lower_product(inverse[p], chunk.V)
            )
            torch.sum(A.square_(), 0, out=variance[p])
        return (variance + chunk.t).mT

    def evidence(self) -> Scalar:
        """Return the evidence G of the sites in nats."""
        c = solve_lower(self.roots, self.D.mT[..., None])
        return 0.5 * (c.square().sum() - self.open.sum()) - half_log_det(self.roots).sum()


def site_sums(chunks: row_blocks.WhitenedChunks, sites: Sites) -> SiteSums:
    """Sum the sites in one pass over the rows; O(P N M²).

    Raises:
        NotPositiveDefiniteError: some B_p is not positive definite.
    """
    P, M = sites.linear.shape[1], len(chunks.L)

    def sums(shard: Iterable[row_blocks.WhitenedChunk]) -> row_blocks.Sums:
        C, D = sites.linear.new_zeros(P, M, M), sites.linear.new_zeros(M, P)
        unexplained = sites.linear.new_zeros(P)
        for chunk in shard:
            w = sites.precision[chunk.rows]
            for p in range(P):
                panels.add_gram(C[p], chunk.V * w[:, p], chunk.V)
            D.addmm_(chunk.V, sites.linear[chunk.rows])
            unexplained += w.mT @ chunk.t
        return C, D, unexplained

    C, D, unexplained = chunks.summed(sums)
    B = torch.stack([panels.from_panels(c) for c in C])
    B.diagonal(dim1=-2, dim2=-1).add_(1.0)
    return SiteSums(definite_cholesky(B), D, unexplained)


def site_moments(sums: SiteSums, *, constant: float, N: int | float) -> list[Moments]:
    """Return the sites as moments, one for each latent function, for `subset_statistics`.

    Args:
        sums: sums of the sites.
        constant: Σ_i c_i, so that the bounds of all candidates add up to the true bound.
        N: number of observations.
    """
    P, M = sums.roots.shape[:2]
    B = sums.roots @ sums.roots.mT
    C = B - torch.eye(M, dtype=B.dtype, device=B.device)
    zero = sums.open.new_zeros(())
    return [
        Moments(
            C=C[p],
            D=sums.D[:, p : p + 1],
            square=zero,
            diagonal=sums.open[p] + C[p].diagonal().sum(),
            constant=zero + constant / P,
            N=N,
        )
        for p in range(P)
    ]


def site_gradient(
    chunks: row_blocks.WhitenedChunks, sites: Sites, sums: SiteSums
) -> tuple[Tensor, ...]:
    """Return the gradient of G in the kernel's parameters at fixed sites; O(P N M²), one pass.

    ∂G/∂K_uf = L⁻ᵀ Σ_p [(I − B_p⁻¹ − β_p β_pᵀ) V W_p + β_p λ_pᵀ],   β_p = B_p⁻¹ D_p
    ∂G/∂K_uu = −½ L⁻ᵀ Σ_p [B_p + B_p⁻¹ − 2I + β_p β_pᵀ] L⁻¹,   ∂G/∂k_ii = −½ Σ_p w_ip
    """
    P, M = sums.roots.shape[:2]
    kernel, L_inverse = chunks.kernel, chunks.L_inverse
    eye = torch.eye(M, dtype=sums.D.dtype, device=sums.D.device)
    beta = torch.cholesky_solve(sums.D.mT[..., None], sums.roots)[..., 0].mT
    B_inverse = torch.cholesky_inverse(sums.roots)
    outer = beta.mT[:, :, None] * beta.mT[:, None, :]
    inner = (sums.roots @ sums.roots.mT + B_inverse + outer).sum(0) - 2 * P * eye
    Kuu_gradient = -0.5 * (L_inverse.mT @ (inner @ L_inverse))
    if M:
        Kuu_gradient.diagonal().add_(Kuu_gradient.diagonal().sum() * (row_blocks.JITTER / M))
    middle = L_inverse.mT @ (eye - B_inverse - outer)
    left = L_inverse.mT @ beta

    def pull_back(shard: Iterable[row_blocks.WhitenedChunk]) -> row_blocks.Sums:
        own = kernel.fork()
        for chunk in shard:
            w = sites.precision[chunk.rows]
            gradient = left @ sites.linear[chunk.rows].mT
            for p in range(P):
                gradient.addmm_(middle[p], chunk.V * w[:, p])
            own.pull_uf(chunk.block, gradient, chunk.Kuf)
            own.pull_ff(chunk.block, -0.5 * w.sum(1))
        return own.pulled()

    return kernel.gradient(chunks.summed(pull_back), Kuu_gradient)


def exact_site_gradient(
    chunks: row_blocks.WhitenedChunks, sites: Sites, sums: SiteSums
) -> tuple[Tensor, ...]:
    """Return the gradient of G in the kernel's parameters where all rows are inducing points.

    With Σ_p = Vᵀ B_p⁻¹ V the covariance of q(f_p), and α_p = λ_p − W_p Vᵀ B_p⁻¹ D_p,

        ∂G/∂K_ff = ½ Σ_p [α_p α_pᵀ − (K_ff + W_p⁻¹)⁻¹],   (K_ff + W⁻¹)⁻¹ = W − W Σ W.

    O(P N³), a fourth of the operations of `site_gradient`.

    Args:
        chunks: `WhitenedChunks.for_all_rows`.
    """
    (chunk,) = chunks
    w, beta = sites.precision, torch.cholesky_solve(sums.D.mT[..., None], sums.roots)[..., 0].mT
    alpha = sites.linear - w * (chunk.V.mT @ beta)
    gradient = alpha @ alpha.mT
    for p in range(len(sums.roots)):
        A = solve_lower(sums.roots[p], chunk.V * w[:, p])
        gradient.addmm_(A.mT, A)
    gradient.diagonal().sub_(w.sum(1))
    gradient.mul_(0.5)
    gradient.diagonal().add_(gradient.diagonal().sum() * (row_blocks.JITTER / len(w)))
    return chunks.kernel.gradient(chunks.kernel.pulled(), gradient)
