"""Sufficient statistics of the collapsed bound, accumulated over rows."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import pi
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds.row_blocks import add_gram, from_panels
from winnowgp.errors import InputError
from winnowgp.linalg import definite_cholesky, half_log_det, solve_lower, squared_norm

# Additive moments of the data in whitened candidate coordinates.
#
# With K_** + jitter·I = L Lᵀ and V = L⁻¹ K_*f, weights W = diag(w) (noise variance of row i:
# 1/w_i),
# everything a collapsed bound needs is a sum over rows: C = V W Vᵀ, D = V W Y, and four scalars.
# Sums
# over chunks, over processes or over time add up.


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums over N rows.

    Attributes:
        C: V W Vᵀ.
        D: V W Y.
        square: Σ_i w_i ‖y_i‖², over all P outputs.
        diagonal: Σ_i w_i k(x_i, x_i).
        constant: Σ_i ½ log(w_i / 2π), what each output's density has besides its exponent.
        N: number of observations, which is that of the rows unless they have weights.
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
        """Moments of the rows of both; they must share L."""
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


def chunked_moments(L: Float[Tensor, "K K"], pieces: Iterable[KernelChunk]) -> Moments:
    """Moments of rows that come in pieces; O(N K²) time, and the memory of a piece.

    Each block is whitened, by a solve, before it is squared. Squaring first and whitening the sum
    from both sides multiplies the rounding by cond(K_**). Whitening by products with an inverse is
    quicker too: at a condition of 1e18 that of L errs by up to 2e-4 of the bound, those of its
    diagonal blocks of thirty rows by 5e-6, a solve by 3e-8.

    Args:
        L: factor of the candidates' covariance, jitter included.
        pieces: of at least one row in all; precisions are positive.
    """
    C, D, N = torch.zeros_like(L), None, 0
    square = diagonal = constant = L.new_zeros(())
    for Kuf, kff, Y, weights in pieces:
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
        raise InputError("`pieces` must have at least one row in all; got none.")
    if not bool(torch.isfinite(constant)):
        raise InputError("`weights` must be positive and finite noise precisions; some are not.")
    return Moments(C=from_panels(C), D=D, square=square, diagonal=diagonal, constant=constant, N=N)


def moment_bound(moments: Moments) -> Float[Tensor, ""]:
    """The collapsed bound of all K points, in nats; O(K³).

    −½ [NP log 2π + P log|I + C| − P Σ log w + Σ w‖y‖² − Dᵀ(I + C)⁻¹D + P (Σ w k_ii − tr C)]
    """
    P, root = moments.D.shape[1], _root(moments.C)
    unexplained = moments.diagonal - moments.C.diagonal().sum()
    fit = moments.square - squared_norm(solve_lower(root, moments.D))
    return P * (moments.constant - half_log_det(root) - 0.5 * unexplained) - 0.5 * fit


def moment_upper_bound(moments: Moments) -> Float[Tensor, ""]:
    """The evidence upper bound of `bounds.upper_bound`, for noise shared by all rows; O(K³).

    With w = 1/σ² its trace is t = σ² (Σ w k_ii − tr C), and widening the noise by t multiplies C, D
    and Σ w‖y‖² by r = σ²/(σ² + t).
    """
    # t cannot be negative but for rounding.
    r = 1 / (1 + (moments.diagonal - moments.C.diagonal().sum()).clamp_min(0))
    fit = r * moments.square - squared_norm(solve_lower(_root(r * moments.C), r * moments.D))
    log_scale = moments.constant - half_log_det(_root(moments.C))
    return moments.D.shape[1] * log_scale - 0.5 * fit


def moment_posterior(moments: Moments) -> tuple[Float[Tensor, "K P"], Float[Tensor, "1 K K"]]:
    """The optimal q(v) of `bounds.collapsed_posterior`, from the moments; O(K³)."""
    LB = _root(moments.C)
    F = solve_lower(LB, torch.eye(len(LB), dtype=LB.dtype, device=LB.device)).mT
    return F @ solve_lower(LB, moments.D), F[None]


def _root(C: Float[Tensor, "K K"]) -> Float[Tensor, "K K"]:
    """The Cholesky factor of I + C."""
    return definite_cholesky(C + torch.eye(len(C), dtype=C.dtype, device=C.device))


# Moments for targets that nobody has seen yet.


def prior_moments(moments: Moments) -> Moments:
    """Moments whose bounds are K times those expected of targets drawn from the prior.

    A bound depends on targets through D Dᵀ and Σ w y² alone. For y ~ N(0, Q_** + W⁻¹), the prior
    seen through all K candidates, with C = V W Vᵀ = U diag(s) Uᵀ,

        E[D Dᵀ] = V W (VᵀV + W⁻¹) W Vᵀ = C² + C,   E[Σ w y²] = tr C + N.

    The K columns of √K U diag(s (s + 1))^½ are such a D for K outputs at once, so that every
    collapsed bound of every subset, divided by K, is exactly its expectation; O(K³).

    Args:
        moments: of the rows, whatever their targets were.
    """
    K = len(moments.C)
    s, U = torch.linalg.eigh(moments.C)
    s = s.clamp_min(0)  # but for rounding they are not negative
    return replace(
        moments,
        D=U * (K * s * (s + 1)).sqrt(),
        square=K * (moments.C.diagonal().sum() + moments.N),
    )
