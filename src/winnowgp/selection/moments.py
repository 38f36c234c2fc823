"""Additive moments of the data in whitened candidate coordinates.

With K_** + jitter·I = L Lᵀ and V = L⁻¹ K_*f, weights W = diag(w) (noise variance of row i: 1/w_i),
everything a collapsed bound needs is a sum over rows: C = V W Vᵀ, D = V W Y, and four scalars. Sums
over chunks, over processes or over time add up.
"""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.linalg import solve_lower


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums over N rows.

    Attributes:
        C: V W Vᵀ.
        D: V W Y.
        square: Σ_i w_i ‖y_i‖², over all P outputs.
        diagonal: Σ_i w_i k(x_i, x_i).
        log_weight: Σ_i log w_i.
        N: number of rows.
    """

    C: Float[Tensor, "K K"]
    D: Float[Tensor, "K P"]
    square: Float[Tensor, ""]
    diagonal: Float[Tensor, ""]
    log_weight: Float[Tensor, ""]
    N: int

    def __add__(self, other: "Moments") -> "Moments":
        """Moments of the rows of both; they must share L."""
        return Moments(
            C=self.C + other.C,
            D=self.D + other.D,
            square=self.square + other.square,
            diagonal=self.diagonal + other.diagonal,
            log_weight=self.log_weight + other.log_weight,
            N=self.N + other.N,
        )


def block_moments(
    L: Float[Tensor, "K K"],
    Kuf: Float[Tensor, "K B"],
    *,
    Kff_diagonal: Float[Tensor, " B"],
    Y: Float[Tensor, "B P"],
    weights: Float[Tensor, " B"],
) -> Moments:
    """Moments of one block of rows, O(B K²).

    The block is whitened before it is squared: C = (L⁻¹K_*f) W (L⁻¹K_*f)ᵀ. Squaring first and
    whitening the sum from both sides costs the same and multiplies the rounding by cond(K_**).
    """
    V = solve_lower(L, Kuf)
    VW = V * weights
    return Moments(
        C=VW @ V.mT,
        D=VW @ Y,
        square=(weights[:, None] * Y.square()).sum(),
        diagonal=(weights * Kff_diagonal).sum(),
        log_weight=weights.log().sum(),
        N=len(Y),
    )


def chunked_moments(
    L: Float[Tensor, "K K"],
    block: Callable[[slice], tuple[Float[Tensor, "K B"], Float[Tensor, " B"]]],
    *,
    Y: Float[Tensor, "N P"],
    weights: Float[Tensor, " N"],
    chunk: int = 4096,
) -> Moments:
    """Moments of N rows in chunks, O(N K²) time and O(chunk·K) memory.

    Args:
        L: factor of the candidates' covariance, jitter included.
        block: gives K(candidates, rows) and the diagonal of K(rows, rows) for a slice of rows.
        Y: targets.
        weights: noise precisions, positive.
        chunk: rows at a time.
    """
    if len(Y) == 0:
        raise InputError("`Y` must have at least one row; got none.")
    if not bool((weights > 0).all()):
        raise InputError(
            f"`weights` must be positive noise precisions; the smallest is {weights.min().item()}."
        )
    total: Moments | None = None
    for start in range(0, len(Y), chunk):
        rows = slice(start, min(start + chunk, len(Y)))
        Kuf, diagonal = block(rows)
        part = block_moments(L, Kuf, Kff_diagonal=diagonal, Y=Y[rows], weights=weights[rows])
        total = part if total is None else total + part
    assert total is not None
    return total
