"""Chunks of the scaled RBF kernel, by hand: the kernel most fits use, at a fraction of the cost.

With φ(x) = [x, x², 1] and w = 1/ℓ² the exponent of every entry is a linear function of features
that never change,

    log k(z, x) = ⟨[w z, −w/2, log s − ½ w·z²], φ(x)⟩,

so a block is one thin product and one exponential in place. Its pull-back is as short: with
W = ∂F/∂K ∘ K all gradients follow from W φ(X), an M × (2D + 1) matrix.
"""

from typing import final

import torch
from gpytorch.kernels import Kernel, RBFKernel, ScaleKernel
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds import ChunkedKernel, RowBlock, Sums, add_product
from winnowgp.typing import Scalar

# Squared distance of a point from the centre, in lengthscales. Exponents are differences of numbers
# as large: up to here float32 knows them to 2e-6, beyond they are computed in float64.
_REACH = 32.0


def is_scaled_rbf(kernel: Kernel) -> bool:
    """Whether this is exactly a ScaleKernel of an RBFKernel on all columns."""
    return (
        type(kernel) is ScaleKernel
        and type(kernel.base_kernel) is RBFKernel
        and kernel.active_dims is None
        and kernel.base_kernel.active_dims is None
    )


@final
class ScaledRBFChunks(ChunkedKernel):
    """k(x, z) = s exp(−½ Σ_d (x_d − z_d)²/ℓ_d²); the gradient is in (s, ℓ, Z).

    Args:
        Z: points, centred as the features of the rows are.
        dtype: of blocks; that of Z if None.
    """

    def __init__(
        self,
        *,
        Z: Float[Tensor, "M D"],
        variance: Scalar,
        lengthscales: Float[Tensor, " D"],
        dtype: torch.dtype | None = None,
    ) -> None:
        self._Z, self._s, self._l, self._dtype = Z, variance, lengthscales, dtype or Z.dtype
        self._w = lengthscales.square().reciprocal()
        self._wZ = Z * self._w
        self._norm = (self._wZ * Z).sum(1)
        log_s = variance.log()
        # Numbers, read together: a tensor would make a GPU take twice as long for `clamp_max_`.
        farthest = torch.cat([self._norm, log_s.new_zeros(1)]).amax()
        self._most, reach = torch.stack([log_s, farthest]).tolist()
        constant = (log_s - 0.5 * self._norm)[:, None]
        coefficients = torch.cat([self._wZ, (-0.5 * self._w).expand(Z.shape), constant], 1)
        self._coefficients = coefficients.to(self._dtype if reach <= _REACH else Z.dtype)
        self._Kuu = self._covariance()
        self._zero()

    def uu(self) -> Float[Tensor, "M M"]:
        return self._Kuu.clone()

    def uf(self, block: RowBlock) -> Float[Tensor, "M B"]:
        # Exponents are differences of large numbers where lengthscales are tiny, and their rounding
        # must not make a covariance larger than the variance.
        features = block.features.to(self._coefficients.dtype)
        exponent = torch.mm(self._coefficients, features.mT).to(self._dtype)
        return exponent.clamp_max_(self._most).exp_()

    def ff(self, block: RowBlock) -> Float[Tensor, " B"]:
        return self._s.expand(len(block))

    def pull_uf(
        self, block: RowBlock, cotangent: Float[Tensor, "M B"], Kuf: Float[Tensor, "M B"]
    ) -> None:
        add_product(self._pulled, cotangent.mul_(Kuf), block.features.to(Kuf.dtype))

    def pull_ff(self, block: RowBlock, cotangent: Float[Tensor, " B"]) -> None:
        # One number stands for all rows where they have the same.
        self._pulled_ff += cotangent.expand(len(block)).sum()

    def pulled(self) -> tuple[Tensor, Tensor]:
        found = self._pulled, self._pulled_ff
        self._zero()
        return found

    def gradient(self, pulled: Sums, uu: Float[Tensor, "M M"]) -> tuple[Tensor, Tensor, Tensor]:
        D, Z, (features, variances) = self._Z.shape[1], self._Z, pulled
        first, second, total = features.split([D, D, 1], 1)
        # Both arguments of K_uu are Z and its cotangent is symmetric: derivatives count twice.
        W = uu.mul_(self._Kuu)
        sums = W.sum(1, keepdim=True)
        moved = W @ Z - sums * Z
        d_Z = self._w * (2 * moved + first - total * Z)
        d_w = (Z * (moved + first) - 0.5 * second - 0.5 * total * Z.square()).sum(0)
        # d log s = ds/s, dw = −2 w dℓ/ℓ
        d_log_s = sums.sum() + total.sum() + self._s * variances
        return d_log_s / self._s, -2 * self._w * d_w / self._l, d_Z

    def _zero(self) -> None:
        self._pulled = self._Z.new_zeros(self._coefficients.shape)
        self._pulled_ff = self._Z.new_zeros(())

    def _covariance(self) -> Float[Tensor, "M M"]:
        half = 0.5 * self._norm
        exponent = (self._wZ @ self._Z.mT).sub_(half[:, None]).sub_(half)
        K = exponent.clamp_max_(0).exp_().mul_(self._s)
        # Rounding of the two sides must not differ, and the diagonal is known.
        K = (K + K.mT).mul_(0.5)
        K.diagonal().fill_(self._s)
        return K
