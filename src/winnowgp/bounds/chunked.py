"""The collapsed bound of rows that come in chunks: its sufficient statistics.

With K_** + jitter·I = L Lᵀ, V = L⁻¹ K_*f and W = diag(w), where row i has noise variance 1/w_i, a
collapsed bound depends on the data through sums over rows alone: C = V W Vᵀ, D = V W Y and four
scalars (`Moments`). Sums over chunks, over processes or over time can be added.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds import row_blocks
from winnowgp.bounds.collapsed import optimal_posterior
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
        N: number of observations; with sample weights, their sum. Missing targets count as well.
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


GroupedChunk: TypeAlias = tuple[
    Float[Tensor, "K B"],
    Float[Tensor, " B"],
    Sequence[tuple[Float[Tensor, "B p"], Float[Tensor, " B"]]],
]
"""K(candidates, rows), the diagonal of K(rows, rows), and targets and noise precisions of groups of
targets in some rows; a precision is zero where targets are missing."""


def grouped_sums(L: Float[Tensor, "K K"], chunks: Iterable[GroupedChunk]) -> row_blocks.Sums:
    """Return C = V W Vᵀ, D = V W Y, Σ w y² of each target and Σ w k_ii, one after another.

    There are four tensors for each group of targets; O(N K²) time for each, and the memory of one
    chunk. The kernel is whitened once, by a solve before it is squared. Squaring first and
    whitening the sum from both sides multiplies the rounding error by cond(K_**). Whitening by
    products with an inverse is faster, but at a condition number of 1e18 it changes the bound by up
    to 2e-4 (relative) with the inverse of L and by 5e-6 with inverses of its diagonal blocks of
    thirty rows; a solve changes it by 3e-8.

    Args:
        L: factor of the candidates' covariance, jitter included.
        chunks: all chunks have the same groups.
    """
    totals: list[list[Tensor]] = []
    for Kuf, kff, groups in chunks:
        V = solve_lower(L, Kuf)
        if not totals:
            totals = [_empty_sums(L, Y.shape[1]) for Y, _ in groups]
        for total, (Y, weights) in zip(totals, groups, strict=True):
            scale = weights.sqrt()
            # In place where no other group needs V.
            own = V.mul_(scale) if len(groups) == 1 else V * scale
            row_blocks.add_gram(total[0], own, own)
            total[1].addmm_(own, scale[:, None] * Y)
            total[2] = total[2] + (weights[:, None] * Y.square()).sum(0)
            total[3] = total[3] + weights @ kff
    return tuple(t for C, *others in totals for t in (row_blocks.from_panels(C), *others))


def _empty_sums(L: Float[Tensor, "K K"], P: int) -> list[Tensor]:
    return [torch.zeros_like(L), L.new_zeros(len(L), P), L.new_zeros(P), L.new_zeros(())]


def moment_bound(moments: Moments) -> Float[Tensor, ""]:
    """Return the collapsed bound of all K candidates in nats; O(K³).

    −½ [NP log 2π + P log|I + C| − P Σ log w + Σ w‖y‖² − Dᵀ(I + C)⁻¹D + P (Σ w k_ii − tr C)]
    """
    P, LB = moments.D.shape[1], _factor(moments.C)
    unexplained = moments.diagonal - moments.C.diagonal().sum()
    fit = moments.square - squared_norm(solve_lower(LB, moments.D))
    return P * (moments.constant - half_log_det(LB) - 0.5 * unexplained) - 0.5 * fit


def moment_upper_bound(moments: Moments) -> Float[Tensor, ""]:
    """Return an upper bound on the log evidence (Titsias 2014); O(K³).

    With Σ = W⁻¹ and t = Σ w k_ii − tr C, the trace of Σ^{-½} (K_ff − Q_ff) Σ^{-½}, the evidence has
    K_ff + Σ ⪯ Q_ff + (1 + t) Σ in its quadratic term. Widening the noise to (1 + t) Σ multiplies C,
    D and Σ w‖y‖² by r = 1/(1 + t). With noise shared by all rows it is `collapsed.upper_bound`.
    """
    # t is non-negative up to rounding.
    r = 1 / (1 + (moments.diagonal - moments.C.diagonal().sum()).clamp_min(0))
    fit = r * moments.square - squared_norm(solve_lower(_factor(r * moments.C), r * moments.D))
    log_scale = moments.constant - half_log_det(_factor(moments.C))
    return moments.D.shape[1] * log_scale - 0.5 * fit


def moment_posterior(*moments: Moments) -> tuple[Float[Tensor, "K P"], Float[Tensor, "#P K K"]]:
    """Return the optimal q(v) of whitened inducing values (`optimal_posterior`); O(K³) each.

    Args:
        moments: moments of all outputs, or of groups of outputs, in this order.

    Returns:
        Means, and the factor of the covariance, one for each output if there are several moments.
    """
    posteriors = [optimal_posterior(_factor(m.C), m.D) for m in moments]
    means = torch.cat([mean for mean, _ in posteriors], 1)
    if len(moments) == 1:
        return means, posteriors[0][1][None]
    return means, torch.stack([F for mean, F in posteriors for _ in range(mean.shape[1])])


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
