"""Newton's step for the means of q(u) at a fixed covariance, in whitened coordinates.

With m = V α the bound is Σ_i E_i(μ_i) − ½ ‖m‖², μ = Vᵀ m, up to a constant. Its Newton step solves

    (I + V H Vᵀ) δ = V g − m,   g = ∂E/∂μ,   H = −∂²E/∂μ∂μᵀ.

Where each latent function is seen alone, H is the diagonal of the sites' precisions and
I + V H Vᵀ = B has been factorised. Where a likelihood sees several at once (softmax), conjugate
gradients with B for a preconditioner need a few products. Without that coupling a step covers one
part in fifty of the way in some directions.

Every vector x that occurs is V a of some a, which is carried along with it: B⁻¹ V a = V (a − W Vᵀ
B⁻¹ V a).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds import WhitenedChunks

_PRODUCTS = 50
# Of the residual's norm.
_PRECISE = 0.1


@dataclass(frozen=True, slots=True)
class MeanStep:
    """A direction for the means of q."""

    pull: Float[Tensor, "N P"]
    """Of α."""
    q_mean: Float[Tensor, "M P"]
    """Of m = V α."""
    mean: Float[Tensor, "N P"]
    """Of μ = Vᵀ m."""

    def plus(self, length: Tensor, other: "MeanStep") -> "MeanStep":
        """This and a multiple of another."""
        return MeanStep(
            self.pull + length * other.pull,
            self.q_mean + length * other.q_mean,
            self.mean + length * other.mean,
        )


def mean_step(
    chunks: WhitenedChunks,
    *,
    roots: Float[Tensor, "P M M"],
    precision: Float[Tensor, "N P"],
    residual: Float[Tensor, "N P"],
    lifted: Float[Tensor, "M P"],
    coupling: Float[Tensor, "N P P"] | None,
) -> MeanStep:
    """The step at g − α = `residual` and V g − m = `lifted`; O(P N M) a product.

    Args:
        roots: factors of B_p = I + V W_p Vᵀ.
        precision: W.
        coupling: H; the diagonal `precision` if not given.
    """

    def through_B(a: Tensor, x: Tensor) -> MeanStep:
        """B⁻¹ x, x = V a."""
        found = solved(roots, x)
        across = torch.cat([part.V.mT @ found for part in chunks])
        return MeanStep(a - precision * across, found, across)

    z = through_B(residual, lifted)
    if coupling is None:
        return z
    direction, square = z, (lifted * z.q_mean).sum()
    enough = _PRECISE**2 * square
    zero = torch.zeros_like
    step = MeanStep(zero(residual), zero(lifted), zero(residual))
    for _ in range(_PRODUCTS):
        # (I + V H Vᵀ) x = V (a + H Vᵀ x)
        bent = (coupling @ direction.mean[..., None])[..., 0]
        product = direction.q_mean + _lifted(chunks, bent)
        length = square / (direction.q_mean * product).sum()
        step = step.plus(length, direction)
        residual, lifted = residual - length * (direction.pull + bent), lifted - length * product
        z = through_B(residual, lifted)
        before, square = square, (lifted * z.q_mean).sum()
        if not square > enough:
            break
        direction = z.plus(square / before, direction)
    return step


def solved(roots: Float[Tensor, "P M M"], D: Float[Tensor, "M P"]) -> Float[Tensor, "M P"]:
    """B_p⁻¹ D_p of each latent function."""
    return torch.cholesky_solve(D.mT[..., None], roots)[..., 0].mT


def _lifted(chunks: WhitenedChunks, a: Float[Tensor, "N P"]) -> Float[Tensor, "M P"]:
    """V a."""
    total = a.new_zeros(len(chunks.L), a.shape[1])
    for part in chunks:
        total.addmm_(part.V, a[part.rows])
    return total
