"""From a GPyTorch kernel to the dense blocks that bounds are made of."""

from dataclasses import dataclass
from functools import reduce

import torch
from gpytorch import settings
from gpytorch.kernels import AdditiveKernel, Kernel, ProductKernel, ScaleKernel
from gpytorch.means import Mean
from jaxtyping import Float
from linear_operator import to_dense
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KernelBlocks:
    """Prior covariances among K points and between them and N rows."""

    Kuu: Float[Tensor, "K K"]
    Kuf: Float[Tensor, "K N"]
    kff: Float[Tensor, " N"]


def kernel_blocks(
    kernel: Kernel, points: Float[Tensor, "K D"], X: Float[Tensor, "N D"]
) -> KernelBlocks:
    """Evaluate the kernel once, differentiably; O(K (K + N))."""
    return KernelBlocks(
        Kuu=covariance(kernel, points, points),
        Kuf=covariance(kernel, points, X),
        kff=prior_variance(kernel, X),
    )


def covariance(
    kernel: Kernel, A: Float[Tensor, "*#S R D"], B: Float[Tensor, "*#S C D"]
) -> Float[Tensor, "*S R C"]:
    """Dense prior covariance between two sets of rows."""
    if A.shape[-2] == 0 or B.shape[-2] == 0:
        batch = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2])
        return A.new_zeros(*batch, A.shape[-2], B.shape[-2])
    if isinstance(kernel, AdditiveKernel | ProductKernel) and kernel.active_dims is None:
        # Left to itself, one with a low-rank part is factorised to be combined, with a jitter.
        parts = [covariance(part, A, B) for part in kernel.kernels if isinstance(part, Kernel)]
        if isinstance(kernel, ProductKernel):
            return reduce(torch.mul, parts)
        return torch.stack(parts).sum(0)
    if type(kernel) is ScaleKernel and kernel.active_dims is None and _is_composed(kernel):
        return kernel.outputscale[..., None, None] * covariance(kernel.base_kernel, A, B)
    # At once: what GPyTorch does to put it off takes a quarter of the time of a small block.
    with settings.lazily_evaluate_kernels(False):
        return to_dense(kernel(A, B))


def _is_composed(kernel: ScaleKernel) -> bool:
    return isinstance(kernel.base_kernel, AdditiveKernel | ProductKernel)


def prior_variance(kernel: Kernel, X: Float[Tensor, "*S N D"]) -> Float[Tensor, "*S N"]:
    """Prior variance of each row."""
    return to_dense(kernel(X, diag=True))


def prior_mean(mean: Mean, X: Float[Tensor, "N D"]) -> Float[Tensor, "N 1"]:
    """Prior mean of each row, the same for every output."""
    return mean.forward(X)[:, None]
