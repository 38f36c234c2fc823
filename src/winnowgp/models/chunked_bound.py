"""Bounds as one differentiable number whose gradient comes with the value."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from gpytorch.kernels import Kernel, RBFKernel, ScaleKernel
from gpytorch.means import Mean
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds import (
    ChunkedKernel,
    RowBlocks,
    TwoPass,
    evidence_gradient,
    two_pass_bound,
)
from winnowgp.data import Dataset
from winnowgp.models.autograd_chunks import AutogradChunks, AutogradMean
from winnowgp.models.scaled_rbf_chunks import ScaledRBFChunks, is_scaled_rbf
from winnowgp.typing import Scalar


def chunked_kernel(
    kernel: Kernel, Z: Float[Tensor, "M D"], blocks: RowBlocks, dtype: torch.dtype | None = None
) -> tuple[ChunkedKernel, list[Tensor]]:
    """A kernel for blocks of rows, and what its gradient is with respect to.

    The scaled RBF takes a short way, and makes its blocks in `dtype`.
    """
    if is_scaled_rbf(kernel):
        assert isinstance(kernel, ScaleKernel)
        assert isinstance(kernel.base_kernel, RBFKernel)
        variance = kernel.outputscale.reshape(())
        lengthscales = kernel.base_kernel.lengthscale.reshape(-1).expand(Z.shape[1])
        chunks = ScaledRBFChunks(
            Z=(Z - blocks.centre).detach(),
            variance=variance.detach(),
            lengthscales=lengthscales.detach(),
            dtype=dtype,
        )
        return chunks, [variance, lengthscales, Z]
    inputs = [p for p in [*kernel.parameters(), Z] if p.requires_grad]
    return AutogradChunks(kernel, Z=Z, parameters=inputs), inputs


@dataclass(frozen=True, slots=True)
class ChunkedBound:
    """The collapsed bound of fixed rows as a function of kernel, points, mean and noise.

    The gradient comes with the value, in two passes over blocks of rows (`bounds.two_pass`); memory
    does not grow with N · M, and not with N where the rows are not in memory.
    """

    blocks: RowBlocks
    tighter: bool = False
    dtype: torch.dtype | None = None
    """Of what is computed row by row, if less precise than the sums."""

    def __call__(
        self, kernel: Kernel, *, Z: Float[Tensor, "M D"], mean: Mean, noise: Scalar
    ) -> Scalar:
        """The bound in nats, differentiable in all that these hold."""
        chunked, inputs = chunked_kernel(kernel, Z, self.blocks, self.dtype)
        chunked_mean, more = _chunked_mean(mean)

        def evaluate() -> tuple[Tensor, tuple[Tensor, ...]]:
            result = two_pass_bound(
                chunked,
                self.blocks,
                mean=chunked_mean,
                noise=noise.detach(),
                tighter=self.tighter,
                dtype=self.dtype,
            )
            return _unpacked(result)

        return WithGradient.apply(evaluate, noise, *more, *inputs)


def evidence(kernel: Kernel, *, data: Dataset, mean: Mean, noise: Scalar) -> Scalar:
    """Exact log evidence in nats, differentiable in kernel, mean and `noise`; O(N³)."""
    blocks = RowBlocks.of(data, size=data.N)
    chunked, inputs = chunked_kernel(kernel, data.X, blocks)
    chunked_mean, more = _chunked_mean(mean)

    def evaluate() -> tuple[Tensor, tuple[Tensor, ...]]:
        block = next(iter(blocks))
        return _unpacked(evidence_gradient(chunked, block, mean=chunked_mean, noise=noise.detach()))

    return WithGradient.apply(evaluate, noise, *more, *inputs)


def _chunked_mean(mean: Mean) -> tuple[AutogradMean, list[Tensor]]:
    inputs: list[Tensor] = [p for p in mean.parameters() if p.requires_grad]
    return AutogradMean(mean, parameters=inputs), inputs


def _unpacked(result: TwoPass) -> tuple[Tensor, tuple[Tensor, ...]]:
    return result.value, (result.noise, *result.mean, *result.kernel)


class WithGradient(torch.autograd.Function):
    """A value that knows its gradient already: `apply(evaluate, *inputs)`, which gives both."""

    @staticmethod
    def forward(
        ctx: Any, evaluate: Callable[[], tuple[Tensor, tuple[Tensor, ...]]], *inputs: Tensor
    ) -> Tensor:
        value, ctx.gradients = evaluate()
        return value

    @staticmethod
    def backward(ctx: Any, *output: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(output[0] * gradient for gradient in ctx.gradients))
