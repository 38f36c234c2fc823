"""The bound of the Bayesian GP-LVM at the optimal q(u) (Titsias & Lawrence 2010).

Inputs have the prior N(0, I) and q(x_i) = N(μ_i, diag s_i). Given psi statistics the bound is that
of regression: with K_uu = L Lᵀ, the matrices C = L⁻¹ Ψ2 L⁻ᵀ/σ² and D = L⁻¹ Ψ1 Y/σ² and the scalar
Σ_i ψ0_i/σ² are the moments of `bounds.chunked`. A missing entry is a row of weight zero in its
column. Columns observed in the same rows with the same noise share their moments; others have
their own. The bound is exact for any pattern of missing entries, and no q(u) has to be learnt.
"""

from dataclasses import dataclass
from math import log, pi

import torch
from jaxtyping import Float, Int
from torch import Tensor

from winnowgp.bounds.chunked import Moments
from winnowgp.bounds.psi import Psi
from winnowgp.bounds.row_blocks import JITTER
from winnowgp.linalg import definite_cholesky, half_log_det, solve_lower


@dataclass(frozen=True, slots=True)
class ObservedColumns:
    """The observed table of a GP-LVM, with the row weights of its psi statistics.

    Attributes:
        Y: the table, zero where an entry is missing.
        weights: row weights of each of G patterns: one where a row is observed, zero elsewhere.
        pattern: index of the pattern of each column.
        noise: noise variance of each column, or one for all columns.
    """

    Y: Float[Tensor, "N P"]
    weights: Float[Tensor, "G N"]
    pattern: Int[Tensor, " P"]
    noise: Float[Tensor, " P"] | Float[Tensor, " 1"]

    @property
    def shared(self) -> bool:
        """Whether all columns have the same moments."""
        return len(self.weights) == 1 and len(self.noise) == 1


def latent_kl(mean: Float[Tensor, "N Q"], variance: Float[Tensor, "N Q"]) -> Float[Tensor, " N"]:
    """Return KL[N(μ_i, diag s_i) ‖ N(0, I)] = ½ Σ_q (s + μ² − 1 − log s) of each row, in nats."""
    return 0.5 * (variance + mean.square() - 1 - variance.log()).sum(1)


def whitening_factor(Kuu: Float[Tensor, "*S M M"]) -> Float[Tensor, "*S M M"]:
    """Return the factor L of K_uu with a jitter of 1e-8 of its mean diagonal.

    Ψ2 is not available in factored form and is whitened from both sides, which multiplies its
    rounding error by the condition number of K_uu: the 1e-12 of `linalg.cholesky` is too small.
    """
    M = Kuu.shape[-1]
    mean = Kuu.diagonal(dim1=-2, dim2=-1).mean(-1) if M else Kuu.new_ones(Kuu.shape[:-2])
    eye = torch.eye(M, dtype=Kuu.dtype, device=Kuu.device)
    return definite_cholesky(Kuu + (JITTER * mean)[..., None, None] * eye)


def gplvm_bound(
    Kuu: Float[Tensor, "*S M M"],
    psi1: Float[Tensor, "*S M N"],
    psi2: Float[Tensor, "*S G M M"],
    *,
    psi0: Float[Tensor, " N"],
    columns: ObservedColumns,
) -> Float[Tensor, "*S"]:
    """Return the expected log-likelihood minus KL[q(u) ‖ p(u)] at the optimal q(u), in nats.

        −½ Σ_p [ n_p log 2πσ_p² + log|B_p| + (‖y_p‖² − D_pᵀB_p⁻¹D_p σ_p²)/σ_p²
                 + (Σ_i w_pi ψ0_i)/σ_p² − tr C_p ],    B_p = I + C_p

    The ELBO is this minus the sum of `latent_kl`. It equals `collapsed_bound` when q(x_i) has zero
    variance. O(M³) for each pattern and noise variance.
    """
    L = whitening_factor(Kuu)
    C, D = _whitened(L, psi1, psi2, columns)
    eye = torch.eye(C.shape[-1], dtype=C.dtype, device=C.device)
    LB = definite_cholesky(eye + C)
    # [*S 1 M P] for shared moments, or [*S P M 1] with one set of moments per column.
    targets = D.unsqueeze(-3) if columns.shared else D.mT.unsqueeze(-1)
    fit = solve_lower(LB, targets).square().sum((-3, -2, -1))
    volume = half_log_det(LB) - 0.5 * C.diagonal(dim1=-2, dim2=-1).sum(-1)
    repeats = columns.Y.shape[1] if columns.shared else 1
    return _empty_bound(psi0, columns).sum() + 0.5 * fit - repeats * volume.sum(-1)


def gplvm_moments(L: Float[Tensor, "M M"], psi: Psi, columns: ObservedColumns) -> list[Moments]:
    """Return the moments whitened with L, for `subset_statistics` and `moment_posterior`.

    There is one set of moments if all columns share rows and noise, else one per column. Where
    rounding has made some C indefinite (small noise, close inducing points), Ψ2 is first replaced
    by the nearest positive semi-definite matrix, so that I + C can be factorised. Not
    differentiable.
    """
    N, P = columns.Y.shape
    C, D = _whitened(L, psi.psi1, psi.psi2, columns)
    eye = torch.eye(len(L), dtype=L.dtype, device=L.device)
    if bool(torch.linalg.cholesky_ex(eye + C).info.any()):
        values, vectors = torch.linalg.eigh(psi.psi2)
        V = solve_lower(L, vectors * values.clamp_min(0).sqrt()[:, None, :])
        C = V @ V.mT if columns.shared else (V @ V.mT)[columns.pattern]
        C = C / columns.noise[:, None, None]
    counts = columns.weights.sum(1)[columns.pattern]
    square = columns.Y.square().sum(0) / columns.noise
    diagonal = (columns.weights @ psi.psi0)[columns.pattern] / columns.noise
    constant = -0.5 * counts * (2 * pi * columns.noise).log()
    if columns.shared:
        return [Moments(C[0], D, square.sum(), diagonal[0], constant[0], N)]
    return [
        Moments(C[p], D[:, p : p + 1], square[p], diagonal[p], constant[p], N) for p in range(P)
    ]


def _whitened(
    L: Tensor, psi1: Tensor, psi2: Tensor, columns: ObservedColumns
) -> tuple[Float[Tensor, "*S sets M M"], Float[Tensor, "*S M P"]]:
    """Return C of each set of moments, and D of each column."""
    half = solve_lower(L.unsqueeze(-3), psi2)
    C = solve_lower(L.unsqueeze(-3), half.mT)
    C = 0.5 * (C + C.mT)
    if not columns.shared:
        C = C[..., columns.pattern, :, :]
    D = solve_lower(L, psi1 @ columns.Y) / columns.noise
    return C / columns.noise[:, None, None], D


def _empty_bound(psi0: Float[Tensor, " N"], columns: ObservedColumns) -> Float[Tensor, " P"]:
    """Return the bound of each column without inducing points: log N(y | 0, σ²) − Σ ψ0/2σ²."""
    counts = columns.weights.sum(1)[columns.pattern]
    square = columns.Y.square().sum(0) + (columns.weights @ psi0)[columns.pattern]
    return -0.5 * (counts * (log(2 * pi) + columns.noise.log()) + square / columns.noise)
