"""Covariances between new rows and the points of a finished model, as quickly as may be."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

from winnowgp.models.kernel_blocks import covariance, prior_variance
from winnowgp.models.scaled_rbf_chunks import is_scaled_rbf

Cross: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From rows X `[N D]` to k(X, Z) `[N M]` and k(x, x) `[N]`."""


def cross_covariance(kernel: Kernel, Z: Float[Tensor, "M D"]) -> Cross:
    """k(X, Z) and k(x, x) as a function of X, with what does not depend on X computed once.

    For the scaled RBF kernel one product and one exponential in place, a tenth of GPyTorch's time
    for a single row and a third for 10,000; for others, and where a gradient in X is wanted,
    GPyTorch's own.
    """

    def general(X: Tensor) -> tuple[Tensor, Tensor]:
        return covariance(kernel, X, Z), prior_variance(kernel, X)

    if not is_scaled_rbf(kernel) or len(Z) == 0:
        return general
    scaled: Any = kernel
    lengthscale, scale = scaled.base_kernel.lengthscale, scaled.outputscale
    centre = Z.mean(0)
    z = (Z - centre) / lengthscale
    norms = z.square().sum(1)

    def quick(X: Tensor) -> tuple[Tensor, Tensor]:
        if X.requires_grad or len(X) == 0:
            return general(X)
        x = (X - centre) / lengthscale
        # −½‖x − z‖² = x·z − ½‖z‖² − ½‖x‖², at most zero but for rounding.
        exponent = torch.addmm(norms, x, z.mT, beta=-0.5)
        exponent.add_(x.square().sum(1, keepdim=True), alpha=-0.5)
        return exponent.clamp_max_(0).exp_().mul_(scale), scale.expand(len(X))

    return quick
