"""Two roots that say everything a collapsed bound needs about the data.

With K_** + jitter·I = L Lᵀ, the moments C = V W Vᵀ and D = V W Y of the data in the coordinates V =
L⁻¹K_*f, and I + C = R Rᵀ, the candidates have two covariances: the prior L Lᵀ, and
S = K_** + K_*f W K_f* = (L R)(L R)ᵀ. S is never formed: its root L R is exact to rounding where S
itself would square the condition number.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds.moments import Moments
from winnowgp.linalg import definite_cholesky, solve_lower


@dataclass(frozen=True, slots=True)
class Roots:
    """Roots of the candidates' two covariances, and the targets seen through the second.

    Attributes:
        L: root of K_** + jitter·I, the prior covariance.
        R: root of I + C.
        LR: root of S.
        y: R⁻¹ D, so that K_*f W Y = L R y.
        empty: bound with no inducing points, in nats.
        N: rows of data behind the moments.
    """

    L: Float[Tensor, "K K"]
    R: Float[Tensor, "K K"]
    LR: Float[Tensor, "K K"]
    y: Float[Tensor, "K P"]
    empty: Float[Tensor, ""]
    N: int

    @property
    def K(self) -> int:
        """Number of candidates."""
        return len(self.L)

    @property
    def P(self) -> int:
        """Number of outputs."""
        return self.y.shape[1]


def whitened_roots(L: Float[Tensor, "K K"], moments: Moments) -> Roots:
    """Roots from that of K_** + jitter·I and the moments whitened with it, O(K³).

    L(∅) = P · constant − ½ [Σ w ‖y‖² + P Σ w k_ii].
    """
    inner = moments.C.clone()
    inner.diagonal().add_(1.0)
    R = definite_cholesky(inner)
    constant = moments.constant - 0.5 * moments.diagonal
    return Roots(
        L=L,
        R=R,
        LR=L @ R,
        y=solve_lower(R, moments.D),
        empty=moments.D.shape[1] * constant - 0.5 * moments.square,
        N=moments.N,
    )
