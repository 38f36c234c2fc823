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

from winnowgp.bounds import ChunkedKernel
from winnowgp.typing import Scalar


def is_scaled_rbf(kernel: Kernel) -> bool:
    """Whether this is exactly a ScaleKernel of an RBFKernel on all columns."""
    return (
        type(kernel) is ScaleKernel
        and type(kernel.base_kernel) is RBFKernel
        and kernel.active_dims is None
        and kernel.base_kernel.active_dims is None
    )


def rbf_features(X: Float[Tensor, "N D"]) -> Float[Tensor, "N F"]:
    """[x, x², 1] of each row, once for a data set. Centre the inputs: exponents are differences."""
    return torch.cat([X, X.square(), X.new_ones(X.shape[0], 1)], 1)


@final
class ScaledRBFChunks(ChunkedKernel):
    """k(x, z) = s exp(−½ Σ_d (x_d − z_d)²/ℓ_d²); the gradient is in (s, ℓ, Z).

    Args:
        features: `rbf_features(X)`.
    """

    def __init__(
        self,
        features: Float[Tensor, "N F"],
        *,
        Z: Float[Tensor, "M D"],
        variance: Scalar,
        lengthscales: Float[Tensor, " D"],
    ) -> None:
        self._features, self._Z, self._s, self._l = features, Z, variance, lengthscales
        self._w = lengthscales.square().reciprocal()
        self._wZ = Z * self._w
        self._norm = (self._wZ * Z).sum(1)
        self._log_s = variance.log()
        constant = (self._log_s - 0.5 * self._norm)[:, None]
        self._coefficients = torch.cat([self._wZ, (-0.5 * self._w).expand(Z.shape), constant], 1)
        self._Kuu = self._covariance()
        self._pulled = Z.new_zeros(Z.shape[0], features.shape[1])
        self._d_log_s = Z.new_zeros(())
        self._d_w = torch.zeros_like(self._w)
        self._d_Z = torch.zeros_like(Z)

    def uu(self) -> Float[Tensor, "M M"]:
        return self._Kuu.clone()

    def uf(self, rows: slice) -> Float[Tensor, "M B"]:
        # Exponents are differences of large numbers where lengthscales are tiny, and their rounding
        # must not make a covariance larger than the variance.
        exponent = torch.mm(self._coefficients, self._features[rows].mT)
        return exponent.clamp_max_(self._log_s).exp_()

    def ff(self, rows: slice) -> Float[Tensor, " B"]:
        return self._s.expand(rows.stop - rows.start)

    def pull_uu(self, cotangent: Float[Tensor, "M M"]) -> None:
        # Both arguments are Z and the cotangent is symmetric: every derivative counts twice.
        W = cotangent.mul_(self._Kuu)
        total = W.sum(1)
        moved = W @ self._Z - total[:, None] * self._Z
        self._d_log_s += total.sum()
        self._d_Z += 2 * self._w * moved
        self._d_w += (self._Z * moved).sum(0)

    def pull_uf(
        self, rows: slice, cotangent: Float[Tensor, "M B"], Kuf: Float[Tensor, "M B"]
    ) -> None:
        self._pulled.addmm_(cotangent.mul_(Kuf), self._features[rows])

    def pull_ff(self, rows: slice, cotangent: Float[Tensor, " B"]) -> None:
        self._d_log_s += self._s * cotangent.sum()

    def gradient(self) -> tuple[Tensor, Tensor, Tensor]:
        D, Z = self._Z.shape[1], self._Z
        first, second, total = self._pulled.split([D, D, 1], 1)
        d_Z = self._d_Z + self._w * (first - total * Z)
        d_w = self._d_w + (Z * first - 0.5 * second - 0.5 * total * Z.square()).sum(0)
        # d log s = ds/s, dw = −2 w dℓ/ℓ
        return (self._d_log_s + total.sum()) / self._s, -2 * self._w * d_w / self._l, d_Z

    def _covariance(self) -> Float[Tensor, "M M"]:
        half = 0.5 * self._norm
        exponent = (self._wZ @ self._Z.mT).sub_(half[:, None]).sub_(half)
        K = exponent.clamp_max_(0).exp_().mul_(self._s)
        # Rounding of the two sides must not differ, and the diagonal is known.
        K = (K + K.mT).mul_(0.5)
        K.diagonal().fill_(self._s)
        return K
