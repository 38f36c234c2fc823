"""Kernels evaluated in blocks of rows, with gradients of their parameters.

`chunked_kernel` selects the implementation: RBF, Matérn and linear kernels have closed forms, and
so have their sums and products; autograd differentiates every other kernel, or term of a sum or
product, one block at a time.
"""

from abc import abstractmethod
from collections.abc import Sequence
from copy import copy
from functools import cached_property, reduce
from typing import final

import torch
from gpytorch.kernels import AdditiveKernel, Kernel, LinearKernel, ProductKernel, ScaleKernel
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds.panels import add_product
from winnowgp.bounds.row_blocks import ChunkedKernel, RowBlock, RowBlocks, Sums
from winnowgp.models.autograd_chunks import AutogradChunks
from winnowgp.models.kernels import RadialProfile, on_columns, stationary_form
from winnowgp.typing import Scalar

# Squared distance of an inducing point from the centre, in lengthscales, for the RBF kernel.
# Distances are differences of numbers of this size: float32 represents them to 2e-6 up to here, and
# float64 is used beyond.
_REACH = 32.0
_COMBINED = (AdditiveKernel, ProductKernel)


def chunked_kernel(
    kernel: Kernel, Z: Float[Tensor, "M D"], blocks: RowBlocks, dtype: torch.dtype | None = None
) -> tuple[ChunkedKernel, list[Tensor]]:
    """Return a kernel that is evaluated in blocks of rows, and the inputs of its gradient.

    Closed forms exist for RBF kernels, Matérn kernels and linear kernels, each on all columns or on
    some, scaled or not, and for sums and products of these. They return blocks in `dtype`. Other
    terms of a sum or product are left to autograd.
    """
    closed = _closed_form(kernel, Z, blocks, dtype)
    if closed is not None:
        chunks, parameters = closed
        return chunks, [*parameters, Z]
    inputs = [p for p in [*kernel.parameters(), Z] if p.requires_grad]
    return AutogradChunks(kernel, Z=Z, parameters=inputs), inputs


def _closed_form(
    kernel: Kernel,
    Z: Float[Tensor, "M D"],
    blocks: RowBlocks,
    dtype: torch.dtype | None,
    scale: Scalar | None = None,
) -> tuple[ChunkedKernel, list[Tensor]] | None:
    """Return a kernel whose gradients are those of the parameters returned with it, and of Z.

    Args:
        scale: a factor of the kernel, if any.
    """
    D = Z.shape[1]
    if type(kernel) is ScaleKernel and isinstance(kernel.base_kernel, _COMBINED):
        if kernel.active_dims is not None:
            return None
        variance = kernel.outputscale.reshape(())
        scale = variance if scale is None else scale * variance
        return _closed_form(kernel.base_kernel, Z, blocks, dtype, scale)
    if isinstance(kernel, _COMBINED):
        return _combined_form(kernel, Z, blocks, dtype, scale)
    factor = 1.0 if scale is None else scale
    if type(kernel) is LinearKernel:
        variances = on_columns(kernel.variance, kernel, D=D, elsewhere=0.0)
        if variances is None:
            return None
        variances = factor * variances
        return LinearChunks(Z=Z.detach(), variances=variances.detach(), dtype=dtype), [variances]
    form = stationary_form(kernel, D)
    if form is None:
        return None
    variance = factor * form.variance
    chunks = StationaryChunks(
        form.profile,
        Z=(Z - blocks.centre).detach(),
        variance=variance.detach(),
        lengthscales=form.lengthscales.detach(),
        dtype=dtype,
    )
    return chunks, [variance, form.lengthscales]


def _combined_form(
    kernel: AdditiveKernel | ProductKernel,
    Z: Float[Tensor, "M D"],
    blocks: RowBlocks,
    dtype: torch.dtype | None,
    scale: Scalar | None,
) -> tuple[ChunkedKernel, list[Tensor]] | None:
    """Return a sum or product, some of whose parts may be left to autograd; None if all are."""
    if kernel.active_dims is not None:
        return None
    is_sum = isinstance(kernel, AdditiveKernel)
    chunks: list[ChunkedKernel] = []
    parameters: list[Tensor] = []
    remaining = scale
    for part in kernel.kernels:
        assert isinstance(part, Kernel)
        closed = _closed_form(part, Z, blocks, dtype, scale if is_sum else remaining)
        if closed is None and is_sum and scale is not None:
            return None
        if closed is None:
            closed = _autograd_part(part, Z)
        else:
            # One factor of a product has its scale.
            remaining = None
        chunks.append(closed[0])
        parameters.extend(closed[1])
    if all(isinstance(part, AutogradChunks) for part in chunks):
        return None
    combined = SummedChunks if is_sum else ProductChunks
    return combined(chunks, dtype=dtype or Z.dtype), parameters


