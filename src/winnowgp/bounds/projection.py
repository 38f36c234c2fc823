"""What every Gaussian bound needs of the M points: V = L⁻¹ K_uf, and B = I + V W Vᵀ factorised."""

from dataclasses import dataclass
from math import log, pi

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.linalg import cholesky, definite_cholesky, half_log_det, solve_lower, squared_norm


@dataclass(frozen=True, slots=True)
class Projection:
    """Rows and targets seen through M whitened inducing values, W = diag(1 / variance).

    `Qff = Vᵀ V` is the prior covariance that the M points can explain.
    """

    V: Float[Tensor, "*batch M N"]
    """L⁻¹ K_uf, with K_uu = L Lᵀ."""
    LB: Float[Tensor, "*batch M M"]
    """Factor of B = I + V W Vᵀ."""
    c: Float[Tensor, "*batch M P"]
    """LB⁻¹ V W Y."""
    fit: Float[Tensor, "*batch"]
    """Σ_p y_pᵀ (Q_ff + W⁻¹)⁻¹ y_p."""
    log_det: Float[Tensor, "*batch"]
    """log |Q_ff + W⁻¹|."""

    def explained_variance(self) -> Float[Tensor, "*batch N"]:
        """q_ii = Σ_m V_mi², at most k_ii."""
        return self.V.square().sum(-2)

    def log_normal(self) -> Float[Tensor, "*batch"]:
        """Σ_p log N(y_p | 0, Q_ff + W⁻¹)."""
        N, P = self.V.shape[-1], self.c.shape[-1]
        return -0.5 * (N * P * log(2 * pi) + P * self.log_det + self.fit)


def project(
    Kuu: Float[Tensor, "*batch M M"],
    Kuf: Float[Tensor, "*batch M N"],
    Y: Float[Tensor, "N P"],
    variance: Float[Tensor, "*#batch N"],
) -> Projection:
    """Factorise the blocks; O(N M² + M³)."""
    V = solve_lower(cholesky(Kuu).L, Kuf)
    # A = V W^½, so that B = I + A Aᵀ; B ≥ I is safe to factorise without jitter.
    scale = variance.rsqrt()
    A = V * scale[..., None, :]
    Ys = Y * scale[..., :, None]
    eye = torch.eye(V.shape[-2], dtype=V.dtype, device=V.device)
    LB = definite_cholesky(eye + A @ A.mT)
    c = solve_lower(LB, A @ Ys)
    # Matrix inversion and determinant lemmas.
    fit = squared_norm(Ys) - squared_norm(c)
    log_det = variance.log().sum(-1) + 2 * half_log_det(LB)
    return Projection(V, LB, c, fit, log_det)
