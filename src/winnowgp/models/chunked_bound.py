"""Bounds as one differentiable number whose gradient comes with the value."""

from collections.abc import Callable
from typing import Any

import torch
from gpytorch.kernels import Kernel, RBFKernel, ScaleKernel
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds import ChunkedKernel, TwoPass, evidence_gradient, two_pass_bound
from winnowgp.models.autograd_chunks import AutogradChunks
from winnowgp.models.scaled_rbf_chunks import ScaledRBFChunks, is_scaled_rbf, rbf_features
from winnowgp.typing import Scalar


def chunked_bound(
    kernel: Kernel,
    *,
    Z: Float[Tensor, "M D"],
    X: Float[Tensor, "N D"],
    Y: Float[Tensor, "N P"],
    noise: Scalar,
    tighter: bool = False,
) -> Scalar:
    """Collapsed bound in nats, differentiable in kernel, `Z`, `Y` and `noise`.

    The gradient comes with the value, in two passes over chunks of rows (`bounds.two_pass`); memory
    does not grow with N · M.
    """
    chunks, inputs = _chunks(kernel, Z=Z, X=X)

    def evaluate() -> TwoPass:
        return two_pass_bound(chunks, Y=Y.detach(), noise=noise.detach(), tighter=tighter)

    return _WithGradient.apply(evaluate, noise, Y, *inputs)


def evidence(
    kernel: Kernel, *, X: Float[Tensor, "N D"], Y: Float[Tensor, "N P"], noise: Scalar
) -> Scalar:
    """Exact log evidence in nats, differentiable in kernel, `Y` and `noise`; O(N³)."""
    chunks, inputs = _chunks(kernel, Z=X, X=X[:0])

    def evaluate() -> TwoPass:
        return evidence_gradient(chunks, Y=Y.detach(), noise=noise.detach())

    return _WithGradient.apply(evaluate, noise, Y, *inputs)


def _chunks(
    kernel: Kernel, *, Z: Float[Tensor, "M D"], X: Float[Tensor, "N D"]
) -> tuple[ChunkedKernel, list[Tensor]]:
    """The kernel in chunks, and what its gradient is with respect to."""
    if is_scaled_rbf(kernel):
        assert isinstance(kernel, ScaleKernel)
        assert isinstance(kernel.base_kernel, RBFKernel)
        variance = kernel.outputscale.reshape(())
        lengthscales = kernel.base_kernel.lengthscale.reshape(-1).expand(X.shape[1])
        chunks = ScaledRBFChunks(
            rbf_features(X),
            Z=Z.detach(),
            variance=variance.detach(),
            lengthscales=lengthscales.detach(),
        )
        return chunks, [variance, lengthscales, Z]
    inputs = [p for p in [*kernel.parameters(), Z] if p.requires_grad]
    return AutogradChunks(kernel, X=X, Z=Z, parameters=inputs), inputs


class _WithGradient(torch.autograd.Function):
    """A value that knows its gradient already."""

    @staticmethod
    def forward(ctx: Any, evaluate: Callable[[], TwoPass], *inputs: Tensor) -> Tensor:
        result = evaluate()
        ctx.gradients = (result.noise, result.Y, *result.kernel)
        return result.value

    @staticmethod
    def backward(ctx: Any, *output: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(output[0] * gradient for gradient in ctx.gradients))