def _autograd_part(kernel: Kernel, Z: Float[Tensor, "M D"]) -> tuple[ChunkedKernel, list[Tensor]]:
    """Return a part of a sum or product that autograd differentiates, and its parameters."""
    parameters: list[Tensor] = [p for p in kernel.parameters() if p.requires_grad]
    points = Z.detach().requires_grad_()
    return AutogradChunks(kernel, Z=points, parameters=[*parameters, points]), parameters


class DifferentiableChunks(ChunkedKernel):
    """A kernel whose derivatives in its parameters can be multiplied with vectors."""

    @abstractmethod
    def products(self, v: Float[Tensor, "M P"]) -> Float[Tensor, "q M P"]:
        """Return (∂K_uu/∂θ_i) v for each parameter θ_i, in the order of `gradient`."""


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


@final
class LinearChunks(DifferentiableChunks):
    """k(x, z) = Σ_d v_d x_d z_d, with a closed-form gradient in (v, Z).

    The pull-back of G = ∂F/∂K_uf is G X, an M × D matrix.

    Args:
        Z: inducing points, not centred.
        variances: v, one per column; zero for columns that the kernel ignores.
        dtype: data type of blocks; that of Z if None. Products are computed in that of Z.
    """

    parallel = True

    def __init__(
        self,
        *,
        Z: Float[Tensor, "M D"],
        variances: Float[Tensor, " D"],
        dtype: torch.dtype | None = None,
    ) -> None:
        self._Z, self._v, self._dtype = Z, variances, dtype or Z.dtype
        self._zero()

    def fork(self) -> "LinearChunks":
        return LinearChunks(Z=self._Z, variances=self._v, dtype=self._dtype)

    def uu(self) -> Float[Tensor, "M M"]:
        K = (self._v * self._Z) @ self._Z.mT
        return (K + K.mT).mul_(0.5)

    def uf(self, block: RowBlock) -> Float[Tensor, "M B"]:
        return torch.mm(self._v * self._Z, block.X.mT).to(self._dtype)

    def ff(self, block: RowBlock) -> Float[Tensor, " B"]:
        return block.X.square() @ self._v

    def pull_uf(
        self, block: RowBlock, cotangent: Float[Tensor, "M B"], Kuf: Float[Tensor, "M B"]
    ) -> None:
        add_product(self._pulled, cotangent, block.X.to(cotangent.dtype))

    def pull_ff(self, block: RowBlock, cotangent: Float[Tensor, " B"]) -> None:
        self._pulled_v += block.X.square().mT @ cotangent.expand(len(block))

    def pulled(self) -> tuple[Tensor, Tensor]:
        sums = self._pulled, self._pulled_v
        self._zero()
        return sums

    def gradient(self, pulled: Sums, uu: Float[Tensor, "M M"]) -> tuple[Tensor, Tensor]:
        rows, d_v = pulled
        # Both arguments of K_uu are Z and its cotangent is symmetric: derivatives in Z count twice.
        points = uu @ self._Z
        d_v = d_v + (self._Z * (rows + points)).sum(0)
        return d_v, self._v * (rows + 2 * points)

    def products(self, v: Float[Tensor, "M P"]) -> Float[Tensor, "q M P"]:
        # ∂K/∂v_d = z_d z_dᵀ
        return self._Z.mT[:, :, None] * (self._Z.mT @ v)[:, None]

    def _zero(self) -> None:
        self._pulled = torch.zeros_like(self._Z)
        self._pulled_v = torch.zeros_like(self._v)


