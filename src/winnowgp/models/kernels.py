"""Kernel matrices, their blocks, and closed-form gradients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias, final

import torch
from gpytorch import settings
from gpytorch.kernels import (
    AdditiveKernel,
    Kernel,
    LinearKernel,
    ProductKernel,
    RBFKernel,
    ScaleKernel,
)
from gpytorch.means import Mean, ZeroMean
from jaxtyping import Float
from linear_operator import to_dense
from torch import Tensor

from winnowgp.bounds.psi import ExpectedKernel, LinearPsi, RBFPsi
from winnowgp.bounds.row_blocks import ChunkedKernel, RowBlock, Sums, add_product
from winnowgp.bounds.two_pass import ChunkedMean
from winnowgp.errors import InputError
from winnowgp.typing import Scalar

# From a GPyTorch kernel to the dense blocks that bounds are made of.


@dataclass(frozen=True, slots=True)
class KernelBlocks:
    """Prior covariances among K points and between them and N rows."""

    Kuu: Float[Tensor, "K K"]
    Kuf: Float[Tensor, "K N"]
    kff: Float[Tensor, " N"]


def kernel_blocks(
    kernel: Kernel, points: Float[Tensor, "K D"], X: Float[Tensor, "N D"]
) -> KernelBlocks:
    """Evaluate the kernel once, differentiably; O(K (K + N))."""
    return KernelBlocks(
        Kuu=covariance(kernel, points, points),
        Kuf=covariance(kernel, points, X),
        kff=prior_variance(kernel, X),
    )


def covariance(
    kernel: Kernel, A: Float[Tensor, "*#S R D"], B: Float[Tensor, "*#S C D"]
) -> Float[Tensor, "*S R C"]:
    """Dense prior covariance between two sets of rows."""
    if A.shape[-2] == 0 or B.shape[-2] == 0:
        batch = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2])
        return A.new_zeros(*batch, A.shape[-2], B.shape[-2])
    if isinstance(kernel, AdditiveKernel | ProductKernel) and kernel.active_dims is None:
        # Left to itself, one with a low-rank part is factorised to be combined, with a jitter.
        parts = [covariance(part, A, B) for part in kernel.kernels if isinstance(part, Kernel)]
        if isinstance(kernel, ProductKernel):
            return reduce(torch.mul, parts)
        return torch.stack(parts).sum(0)
    if type(kernel) is ScaleKernel and kernel.active_dims is None and _is_composed(kernel):
        return kernel.outputscale[..., None, None] * covariance(kernel.base_kernel, A, B)
    # At once: what GPyTorch does to put it off takes a quarter of the time of a small block.
    with settings.lazily_evaluate_kernels(False):
        return to_dense(kernel(A, B))


def _is_composed(kernel: ScaleKernel) -> bool:
    return isinstance(kernel.base_kernel, AdditiveKernel | ProductKernel)


def prior_variance(kernel: Kernel, X: Float[Tensor, "*S N D"]) -> Float[Tensor, "*S N"]:
    """Prior variance of each row."""
    return to_dense(kernel(X, diag=True))


def prior_mean(mean: Mean, X: Float[Tensor, "N D"]) -> Float[Tensor, "N 1"]:
    """Prior mean of each row, the same for every output."""
    return mean.forward(X)[:, None]


# From a GPyTorch kernel to one that can be averaged over Gaussian inputs, where that is closed.


def expected_kernel(kernel: Kernel, Q: int) -> ExpectedKernel:
    """The kernel at its present parameters, differentiable in them.

    Raises:
        InputError: its averages have no closed form here.
    """
    if not has_psi(kernel):
        raise InputError(
            "`kernel` must be an RBFKernel or LinearKernel on all dimensions, scaled or not, for "
            f"expected statistics; got {type(kernel).__name__}. Use `SampledLatentGP` for others."
        )
    if isinstance(kernel, ScaleKernel):
        base, scale = kernel.base_kernel, kernel.outputscale.reshape(())
    else:
        base, scale = kernel, next(kernel.parameters()).new_ones(())
    if isinstance(base, RBFKernel):
        return RBFPsi(scale, base.lengthscale.reshape(-1).expand(Q))
    assert isinstance(base, LinearKernel)
    return LinearPsi(scale * base.variance.reshape(-1).expand(Q))


def has_psi(kernel: Kernel) -> bool:
    """Whether the kernel's averages over Gaussian inputs are known in closed form."""
    base = kernel.base_kernel if type(kernel) is ScaleKernel else kernel
    whole = kernel.active_dims is None and base.active_dims is None
    return whole and type(base) in (RBFKernel, LinearKernel)


# Any GPyTorch kernel or mean, differentiated by autograd one block of rows at a time.


