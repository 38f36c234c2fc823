"""Kernels and means evaluated in blocks of rows, with gradients of their parameters.

`chunked_kernel` selects the implementation: RBF, Matérn and linear kernels and their sums have
closed forms; autograd differentiates every other kernel one block at a time.
"""

from collections.abc import Sequence
from copy import copy
from typing import final

import torch
from gpytorch.kernels import AdditiveKernel, Kernel, LinearKernel
from gpytorch.means import Mean, ZeroMean
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds.row_blocks import ChunkedKernel, RowBlock, RowBlocks, Sums, add_product
from winnowgp.bounds.two_pass import ChunkedMean
from winnowgp.models.kernels import (
    RadialProfile,
    covariance,
    on_columns,
    prior_mean,
    prior_variance,
    stationary_form,
)
from winnowgp.typing import Scalar

# Squared distance of an inducing point from the centre, in lengthscales, for the RBF kernel.
# Distances are differences of numbers of this size: float32 represents them to 2e-6 up to here, and
# float64 is used beyond.
_REACH = 32.0


def chunked_kernel(
    kernel: Kernel, Z: Float[Tensor, "M D"], blocks: RowBlocks, dtype: torch.dtype | None = None
) -> tuple[ChunkedKernel, list[Tensor]]:
    """Return a kernel that is evaluated in blocks of rows, and the inputs of its gradient.

    Closed forms exist for RBF kernels and for Matérn kernels with ν = 3/2 and 5/2 in a ScaleKernel,
    for linear kernels, each on all columns or on some, and for sums of these. They return blocks in
    `dtype`.
    """
    closed = _closed_form(kernel, Z, blocks, dtype)
    if closed is not None:
        chunks, parameters = closed
        return chunks, [*parameters, Z]
    inputs = [p for p in [*kernel.parameters(), Z] if p.requires_grad]
    return AutogradChunks(kernel, Z=Z, parameters=inputs), inputs


def _closed_form(
    kernel: Kernel, Z: Float[Tensor, "M D"], blocks: RowBlocks, dtype: torch.dtype | None
) -> tuple[ChunkedKernel, list[Tensor]] | None:
    """Return a kernel whose gradients are those of the parameters returned with it, and of Z."""
    D = Z.shape[1]
    if type(kernel) is AdditiveKernel and kernel.active_dims is None:
        terms: list[ChunkedKernel] = []
        parameters: list[Tensor] = []
        for term in kernel.kernels:
            assert isinstance(term, Kernel)
            closed = _closed_form(term, Z, blocks, dtype)
            if closed is None:
                return None
            terms.append(closed[0])
            parameters.extend(closed[1])
        return SummedChunks(terms), parameters
    if type(kernel) is LinearKernel:
        variances = on_columns(kernel.variance, kernel, D=D, elsewhere=0.0)
        if variances is None:
            return None
        return LinearChunks(Z=Z.detach(), variances=variances.detach(), dtype=dtype), [variances]
    form = stationary_form(kernel, D)
    if form is None:
        return None
    chunks = StationaryChunks(
        form.profile,
        Z=(Z - blocks.centre).detach(),
        variance=form.variance.detach(),
        lengthscales=form.lengthscales.detach(),
        dtype=dtype,
    )
    return chunks, [form.variance, form.lengthscales]


