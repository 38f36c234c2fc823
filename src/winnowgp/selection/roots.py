"""Roots that say everything a collapsed bound needs about the data.

With K_** + jitter·I = L Lᵀ, the moments C = V W Vᵀ and D = V W Y of the data in the coordinates V =
L⁻¹K_*f, and I + C = R Rᵀ, the candidates have two covariances: the prior L Lᵀ, and
S = K_** + K_*f W K_f* = (L R)(L R)ᵀ. S is never formed: its root L R is exact to rounding where S
itself would square the condition number. Outputs whose rows have other weights have an S of their
own and share L.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds import Moments
from winnowgp.linalg import definite_cholesky, solve_lower


@dataclass(frozen=True, slots=True)
class DataRoot:
    """Root of one S, and the targets of its outputs seen through it.

    Attributes:
        R: root of I + C.
        LR: root of S.
        y: R⁻¹ D, so that K_*f W Y = L R y; a column for each output whose mean is learnt here.
        P: number of outputs whose covariance is learnt here. The same number, unless means and
            covariances have points of their own.
    """

    R: Float[Tensor, "K K"]
    LR: Float[Tensor, "K K"]
    y: Float[Tensor, "K Y"]
    P: int


@dataclass(frozen=True, slots=True)
class Roots:
    """Roots of the candidates' covariances.

    Attributes:
        L: root of K_** + jitter·I, the prior covariance.
        data: one for each set of weights.
        empty: bound with no inducing points, in nats.
        N: observations behind the moments.
    """

    L: Float[Tensor, "K K"]
    data: tuple[DataRoot, ...]
    empty: Float[Tensor, ""]
    N: int | float

    @property
    def K(self) -> int:
        """Number of candidates."""
        return len(self.L)


def whitened_roots(L: Float[Tensor, "K K"], *moments: Moments) -> Roots:
    """Roots from that of K_** + jitter·I and the moments whitened with it, O(K³) each.

    L(∅) = Σ [P · constant − ½ (Σ w ‖y‖² + P Σ w k_ii)].
    """
    empty = [m.D.shape[1] * (m.constant - 0.5 * m.diagonal) - 0.5 * m.square for m in moments]
    return Roots(
        L=L,
        data=tuple(_data_root(L, m) for m in moments),
        empty=torch.stack(empty).sum(),
        N=moments[0].N,
    )


def _data_root(L: Float[Tensor, "K K"], moments: Moments) -> DataRoot:
    inner = moments.C.clone()
    inner.diagonal().add_(1.0)
    R = definite_cholesky(inner)
    return DataRoot(R=R, LR=L @ R, y=solve_lower(R, moments.D), P=moments.D.shape[1])