@final
class AutogradChunks(ChunkedKernel):
    """Each pull-back evaluates its block once more with gradients on, so only one graph is alive.

    Args:
        parameters: what to differentiate with respect to; `Z` may be one of them.
    """

    def __init__(
        self, kernel: Kernel, *, Z: Float[Tensor, "M D"], parameters: Sequence[Tensor]
    ) -> None:
        self._kernel, self._Z = kernel, Z
        self._rows = _Pulled(parameters)

    @torch.no_grad()
    def uu(self) -> Float[Tensor, "M M"]:
        return covariance(self._kernel, self._Z, self._Z)

    @torch.no_grad()
    def uf(self, block: RowBlock) -> Float[Tensor, "M B"]:
        return covariance(self._kernel, self._Z, block.X)

    @torch.no_grad()
    def ff(self, block: RowBlock) -> Float[Tensor, " B"]:
        return prior_variance(self._kernel, block.X)

    def pull_uf(
        self, block: RowBlock, cotangent: Float[Tensor, "M B"], Kuf: Float[Tensor, "M B"]
    ) -> None:
        with torch.enable_grad():
            self._rows.add(covariance(self._kernel, self._Z, block.X), cotangent.to(self._Z.dtype))

    def pull_ff(self, block: RowBlock, cotangent: Float[Tensor, " B"]) -> None:
        with torch.enable_grad():
            self._rows.add(prior_variance(self._kernel, block.X), cotangent.expand(len(block)))

    def pulled(self) -> Sums:
        return self._rows.taken()

    def gradient(self, pulled: Sums, uu: Float[Tensor, "M M"]) -> tuple[Tensor, ...]:
        points = _Pulled(self._rows.parameters)
        with torch.enable_grad():
            points.add(covariance(self._kernel, self._Z, self._Z), uu)
        return tuple(a + b for a, b in zip(pulled, points.taken(), strict=True))


@final
class AutogradMean(ChunkedMean):
    """Any GPyTorch mean, differentiated in the same way.

    Args:
        parameters: what to differentiate with respect to.
    """

    def __init__(self, mean: Mean, *, parameters: Sequence[Tensor]) -> None:
        self._mean = mean
        self._rows = _Pulled(parameters)

    @torch.no_grad()
    def centred(self, block: RowBlock) -> Float[Tensor, "B P"]:
        if isinstance(self._mean, ZeroMean):
            return block.Y
        return block.Y - prior_mean(self._mean, block.X)

    def pull(self, block: RowBlock, cotangent: Float[Tensor, "B P"]) -> None:
        if self._rows.parameters:
            with torch.enable_grad():
                values = prior_mean(self._mean, block.X).expand(cotangent.shape)
                self._rows.add(values, cotangent)

    def pulled(self) -> Sums:
        return self._rows.taken()


class _Pulled:
    """Gradients that add up."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = tuple(parameters)
        self._totals = self._zeros()

    def add(self, values: Tensor, cotangent: Tensor) -> None:
        if not values.requires_grad:
            return
        parts = torch.autograd.grad(values, self.parameters, cotangent, allow_unused=True)
        for total, part in zip(self._totals, parts, strict=True):
            if part is not None:
                total.add_(part)

    def taken(self) -> Sums:
        """What has added up; begins again at zero."""
        found, self._totals = self._totals, self._zeros()
        return found

    def _zeros(self) -> Sums:
        return tuple(torch.zeros_like(p) for p in self.parameters)


# Chunks of the scaled RBF kernel, by hand: the kernel most fits use, at a fraction of the cost.
#
# With φ(x) = [x, x², 1] and w = 1/ℓ² the exponent of every entry is a linear function of features
# that never change,
#
#     log k(z, x) = ⟨[w z, −w/2, log s − ½ w·z²], φ(x)⟩,
#
# so a block is one thin product and one exponential in place. Its pull-back is as short: with
# W = ∂F/∂K ∘ K all gradients follow from W φ(X), an M × (2D + 1) matrix.


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


# Covariances between new rows and the points of a finished model, as quickly as may be.


Cross: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]

"""From rows X `[N D]` to k(X, Z) `[N M]` and k(x, x) `[N]`."""


def cross_covariance(kernel: Kernel, Z: Float[Tensor, "M D"]) -> Cross:
    """k(X, Z) and k(x, x) as a function of X, with what does not depend on X computed once.

    For the scaled RBF kernel one product and one exponential in place, a tenth of GPyTorch's time
    for a single row and a third for 10,000; for others, and where a gradient in X is wanted,
    GPyTorch's own.
    """

    def general(X: Tensor) -> tuple[Tensor, Tensor]:
        return covariance(kernel, X, Z), prior_variance(kernel, X)

    if not is_scaled_rbf(kernel) or len(Z) == 0:
        return general
    scaled: Any = kernel
    lengthscale, scale = scaled.base_kernel.lengthscale, scaled.outputscale
    centre = Z.mean(0)
    z = (Z - centre) / lengthscale
    norms = z.square().sum(1)

    def quick(X: Tensor) -> tuple[Tensor, Tensor]:
        if X.requires_grad or len(X) == 0:
            return general(X)
        x = (X - centre) / lengthscale
        # −½‖x − z‖² = x·z − ½‖z‖² − ½‖x‖², at most zero but for rounding.
        exponent = torch.addmm(norms, x, z.mT, beta=-0.5)
        exponent.add_(x.square().sum(1, keepdim=True), alpha=-0.5)
        return exponent.clamp_max_(0).exp_().mul_(scale), scale.expand(len(X))

    return quick
