"""Dense kernel matrices of GPyTorch kernels, in blocks, with gradients and expectations."""

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

from winnowgp.bounds.chunked import ChunkedMean
from winnowgp.bounds.psi import ExpectedKernel, LinearPsi, RBFPsi
from winnowgp.bounds.row_blocks import ChunkedKernel, RowBlock, Sums, add_product
from winnowgp.errors import InputError
from winnowgp.typing import Scalar

Cross: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]

"""A function from rows X `[N D]` to k(X, Z) `[N M]` and k(x, x) `[N]`."""

# Squared distance of an inducing point from the centre, in lengthscales. Exponents are differences
# of numbers of this size: float32 represents them to 2e-6 up to here, and float64 is used beyond.
_REACH = 32.0


@dataclass(frozen=True, slots=True)
class KernelBlocks:
    """Prior covariances among K inducing points, and between them and N rows."""

    Kuu: Float[Tensor, "K K"]
    Kuf: Float[Tensor, "K N"]
    kff: Float[Tensor, " N"]


def kernel_blocks(
    kernel: Kernel, points: Float[Tensor, "K D"], X: Float[Tensor, "N D"]
) -> KernelBlocks:
    """Return the covariances of points and rows, differentiable; O(K (K + N))."""
    return KernelBlocks(
        Kuu=covariance(kernel, points, points),
        Kuf=covariance(kernel, points, X),
        kff=prior_variance(kernel, X),
    )


def covariance(
    kernel: Kernel, A: Float[Tensor, "*#S R D"], B: Float[Tensor, "*#S C D"]
) -> Float[Tensor, "*S R C"]:
    """Return the dense prior covariance between two sets of rows."""
    if A.shape[-2] == 0 or B.shape[-2] == 0:
        batch = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2])
        return A.new_zeros(*batch, A.shape[-2], B.shape[-2])
    if isinstance(kernel, AdditiveKernel | ProductKernel) and kernel.active_dims is None:
        # GPyTorch would factorise a low-rank component before combining it, with a jitter.
        components = [covariance(k, A, B) for k in kernel.kernels if isinstance(k, Kernel)]
        if isinstance(kernel, ProductKernel):
            return reduce(torch.mul, components)
        return torch.stack(components).sum(0)
    if type(kernel) is ScaleKernel and kernel.active_dims is None and _is_composed(kernel):
        return kernel.outputscale[..., None, None] * covariance(kernel.base_kernel, A, B)
    # Lazy evaluation takes a quarter of the time of a small block.
    with settings.lazily_evaluate_kernels(False):
        return to_dense(kernel(A, B))


def _is_composed(kernel: ScaleKernel) -> bool:
    return isinstance(kernel.base_kernel, AdditiveKernel | ProductKernel)


def prior_variance(kernel: Kernel, X: Float[Tensor, "*S N D"]) -> Float[Tensor, "*S N"]:
    """Return the prior variance of each row."""
    return to_dense(kernel(X, diag=True))


def prior_mean(mean: Mean, X: Float[Tensor, "N D"]) -> Float[Tensor, "N 1"]:
    """Return the prior mean of each row, the same for every output."""
    return mean.forward(X)[:, None]


def expected_kernel(kernel: Kernel, Q: int) -> ExpectedKernel:
    """Return the kernel's expectations under Gaussian inputs, differentiable in its parameters.

    Raises:
        InputError: the expectations are not known in closed form.
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
    """Return whether the expectations under Gaussian inputs are known in closed form."""
    base = kernel.base_kernel if type(kernel) is ScaleKernel else kernel
    whole = kernel.active_dims is None and base.active_dims is None
    return whole and type(base) in (RBFKernel, LinearKernel)


@final
class AutogradChunks(ChunkedKernel):
    """Any GPyTorch kernel, differentiated by autograd one block of rows at a time.

    Each pull-back evaluates its block again with gradients, so that only one graph is in memory.

    Args:
        parameters: inputs of the gradient; `Z` may be one of them.
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
    """Any GPyTorch mean, differentiated by autograd one block of rows at a time.

    Args:
        parameters: inputs of the gradient.
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
    """Gradients summed over blocks of rows."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = tuple(parameters)
        self._totals = self._zeros()

    def add(self, values: Tensor, cotangent: Tensor) -> None:
        if not values.requires_grad:
            return
        gradients = torch.autograd.grad(values, self.parameters, cotangent, allow_unused=True)
        for total, gradient in zip(self._totals, gradients, strict=True):
            if gradient is not None:
                total.add_(gradient)

    def taken(self) -> Sums:
        """Return the sums and reset them to zero."""
        totals, self._totals = self._totals, self._zeros()
        return totals

    def _zeros(self) -> Sums:
        return tuple(torch.zeros_like(p) for p in self.parameters)


def is_scaled_rbf(kernel: Kernel) -> bool:
    """Return whether this is exactly a ScaleKernel of an RBFKernel on all columns."""
    return (
        type(kernel) is ScaleKernel
        and type(kernel.base_kernel) is RBFKernel
        and kernel.active_dims is None
        and kernel.base_kernel.active_dims is None
    )


@final
class ScaledRBFChunks(ChunkedKernel):
    """k(x, z) = s exp(−½ Σ_d (x_d − z_d)²/ℓ_d²), with a closed-form gradient in (s, ℓ, Z).

    With φ(x) = [x, x², 1] and w = 1/ℓ² the exponent of every entry is linear in fixed features,

        log k(z, x) = ⟨[w z, −w/2, log s − ½ w·z²], φ(x)⟩,

    so that a block is one thin product and one exponential in place. For the pull-back, with
    W = ∂F/∂K ∘ K, all gradients follow from W φ(X), an M × (2D + 1) matrix.

    Args:
        Z: inducing points, centred as the features of the rows are.
        dtype: data type of blocks; that of Z if None.
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
        # One synchronisation for both numbers; `clamp_max_` with a tensor takes twice as long.
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
        # With tiny lengthscales exponents are differences of large numbers, whose rounding must not
        # make a covariance larger than the variance.
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
        # A cotangent that is the same for all rows may have a single entry.
        self._pulled_ff += cotangent.expand(len(block)).sum()

    def pulled(self) -> tuple[Tensor, Tensor]:
        sums = self._pulled, self._pulled_ff
        self._zero()
        return sums

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
        # Make it exactly symmetric, with the known diagonal.
        K = (K + K.mT).mul_(0.5)
        K.diagonal().fill_(self._s)
        return K


def cross_covariance(kernel: Kernel, Z: Float[Tensor, "M D"]) -> Cross:
    """Return k(X, Z) and k(x, x) as a function of X; the rest is computed once.

    The scaled RBF kernel needs one product and one exponential in place, a tenth of GPyTorch's time
    for a single row and a third for 10,000. Other kernels, and calls that need a gradient in X, use
    GPyTorch.
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