@final
class StationaryChunks(ChunkedKernel):
    """A scaled RBF or Matérn kernel, with a closed-form gradient in (s, ℓ, Z).

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
        is_near = profile.steepness * reach <= _REACH
        self._coefficients = coefficients.to(self._dtype if is_near else Z.dtype)
        self._Kuu, self._weighed = self._covariances()
        self._zero()

    def fork(self) -> "StationaryChunks":
        other = copy(self)
        other._zero()
        return other

    def uu(self) -> Float[Tensor, "M M"]:
        return self._Kuu.clone()

    def uf(self, block: RowBlock) -> Float[Tensor, "M B"]:
        # With tiny lengthscales distances are differences of large numbers, whose rounding must not
        # make a covariance larger than the variance.
        return self._profile.covariances_(self._u(block), self._log_s)

    def ff(self, block: RowBlock) -> Float[Tensor, " B"]:
        return self._s.expand(len(block))

    def pull_uf(
        self, block: RowBlock, cotangent: Float[Tensor, "M B"], Kuf: Float[Tensor, "M B"]
    ) -> None:
        P = cotangent.mul_(Kuf)
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
        d_log_s = d_log_s + torch.dot(uu.reshape(-1), self._Kuu.reshape(-1))
        W = uu.mul_(self._weighed)
        # Both arguments of K_uu are Z and its cotangent is symmetric: derivatives count twice.
        moved = W @ Z - W.sum(1, keepdim=True) * Z
        d_Z = self._w * (2 * moved + first - total * Z)
        d_w = (Z * (moved + first) - 0.5 * second - 0.5 * total * Z.square()).sum(0)
        # d log s = ds/s, dw = −2 w dℓ/ℓ
        factor = self._profile.steepness
        return d_log_s / self._s, -2 * factor * self._w * d_w / self._l, factor * d_Z

    def _zero(self) -> None:
        self._pulled = self._Z.new_zeros(self._coefficients.shape)
        self._pulled_log_s = self._Z.new_zeros(())

    def _u(self, block: RowBlock) -> Float[Tensor, "M B"]:
        features = block.features.to(self._coefficients.dtype)
        return torch.mm(self._coefficients, features.mT).to(self._dtype)

    def _covariances(self) -> tuple[Float[Tensor, "M M"], Float[Tensor, "M M"]]:
        """Return K_uu and K_uu ∘ ρ, which may be one tensor."""
        c = self._profile.rate
        norm, products = c * self._norm, torch.mm(-c * self._wZ, self._Z.mT)
        # Products are symmetric up to rounding, and their sums exactly.
        u = (products + products.mT).add_(norm[:, None] + norm)
        K, weighed = self._profile.weighed_covariances_(u)
        K.mul_(self._s)
        if weighed is not K:
            weighed.mul_(self._s)
            weighed.diagonal().fill_(self._s)
        # The diagonal is known.
        K.diagonal().fill_(self._s)
        return K, weighed


@final
class LinearChunks(ChunkedKernel):
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

    def _zero(self) -> None:
        self._pulled = torch.zeros_like(self._Z)
        self._pulled_v = torch.zeros_like(self._v)


@final
class SummedChunks(ChunkedKernel):
    """A sum of kernels at the same inducing points.

    The gradient has the parameters of each term in turn, then Z. A pull-back evaluates the blocks
    of the terms again, since only their sum was kept.

    Args:
        terms: kernels with closed forms, whose last gradient is that of Z.
    """

    parallel = True

    def __init__(self, terms: Sequence[ChunkedKernel]) -> None:
        self._terms = tuple(terms)
        self._counts = [len(term.pulled()) for term in terms]

    def fork(self) -> "SummedChunks":
        return SummedChunks([term.fork() for term in self._terms])

    def uu(self) -> Float[Tensor, "M M"]:
        return _total([term.uu() for term in self._terms])

    def uf(self, block: RowBlock) -> Float[Tensor, "M B"]:
        return _total([term.uf(block) for term in self._terms])

    def ff(self, block: RowBlock) -> Float[Tensor, " B"]:
        return torch.stack([term.ff(block) for term in self._terms]).sum(0)

    def pull_uf(
        self, block: RowBlock, cotangent: Float[Tensor, "M B"], Kuf: Float[Tensor, "M B"]
    ) -> None:
        for term in self._terms:
            # Terms overwrite the cotangent.
            term.pull_uf(block, cotangent.clone(), term.uf(block).to(cotangent.dtype))

    def pull_ff(self, block: RowBlock, cotangent: Float[Tensor, " B"]) -> None:
        for term in self._terms:
            term.pull_ff(block, cotangent)

    def pulled(self) -> Sums:
        return tuple(total for term in self._terms for total in term.pulled())

    def gradient(self, pulled: Sums, uu: Float[Tensor, "M M"]) -> tuple[Tensor, ...]:
        parameters: list[Tensor] = []
        points: list[Tensor] = []
        first = 0
        for term, count in zip(self._terms, self._counts, strict=True):
            *others, d_Z = term.gradient(pulled[first : first + count], uu.clone())
            parameters.extend(others)
            points.append(d_Z)
            first += count
        return (*parameters, _total(points))


def _total(blocks: Sequence[Tensor]) -> Tensor:
    """Add up blocks, overwriting the first."""
    total = blocks[0]
    for block in blocks[1:]:
        total.add_(block)
    return total


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
