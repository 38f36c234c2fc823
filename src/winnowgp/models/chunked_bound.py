"""Bounds as one differentiable number whose gradient comes with the value."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from gpytorch.kernels import Kernel, RBFKernel, ScaleKernel
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds import ChunkedKernel, TwoPass, evidence_gradient, two_pass_bound
from winnowgp.models.autograd_chunks import AutogradChunks
from winnowgp.models.scaled_rbf_chunks import ScaledRBFChunks, is_scaled_rbf, rbf_features
from winnowgp.typing import Scalar


@dataclass(frozen=True, slots=True)
class KernelChunks:
    """Fixed rows, ready to be cut into chunks of any kernel. The scaled RBF takes a short way."""

    X: Float[Tensor, "N D"]
    centre: Float[Tensor, " D"]
    features: Float[Tensor, "N F"]
    """What the short way needs of the centred rows, computed once."""

    @classmethod
    def of(cls, X: Float[Tensor, "N D"]) -> "KernelChunks":
        """These rows."""
        centre = X.mean(0)
        return cls(X, centre, rbf_features(X - centre))

    def __call__(
        self, kernel: Kernel, Z: Float[Tensor, "M D"]
    ) -> tuple[ChunkedKernel, list[Tensor]]:
        """The kernel in chunks, and what its gradient is with respect to."""
        if is_scaled_rbf(kernel):
            assert isinstance(kernel, ScaleKernel)
            assert isinstance(kernel.base_kernel, RBFKernel)
            variance = kernel.outputscale.reshape(())
            lengthscales = kernel.base_kernel.lengthscale.reshape(-1).expand(Z.shape[1])
            chunks = ScaledRBFChunks(
                self.features,
                Z=(Z - self.centre).detach(),
                variance=variance.detach(),
                lengthscales=lengthscales.detach(),
            )
            return chunks, [variance, lengthscales, Z]
        inputs = [p for p in [*kernel.parameters(), Z] if p.requires_grad]
        return AutogradChunks(kernel, X=self.X, Z=Z, parameters=inputs), inputs


@dataclass(frozen=True, slots=True)
class ChunkedBound:
    """The collapsed bound of fixed rows as a function of kernel, points, targets and noise.

    The gradient comes with the value, in two passes over chunks of rows (`bounds.two_pass`); memory
    does not grow with N · M.
    """

    chunks: KernelChunks
    weights: Float[Tensor, " N"] | None
    tighter: bool

    @classmethod
    def of(
        cls,
        X: Float[Tensor, "N D"],
        *,
        weights: Float[Tensor, " N"] | None = None,
        tighter: bool = False,
    ) -> "ChunkedBound":
        """The bound of these rows, which may count more than once."""
        return cls(KernelChunks.of(X), weights, tighter)

    def __call__(
        self,
        kernel: Kernel,
        *,
        Z: Float[Tensor, "M D"],
        Y: Float[Tensor, "N P"],
        noise: Scalar,
    ) -> Scalar:
        """The bound in nats, differentiable in all four arguments."""
        blocks, inputs = self.chunks(kernel, Z)

        def evaluate() -> tuple[Tensor, tuple[Tensor, ...]]:
            result = two_pass_bound(
                blocks,
                Y=Y.detach(),
                noise=noise.detach(),
                weights=self.weights,
                tighter=self.tighter,
            )
            return _unpacked(result)

        return WithGradient.apply(evaluate, noise, Y, *inputs)


def evidence(
    kernel: Kernel,
    *,
    X: Float[Tensor, "N D"],
    Y: Float[Tensor, "N P"],
    noise: Scalar,
    weights: Float[Tensor, " N"] | None = None,
) -> Scalar:
    """Exact log evidence in nats, differentiable in kernel, `Y` and `noise`; O(N³)."""
    blocks, inputs = KernelChunks.of(X)(kernel, X)

    def evaluate() -> tuple[Tensor, tuple[Tensor, ...]]:
        found = evidence_gradient(blocks, Y=Y.detach(), noise=noise.detach(), weights=weights)
        return _unpacked(found)

    return WithGradient.apply(evaluate, noise, Y, *inputs)


def _unpacked(result: TwoPass) -> tuple[Tensor, tuple[Tensor, ...]]:
    return result.value, (result.noise, result.Y, *result.kernel)


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
