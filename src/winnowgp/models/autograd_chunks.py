"""Any GPyTorch kernel or mean, differentiated by autograd one block of rows at a time."""

from collections.abc import Sequence
from typing import final

import torch
from gpytorch.kernels import Kernel
from gpytorch.means import Mean, ZeroMean
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds import ChunkedKernel, ChunkedMean, RowBlock, Sums
from winnowgp.models.kernel_blocks import covariance, prior_mean, prior_variance


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
