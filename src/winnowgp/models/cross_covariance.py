"""Covariances between new rows and the points of a finished model, as quickly as may be."""

from typing import Any

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

from winnowgp.models.kernel_blocks import covariance, prior_variance
from winnowgp.models.scaled_rbf_chunks import is_scaled_rbf


def cross_covariance(
    kernel: Kernel, X: Float[Tensor, "N D"], Z: Float[Tensor, "M D"]
) -> tuple[Float[Tensor, "N M"], Float[Tensor, " N"]]:
    """k(X, Z) and k(x, x) of each row.

    For the scaled RBF kernel one product and one exponential in place, a tenth of GPyTorch's time
    for a single row and a third for 10,000; for others, and where a gradient in X is wanted,
    GPyTorch's own.
    """
    if not is_scaled_rbf(kernel) or X.requires_grad or min(len(X), len(Z)) == 0:
        return covariance(kernel, X, Z), prior_variance(kernel, X)
    scaled: Any = kernel
    lengthscale, scale = scaled.base_kernel.lengthscale, scaled.outputscale
    centre = Z.mean(0)
    x, z = (X - centre) / lengthscale, (Z - centre) / lengthscale
    # −½‖x − z‖² = x·z − ½‖z‖² − ½‖x‖², at most zero but for rounding.
    exponent = torch.addmm(z.square().sum(1), x, z.mT, beta=-0.5)
    exponent.add_(x.square().sum(1, keepdim=True), alpha=-0.5)
    return exponent.clamp_max_(0).exp_().mul_(scale), scale.expand(len(X))
