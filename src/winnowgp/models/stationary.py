"""Stationary kernels as functions of the distance: RBF and Matérn, with closed-form gradients.

A stationary kernel is a function of the scaled squared distance r² = Σ_d (x_d − z_d)²/ℓ_d². The
kernels differ in their `RadialProfile`. `StationaryChunks` evaluates one in blocks of rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, final

import torch
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, ScaleKernel
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import threshold

from winnowgp.bounds.panels import add_product
from winnowgp.bounds.row_blocks import DifferentiableChunks, RowBlock, Sums
from winnowgp.typing import Scalar

# 2ν r² beyond which a Matérn covariance is zero in double precision; keeps infinities out.
_FAR = 1e6
# Distance r below which rounding decides it.
_ROUNDED = 1e-6

# RBF covariances up to this size are zero. In double precision, products of smaller ones are
# subnormal, with which factorisations and products of matrices take up to forty times as long.
LEAST_COVARIANCE = 1e-60

# Squared distance of an inducing point from the centre, in lengthscales, for the RBF kernel.
# Distances are differences of numbers of this size: float32 represents them to 2e-6 up to here, and
# float64 is used beyond.
_REACH = 32.0


class RadialProfile(ABC):
    """A stationary kernel as a function of u = c r², or of u = log s + c r².

    The derivative is written relative to the covariance, with ρ = 1 at r = 0:

        ∂k/∂r² = −½ γ k ρ(u)
    """

    rate: ClassVar[float]
    """c, the factor of r² in u."""
    steepness: ClassVar[float]
    """γ, which is −2 ∂ log k/∂r² at r = 0."""
    is_log: ClassVar[bool]
    """Whether u contains the logarithm of the variance."""
    is_smooth: ClassVar[bool] = True
    """Whether k is differentiable in r² at r = 0; otherwise γ is not its slope there."""

    @abstractmethod
    def covariances_(self, u: Float[Tensor, "*S"], log_s: float) -> Float[Tensor, "*S"]:
        """Return k(u), overwriting u; rounding may have moved u to the wrong side of r = 0."""

    @abstractmethod
    def weigh_(
        self, P: Float[Tensor, "*S"], u: Callable[[], Float[Tensor, "*S"]]
    ) -> Float[Tensor, "*S"]:
        """Return P ∘ ρ(u), overwriting P and u; `u` is called only if ρ is not constant."""

    @abstractmethod
    def weighed_covariances_(
        self, u: Float[Tensor, "*S"], log_s: float
    ) -> tuple[Float[Tensor, "*S"], Float[Tensor, "*S"]]:
        """Return k(u) and k(u) ρ(u), which may be one tensor; overwrites u."""


@final
class RBFProfile(RadialProfile):
    """k = exp(u) with u = log s − ½ r², the RBF kernel."""

    rate, steepness, is_log = -0.5, 1.0, True

    def covariances_(self, u: Float[Tensor, "*S"], log_s: float) -> Float[Tensor, "*S"]:
        k = u.clamp_max_(log_s).exp_()
        # Subnormal numbers cost a GPU nothing, and a pass over all covariances does.
        return k if k.is_cuda else threshold(k, LEAST_COVARIANCE, 0.0, inplace=True)

    def weigh_(
        self, P: Float[Tensor, "*S"], u: Callable[[], Float[Tensor, "*S"]]
    ) -> Float[Tensor, "*S"]:
        return P

    def weighed_covariances_(
        self, u: Float[Tensor, "*S"], log_s: float
    ) -> tuple[Float[Tensor, "*S"], Float[Tensor, "*S"]]:
        k = self.covariances_(u, log_s)
        return k, k


@final
class Matern12Profile(RadialProfile):
    """k = s exp(−t) with t² = u = r², the Matérn kernel with ν = 1/2.

    Its slope in r² is infinite at r = 0, where the one used here is zero: the limit depends on the
    direction, and opposite ones cancel. An error ε of r² is one of √ε in k, so that distances which
    rounding decides are zero: otherwise the variances of rows at inducing points would be 1e-7.
    """

    rate, steepness, is_log, is_smooth = 1.0, 1.0, False, False

    def covariances_(self, u: Float[Tensor, "*S"], log_s: float) -> Float[Tensor, "*S"]:
        return torch.rsub(self._distances_(u), log_s).exp_()

    def weigh_(
        self, P: Float[Tensor, "*S"], u: Callable[[], Float[Tensor, "*S"]]
    ) -> Float[Tensor, "*S"]:
        # ρ = 1/t
        t = self._distances_(u())
        return P.div_(t).masked_fill_(t == 0, 0.0)

    def weighed_covariances_(
        self, u: Float[Tensor, "*S"], log_s: float
    ) -> tuple[Float[Tensor, "*S"], Float[Tensor, "*S"]]:
        t = self._distances_(u)
        k = torch.rsub(t, log_s).exp_()
        return k, (k / t).masked_fill_(t == 0, 0.0)

    @staticmethod
    def _distances_(u: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        return torch.threshold_(u.clamp_(0, _FAR).sqrt_(), _ROUNDED, 0.0)


@final
class Matern32Profile(RadialProfile):
    """k = s (1 + t) exp(−t) with t² = u = 3 r², the Matérn kernel with ν = 3/2."""

    rate, steepness, is_log = 3.0, 3.0, False

    def covariances_(self, u: Float[Tensor, "*S"], log_s: float) -> Float[Tensor, "*S"]:
        t = u.clamp_(0, _FAR).sqrt_()
        scaled = torch.rsub(t, log_s).exp_()
        return scaled.addcmul_(scaled, t)

    def weigh_(
        self, P: Float[Tensor, "*S"], u: Callable[[], Float[Tensor, "*S"]]
    ) -> Float[Tensor, "*S"]:
        # ρ = 1/(1 + t): a square root and a division instead of another exponential.
        return P.div_(u().clamp_(0, _FAR).sqrt_().add_(1))

    def weighed_covariances_(
        self, u: Float[Tensor, "*S"], log_s: float
    ) -> tuple[Float[Tensor, "*S"], Float[Tensor, "*S"]]:
        # k ρ = s exp(−t)
        t = u.clamp_(0, _FAR).sqrt_()
        weighed = torch.rsub(t, log_s).exp_()
        return t.mul_(weighed).add_(weighed), weighed


@final
class Matern52Profile(RadialProfile):
    """k = s (1 + t + t²/3) exp(−t) with t² = u = 5 r², the Matérn kernel with ν = 5/2."""

    rate, steepness, is_log = 5.0, 5 / 3, False

    def covariances_(self, u: Float[Tensor, "*S"], log_s: float) -> Float[Tensor, "*S"]:
        t = u.clamp_(0, _FAR).sqrt()
        scaled = torch.rsub(t, log_s).exp_()
        return scaled.addcmul_(scaled, t.add_(u, alpha=1 / 3))

    def weigh_(
        self, P: Float[Tensor, "*S"], u: Callable[[], Float[Tensor, "*S"]]
    ) -> Float[Tensor, "*S"]:
        # ρ = (1 + t)/(1 + t + t²/3)
        squares = u().clamp_(0, _FAR)
        linear = squares.sqrt().add_(1)
        return P.mul_(linear).div_(linear.add_(squares, alpha=1 / 3))

    def weighed_covariances_(
        self, u: Float[Tensor, "*S"], log_s: float
    ) -> tuple[Float[Tensor, "*S"], Float[Tensor, "*S"]]:
        # k ρ = s (1 + t) exp(−t),  k = k ρ + s t²/3 exp(−t)
        t = u.clamp_(0, _FAR).sqrt()
        scaled = torch.rsub(t, log_s).exp_()
        weighed = t.mul_(scaled).add_(scaled)
        return torch.addcmul(weighed, u, scaled, value=1 / 3, out=u), weighed


_MATERN: dict[float, RadialProfile] = {
    0.5: Matern12Profile(),
    1.5: Matern32Profile(),
    2.5: Matern52Profile(),
}


@final
@dataclass(frozen=True, slots=True)
class StationaryForm:
    """The profile and the parameters of a stationary kernel, differentiable."""

    profile: RadialProfile
    variance: Scalar
    lengthscales: Float[Tensor, " D"]
    """One lengthscale per column; infinite for the columns that the kernel ignores."""


def stationary_form(kernel: Kernel, D: int) -> StationaryForm | None:
    """Return the form of an RBF or Matérn kernel on D columns, and None for other kernels.

    A kernel that is not in a ScaleKernel has a variance of one.
    """
    base = kernel.base_kernel if type(kernel) is ScaleKernel else kernel
    if type(base) is RBFKernel:
        profile = RBFProfile()
    elif type(base) is MaternKernel and base.nu in _MATERN:
        profile = _MATERN[base.nu]
    else:
        return None
    # GPyTorch gives the columns of the base kernel to the ScaleKernel, which selects them.
    lengthscales = on_columns(base.lengthscale, kernel, D=D, elsewhere=torch.inf)
    if lengthscales is None:
        return None
    variance = kernel.outputscale if type(kernel) is ScaleKernel else lengthscales.new_ones(())
    return StationaryForm(profile, variance.reshape(()), lengthscales)


def on_columns(
    values: Tensor, kernel: Kernel, *, D: int, elsewhere: float
) -> Float[Tensor, " D"] | None:
    """Return a parameter of a kernel for each of D columns; None if a column is repeated.

    Args:
        values: one number, or one per selected column.
        kernel: the kernel that selects columns.
        D: number of columns.
        elsewhere: value for the columns that are not selected.
    """
    columns = kernel.active_dims
    if columns is None:
        return values.reshape(-1).expand(D)
    assert isinstance(columns, Tensor)
    if len(set(columns.tolist())) < len(columns):
        return None
    values = values.reshape(-1).expand(len(columns))
    return values.new_full((D,), elsewhere).index_copy(0, columns, values)


@final
class StationaryChunks(DifferentiableChunks):
    """An RBF or Matérn kernel, with a closed-form gradient in (s, ℓ, Z).

    With φ(x) = [x, x², 1] and w = 1/ℓ² the scaled squared distances are linear in fixed features,

        c r² = ⟨c [−2 w z, w, w·z²], φ(x)⟩,

    so that a block is one thin product and the profile's function in place. For the pull-back, with
    W = ∂F/∂K ∘ K ∘ ρ, all gradients in ℓ and Z follow from W φ(X), an M × (2D + 1) matrix.

    Args:
        profile: the kernel as a function of r².
        Z: inducing points, centred as the features of the rows are.
        variance: s.
        lengthscales: ℓ; infinite for columns that the kernel ignores.
        dtype: data type of blocks; that of Z if None.
    """

    parallel = True

    def __init__(
        self,
        profile: RadialProfile,
        *,
        Z: Float[Tensor, "M D"],
        variance: Scalar,
        lengthscales: Float[Tensor, " D"],
        dtype: torch.dtype | None = None,
    ) -> None:
        self._profile, self._dtype = profile, dtype or Z.dtype
        self._Z, self._s, self._l = Z, variance, lengthscales
        self._w = lengthscales.square().reciprocal()
        self._wZ = Z * self._w
        self._norm = (self._wZ * Z).sum(1)
        log_s = variance.log()
        # One synchronisation for both numbers; `clamp_max_` with a tensor takes twice as long.
        farthest = torch.cat([self._norm, log_s.new_zeros(1)]).amax()
        self._log_s, reach = torch.stack([log_s, farthest]).tolist()
        c = profile.rate
        constant = (c * self._norm + log_s if profile.is_log else c * self._norm)[:, None]
        coefficients = torch.cat([-2 * c * self._wZ, (c * self._w).expand(Z.shape), constant], 1)
        # Where k is not differentiable, rounding of r² near zero would be that of r squared.
        is_near = profile.is_smooth and profile.steepness * reach <= _REACH
        self._coefficients = coefficients.to(self._dtype if is_near else Z.dtype)
        self._zero()

    def fork(self) -> "StationaryChunks":
        other = copy(self)
        other._zero()
        return other

    def uu(self) -> Float[Tensor, "M M"]:
        return self._covariances[0].clone()

    def uf(self, block: RowBlock) -> Float[Tensor, "M B"]:
        # With tiny lengthscales distances are differences of large numbers, whose rounding must not
        # make a covariance larger than the variance.
        return self._profile.covariances_(self._u(block), self._log_s)

    def ff(self, block: RowBlock) -> Float[Tensor, " B"]:
        return self._s.expand(len(block))

    def pull_uf(
        self, block: RowBlock, cotangent: Float[Tensor, "M B"], Kuf: Float[Tensor, "M B"]
    ) -> None:
        self.pull_log(block, cotangent.mul_(Kuf))

    def pull_log(self, block: RowBlock, P: Float[Tensor, "M B"]) -> None:
        """Add the pull-back of P = ∂F/∂log K_uf = ∂F/∂K_uf ∘ K_uf of a block; overwrites P."""
        self._pulled_log_s += P.sum(1).to(self._Z.dtype).sum()
        W = self._profile.weigh_(P, lambda: self._u(block).to(P.dtype))
        add_product(self._pulled, W, block.features.to(W.dtype))

    def pull_ff(self, block: RowBlock, cotangent: Float[Tensor, " B"]) -> None:
        # A cotangent that is the same for all rows may have a single entry.
        self._pulled_log_s += self._s * cotangent.expand(len(block)).sum()

    def pulled(self) -> tuple[Tensor, Tensor]:
        sums = self._pulled, self._pulled_log_s
        self._zero()
        return sums

    def gradient(self, pulled: Sums, uu: Float[Tensor, "M M"]) -> tuple[Tensor, Tensor, Tensor]:
        D, Z, (features, d_log_s) = self._Z.shape[1], self._Z, pulled
        first, second, total = features.split([D, D, 1], 1)
        Kuu, weighed = self._covariances
        if weighed is not Kuu:
            d_log_s = d_log_s + torch.dot(uu.flatten(), Kuu.flatten())
        W = uu.mul_(weighed)
        products = W @ torch.cat([Z, torch.ones_like(Z[:, :1])], 1)
        sums = products[:, D:]
        if weighed is Kuu:
            d_log_s = d_log_s + sums.sum()
        # Both arguments of K_uu are Z and its cotangent is symmetric: derivatives count twice.
        moved = products[:, :D] - sums * Z
        d_Z = self._w * (2 * moved + first - total * Z)
        d_w = (Z * (moved + first) - 0.5 * second - 0.5 * total * Z.square()).sum(0)
        # d log s = ds/s, dw = −2 w dℓ/ℓ
        factor = self._profile.steepness
        return d_log_s / self._s, -2 * factor * self._w * d_w / self._l, factor * d_Z

    def products(self, v: Float[Tensor, "M P"]) -> Float[Tensor, "q M P"]:
        # ∂K/∂ℓ_d = γ w_d/ℓ_d · (K ∘ ρ) ∘ (z_d − z'_d)², whose square is expanded.
        (M, P), Z, (Kuu, weighed) = v.shape, self._Z.mT[:, :, None], self._covariances
        moved = torch.cat([v[None], Z * v, Z.square() * v])
        moved = (weighed @ moved.permute(1, 0, 2).reshape(M, -1)).unflatten(1, (-1, P))
        constant, first, second = moved.permute(1, 0, 2).split([1, len(Z), len(Z)])
        factor = self._profile.steepness * self._w / self._l
        lengths = factor[:, None, None] * (Z * (Z * constant - 2 * first) + second)
        return torch.cat([(Kuu @ v / self._s)[None], lengths])

    def _zero(self) -> None:
        self._pulled = self._Z.new_zeros(self._coefficients.shape)
        self._pulled_log_s = self._Z.new_zeros(())

    def _u(self, block: RowBlock) -> Float[Tensor, "M B"]:
        features = block.features.to(self._coefficients.dtype)
        return torch.mm(self._coefficients, features.mT).to(self._dtype)

    @cached_property
    def _covariances(self) -> tuple[Float[Tensor, "M M"], Float[Tensor, "M M"]]:
        """K_uu and K_uu ∘ ρ, which may be one tensor."""
        profile, one = self._profile, torch.ones_like(self._Z[:, :1])
        c, shift = profile.rate, 0.5 * self._log_s if profile.is_log else 0.0
        # c r² = h + hᵀ with h = ⟨[−c w z, c w·z²], [z', 1]⟩: the sum is symmetric exactly.
        left = torch.cat([-c * self._wZ, (c * self._norm + shift)[:, None]], 1)
        h = torch.mm(left, torch.cat([self._Z, one], 1).mT)
        K, weighed = profile.weighed_covariances_(h + h.mT, self._log_s)
        # The diagonal is known.
        K.diagonal().fill_(self._s)
        return K, weighed
