"""Sufficient statistics of the collapsed bound, accumulated over rows.

With K_** + jitter·I = L Lᵀ, V = L⁻¹ K_*f and W = diag(w), where row i has noise variance 1/w_i, a
collapsed bound depends on the data through sums over rows alone: C = V W Vᵀ, D = V W Y and four
scalars. Sums over chunks, over processes or over time can be added.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import pi
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds.collapsed import optimal_posterior
from winnowgp.bounds.row_blocks import add_gram, from_panels
from winnowgp.errors import InputError
from winnowgp.linalg import definite_cholesky, half_log_det, solve_lower, squared_norm


@dataclass(frozen=True, slots=True)
class Moments:
    """Moments of the data in whitened candidate coordinates, summed over rows.

    Attributes:
        C: V W Vᵀ.
        D: V W Y.
        square: Σ_i w_i ‖y_i‖², over all P outputs.
        diagonal: Σ_i w_i k(x_i, x_i).
        constant: Σ_i ½ log(w_i / 2π), the log-normaliser of each output's density.
        N: number of observations; with sample weights, their sum.
    """

    C: Float[Tensor, "K K"]
    D: Float[Tensor, "K P"]
    square: Float[Tensor, ""]
    diagonal: Float[Tensor, ""]
    constant: Float[Tensor, ""]
    N: int | float

    @property
    def sums(self) -> tuple[Tensor, ...]:
        """C, D, Σ w‖y‖² and Σ w k_ii."""
        return self.C, self.D, self.square, self.diagonal

    def __add__(self, other: "Moments") -> "Moments":
        """Return the moments of the rows of both; they must share L."""
        return Moments(
            C=self.C + other.C,
            D=self.D + other.D,
            square=self.square + other.square,
            diagonal=self.diagonal + other.diagonal,
            constant=self.constant + other.constant,
            N=self.N + other.N,
        )


KernelChunk: TypeAlias = tuple[
    Float[Tensor, "K B"], Float[Tensor, " B"], Float[Tensor, "B P"], Float[Tensor, " B"]
]
"""K(candidates, rows), the diagonal of K(rows, rows), targets and noise precisions of some rows."""


def chunked_moments(L: Float[Tensor, "K K"], chunks: Iterable[KernelChunk]) -> Moments:
    """Return the moments of rows that come in chunks; O(N K²) time and the memory of one chunk.

    Each block is whitened by a solve before it is squared. Squaring first and whitening the sum
    from both sides multiplies the rounding error by cond(K_**). Whitening by products with an
    inverse is faster, but at a condition number of 1e18 it changes the bound by up to 2e-4
    (relative) with the inverse of L and by 5e-6 with inverses of its diagonal blocks of thirty
    rows; a solve changes it by 3e-8.

    Args:
        L: factor of the candidates' covariance, jitter included.
        chunks: at least one row in total; precisions are positive.
    """
    C, D, N = torch.zeros_like(L), None, 0
    square = diagonal = constant = L.new_zeros(())
    for Kuf, kff, Y, weights in chunks:
        scale = weights.sqrt()
        V = solve_lower(L, Kuf).mul_(scale)
        add_gram(C, V, V)
        D = L.new_zeros(len(L), Y.shape[1]) if D is None else D
        D.addmm_(V, scale[:, None] * Y)
        square = square + (weights[:, None] * Y.square()).sum()
        diagonal = diagonal + weights @ kff
        constant = constant + 0.5 * (weights / (2 * pi)).log().sum()
        N += len(Y)
    if D is None or not N:
        raise InputError("`chunks` must hold at least one row in total; got none.")
    if not bool(torch.isfinite(constant)):
        raise InputError(
            "`weights` must be positive and finite noise precisions; some are zero, negative or "
            "not finite."
        )
    return Moments(C=from_panels(C), D=D, square=square, diagonal=diagonal, constant=constant, N=N)


def moment_bound(moments: Moments) -> Float[Tensor, ""]:
    """Return the collapsed bound of all K candidates in nats; O(K³).

    −½ [NP log 2π + P log|I + C| − P Σ log w + Σ w‖y‖² − Dᵀ(I + C)⁻¹D + P (Σ w k_ii − tr C)]
    """
    P, LB = moments.D.shape[1], _factor(moments.C)
    unexplained = moments.diagonal - moments.C.diagonal().sum()
    fit = moments.square - squared_norm(solve_lower(LB, moments.D))
    return P * (moments.constant - half_log_det(LB) - 0.5 * unexplained) - 0.5 * fit


def moment_upper_bound(moments: Moments) -> Float[Tensor, ""]:
    """Return the upper bound of `evidence.upper_bound` for noise shared by all rows; O(K³).

    With w = 1/σ² the trace is t = σ² (Σ w k_ii − tr C), and widening the noise by t multiplies C, D
    and Σ w‖y‖² by r = σ²/(σ² + t).
    """
    # t is non-negative up to rounding.
    r = 1 / (1 + (moments.diagonal - moments.C.diagonal().sum()).clamp_min(0))
    fit = r * moments.square - squared_norm(solve_lower(_factor(r * moments.C), r * moments.D))
    log_scale = moments.constant - half_log_det(_factor(moments.C))
    return moments.D.shape[1] * log_scale - 0.5 * fit


def moment_posterior(*moments: Moments) -> tuple[Float[Tensor, "K P"], Float[Tensor, "#P K K"]]:
    """Return the optimal q(v) of whitened inducing values (`optimal_posterior`); O(K³) each.

    Args:
        moments: moments of all outputs, or of one output each.

    Returns:
        Means, and one factor of the covariance for each of the moments.
    """
    posteriors = [optimal_posterior(_factor(m.C), m.D) for m in moments]
    return torch.cat([mean for mean, _ in posteriors], 1), torch.stack([F for _, F in posteriors])


def prior_moments(moments: Moments) -> Moments:
    """Return moments whose bounds are K times those expected for targets drawn from the prior.

    A bound depends on the targets through D Dᵀ and Σ w y² alone. For y ~ N(0, Q_** + W⁻¹), the
    prior explained by all K candidates, with C = V W Vᵀ = U diag(s) Uᵀ,

        E[D Dᵀ] = V W (VᵀV + W⁻¹) W Vᵀ = C² + C,   E[Σ w y²] = tr C + N.

    The K columns of √K U diag(s (s + 1))^½ are such a D for K outputs, so that the collapsed bound
    of any subset, divided by K, is exactly its expectation; O(K³).

    Args:
        moments: moments of the rows; their targets are not used.
    """
    K = len(moments.C)
    s, U = torch.linalg.eigh(moments.C)
    s = s.clamp_min(0)  # non-negative up to rounding
    return replace(
        moments,
        D=U * (K * s * (s + 1)).sqrt(),
        square=K * (moments.C.diagonal().sum() + moments.N),
    )


def _factor(C: Float[Tensor, "K K"]) -> Float[Tensor, "K K"]:
    """Return the Cholesky factor of B = I + C."""
    return definite_cholesky(C + torch.eye(len(C), dtype=C.dtype, device=C.device))
