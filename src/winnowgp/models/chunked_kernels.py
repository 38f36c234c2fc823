"""Kernels and means evaluated in blocks of rows, with gradients of their parameters.

`chunked_kernel` selects the implementation: RBF, Matérn and linear kernels have closed forms, and
so have their sums and products; autograd differentiates every other kernel, or term of a sum or
product, and every mean, one block at a time.
"""

from abc import abstractmethod
from collections.abc import Sequence
from functools import reduce
from typing import final

import torch
from gpytorch.kernels import AdditiveKernel, Kernel, LinearKernel, ProductKernel, ScaleKernel
from gpytorch.means import Mean, ZeroMean
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds.panels import add_product
from winnowgp.bounds.row_blocks import (
    ChunkedKernel,
    DifferentiableChunks,
    RowBlock,
    RowBlocks,
    Sums,
)
from winnowgp.bounds.two_pass import ChunkedMean
from winnowgp.models.kernels import covariance, prior_mean, prior_variance
from winnowgp.models.stationary import StationaryChunks, on_columns, stationary_form
from winnowgp.typing import Scalar

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
        self._rows = _GradientSums(parameters)

    def fork(self) -> "AutogradChunks":
        return AutogradChunks(self._kernel, Z=self._Z, parameters=self._rows.parameters)

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
        points = _GradientSums(self._rows.parameters)
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
        self._rows = _GradientSums(parameters)

    def fork(self) -> "AutogradMean":
        return AutogradMean(self._mean, parameters=self._rows.parameters)

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


class _GradientSums:
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
