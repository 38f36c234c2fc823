"""Kernels and means in blocks of rows, differentiated by autograd one block at a time."""

from collections.abc import Sequence
from typing import final

import torch
from gpytorch.kernels import Kernel
from gpytorch.means import Mean, ZeroMean
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds.row_blocks import ChunkedKernel, RowBlock, Sums
from winnowgp.bounds.two_pass import ChunkedMean
from winnowgp.models.kernels import covariance, prior_mean, prior_variance


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