class _CombinedChunks(ChunkedKernel):
    """Several kernels at the same inducing points, combined entry by entry.

    The gradient has the parameters of each kernel in turn, then Z. A pull-back evaluates the blocks
    it needs again, since only the combined block was kept.

    Args:
        parts: the kernels, whose last gradient is that of Z.
        dtype: data type of blocks.
    """

    def __init__(self, parts: Sequence[ChunkedKernel], *, dtype: torch.dtype) -> None:
        self._parts, self._dtype = tuple(parts), dtype
        self._counts = [len(part.pulled()) for part in parts]
        self.parallel = all(part.parallel for part in parts)

    @abstractmethod
    def _combined(self, entries: Sequence[Tensor]) -> Tensor:
        """Return the entries of the combined kernel from those of each."""

    @abstractmethod
    def _cotangent(self, index: int, cotangent: Tensor, entries: Sequence[Tensor]) -> Tensor:
        """Return the cotangent of one kernel, which may be overwritten."""

    def fork(self) -> "_CombinedChunks":
        return type(self)([part.fork() for part in self._parts], dtype=self._dtype)

    def uu(self) -> Float[Tensor, "M M"]:
        return self._combined([part.uu() for part in self._parts])

    def uf(self, block: RowBlock) -> Float[Tensor, "M B"]:
        return self._combined(self._blocks(block, self._dtype))

    def ff(self, block: RowBlock) -> Float[Tensor, " B"]:
        return self._combined([part.ff(block) for part in self._parts])

    def pull_ff(self, block: RowBlock, cotangent: Float[Tensor, " B"]) -> None:
        variances = [part.ff(block) for part in self._parts]
        for index, part in enumerate(self._parts):
            part.pull_ff(block, self._cotangent(index, cotangent, variances))

    def pulled(self) -> Sums:
        return tuple(total for part in self._parts for total in part.pulled())

    def gradient(self, pulled: Sums, uu: Float[Tensor, "M M"]) -> tuple[Tensor, ...]:
        parameters: list[Tensor] = []
        points: list[Tensor] = []
        blocks, first = [part.uu() for part in self._parts], 0
        for index, (part, count) in enumerate(zip(self._parts, self._counts, strict=True)):
            own = self._cotangent(index, uu, blocks)
            *others, d_Z = part.gradient(pulled[first : first + count], own)
            parameters.extend(others)
            points.append(d_Z)
            first += count
        return (*parameters, reduce(torch.add, points))

    def _blocks(self, block: RowBlock, dtype: torch.dtype) -> list[Float[Tensor, "M B"]]:
        return [part.uf(block).to(dtype) for part in self._parts]


@final
class SummedChunks(_CombinedChunks, DifferentiableChunks):
    """A sum of kernels at the same inducing points."""

    def products(self, v: Float[Tensor, "M P"]) -> Float[Tensor, "q M P"]:
        parts = [part for part in self._parts if isinstance(part, DifferentiableChunks)]
        if len(parts) < len(self._parts):
            raise TypeError("every term of the sum must be a StationaryChunks or LinearChunks.")
        return torch.cat([part.products(v) for part in parts])

    def pull_uf(
        self, block: RowBlock, cotangent: Float[Tensor, "M B"], Kuf: Float[Tensor, "M B"]
    ) -> None:
        for part in self._parts:
            part.pull_uf(block, cotangent.clone(), part.uf(block).to(cotangent.dtype))

    def _combined(self, entries: Sequence[Tensor]) -> Tensor:
        return reduce(torch.add, entries)

    def _cotangent(self, index: int, cotangent: Tensor, entries: Sequence[Tensor]) -> Tensor:
        return cotangent.clone()


@final
class ProductChunks(_CombinedChunks):
    """A product of kernels at the same inducing points: ∂(Π_j k_j)/∂k_i = Π_{j≠i} k_j.

    The logarithms of all factors have one cotangent, ∂F/∂k ∘ k, from which a stationary one is
    differentiated without being evaluated again.
    """

    def pull_uf(
        self, block: RowBlock, cotangent: Float[Tensor, "M B"], Kuf: Float[Tensor, "M B"]
    ) -> None:
        stationary = [part for part in self._parts if isinstance(part, StationaryChunks)]
        if len(stationary) < len(self._parts):
            blocks = self._blocks(block, cotangent.dtype)
            for index, part in enumerate(self._parts):
                if not isinstance(part, StationaryChunks):
                    part.pull_uf(block, self._cotangent(index, cotangent, blocks), blocks[index])
        P = cotangent.mul_(Kuf)
        for part in stationary:
            part.pull_log(block, P.clone())

    def _combined(self, entries: Sequence[Tensor]) -> Tensor:
        return reduce(torch.mul, entries)

    def _cotangent(self, index: int, cotangent: Tensor, entries: Sequence[Tensor]) -> Tensor:
        others = [entry for i, entry in enumerate(entries) if i != index]
        return reduce(torch.mul, others, cotangent.clone())
