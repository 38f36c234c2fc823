"""Chunks of any GPyTorch kernel, differentiated by autograd one chunk at a time."""

from collections.abc import Sequence
from typing import final

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds import ChunkedKernel
from winnowgp.models.kernel_blocks import covariance, prior_variance


@final
class AutogradChunks(ChunkedKernel):
    """Each pull-back evaluates its block once more with gradients on, so only one graph is alive.

    Args:
        parameters: what to differentiate with respect to; `Z` may be one of them.
    """

    def __init__(
        self,
        kernel: Kernel,
        *,
        X: Float[Tensor, "N D"],
        Z: Float[Tensor, "M D"],
        parameters: Sequence[Tensor],
    ) -> None:
        self._kernel, self._X, self._Z = kernel, X, Z
        self._parameters = tuple(parameters)
        self._gradient = tuple(torch.zeros_like(p) for p in self._parameters)

    @torch.no_grad()
    def uu(self) -> Float[Tensor, "M M"]:
        return covariance(self._kernel, self._Z, self._Z)

    @torch.no_grad()
    def uf(self, rows: slice) -> Float[Tensor, "M B"]:
        return covariance(self._kernel, self._Z, self._X[rows])

    @torch.no_grad()
    def ff(self, rows: slice) -> Float[Tensor, " B"]:
        return prior_variance(self._kernel, self._X[rows])

    def pull_uu(self, cotangent: Float[Tensor, "M M"]) -> None:
        with torch.enable_grad():
            self._pull(covariance(self._kernel, self._Z, self._Z), cotangent)

    def pull_uf(
        self, rows: slice, cotangent: Float[Tensor, "M B"], Kuf: Float[Tensor, "M B"]
    ) -> None:
        with torch.enable_grad():
            self._pull(covariance(self._kernel, self._Z, self._X[rows]), cotangent)

    def pull_ff(self, rows: slice, cotangent: Float[Tensor, " B"]) -> None:
        with torch.enable_grad():
            self._pull(prior_variance(self._kernel, self._X[rows]), cotangent)

    def gradient(self) -> tuple[Tensor, ...]:
        return self._gradient

    def _pull(self, block: Tensor, cotangent: Tensor) -> None:
        if not block.requires_grad:
            return
        parts = torch.autograd.grad(block, self._parameters, cotangent, allow_unused=True)
        for total, part in zip(self._gradient, parts, strict=True):
            if part is not None:
                total.add_(part)
