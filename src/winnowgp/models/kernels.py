"""Dense kernel matrices of GPyTorch kernels, covariances for predictions, and expectations."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias, TypeVar

import torch
from gpytorch import settings
from gpytorch.kernels import (
    AdditiveKernel,
    Kernel,
    LinearKernel,
    MaternKernel,
    ProductKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)
from gpytorch.means import Mean
from jaxtyping import Float
from linear_operator import to_dense
from torch import Tensor, nn

from winnowgp.bounds.gplvm import ExpectedKernel, LinearPsi, RBFPsi
from winnowgp.errors import InputError
from winnowgp.models.stationary import StationaryForm, stationary_form

_Module = TypeVar("_Module", bound=nn.Module)

Cross: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]
"""A function from rows X `[N D]` to k(X, Z) `[N M]` and k(x, x) `[N]`."""


@dataclass(frozen=True, slots=True)
class KernelBlocks:
    """Prior covariances among K inducing points, and between them and N rows."""

    Kuu: Float[Tensor, "K K"]
    Kuf: Float[Tensor, "K N"]
    kff: Float[Tensor, " N"]


def kernel_blocks(
    kernel: Kernel, points: Float[Tensor, "K D"], X: Float[Tensor, "N D"]
) -> KernelBlocks:
    """Return the covariances of points and rows, differentiable; O(K (K + N))."""
    return KernelBlocks(
        Kuu=covariance(kernel, points, points),
        Kuf=covariance(kernel, points, X),
        kff=prior_variance(kernel, X),
    )


def covariance(
    kernel: Kernel, A: Float[Tensor, "*#S R D"], B: Float[Tensor, "*#S C D"]
) -> Float[Tensor, "*S R C"]:
    """Return the dense prior covariance between two sets of rows."""
    if A.shape[-2] == 0 or B.shape[-2] == 0:
        batch = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2])
        return A.new_zeros(*batch, A.shape[-2], B.shape[-2])
    if isinstance(kernel, AdditiveKernel | ProductKernel) and kernel.active_dims is None:
        # GPyTorch would factorise a low-rank component before combining it, with a jitter.
        components = [covariance(k, A, B) for k in kernel.kernels if isinstance(k, Kernel)]
        if isinstance(kernel, ProductKernel):
            return reduce(torch.mul, components)
        return torch.stack(components).sum(0)
    if type(kernel) is ScaleKernel and kernel.active_dims is None and _is_composed(kernel):
        return kernel.outputscale[..., None, None] * covariance(kernel.base_kernel, A, B)
    # Lazy evaluation takes a quarter of the time of a small block.
    with settings.lazily_evaluate_kernels(False):
        return to_dense(kernel(A, B))


def _is_composed(kernel: ScaleKernel) -> bool:
    return isinstance(kernel.base_kernel, AdditiveKernel | ProductKernel)


def prior_variance(kernel: Kernel, X: Float[Tensor, "*S N D"]) -> Float[Tensor, "*S N"]:
    """Return the prior variance of each row."""
    if type(kernel) is ScaleKernel and not kernel.batch_shape and _is_unit(kernel.base_kernel):
        # GPyTorch compares all inputs first, which a GPU waits for.
        return kernel.outputscale.expand(X.shape[:-1])
    return to_dense(kernel(X, diag=True))


def _is_unit(kernel: Kernel) -> bool:
    """Return whether a kernel is one at equal inputs."""
    return type(kernel) in (RBFKernel, MaternKernel, RQKernel) and not kernel.batch_shape


def prior_mean(mean: Mean, X: Float[Tensor, "N D"]) -> Float[Tensor, "N 1"]:
    """Return the prior mean of each row, the same for every output."""
    return mean.forward(X)[:, None]


def expected_kernel(kernel: Kernel, Q: int) -> ExpectedKernel:
    """Return the kernel's expectations under Gaussian inputs, differentiable in its parameters.

    Raises:
        InputError: the expectations are not known in closed form.
    """
    if not has_psi(kernel):
        raise InputError(
            "`kernel` must be an RBFKernel or LinearKernel on all dimensions, scaled or not, for "
            f"expected statistics; got {type(kernel).__name__}. Use `SampledLatentGP` for others."
        )
    if isinstance(kernel, ScaleKernel):
        base, scale = kernel.base_kernel, kernel.outputscale.reshape(())
    else:
        base, scale = kernel, next(kernel.parameters()).new_ones(())
    if isinstance(base, RBFKernel):
        return RBFPsi(scale, base.lengthscale.reshape(-1).expand(Q))
    assert isinstance(base, LinearKernel)
    return LinearPsi(scale * base.variance.reshape(-1).expand(Q))


def has_psi(kernel: Kernel) -> bool:
    """Return whether the expectations under Gaussian inputs are known in closed form."""
    base = kernel.base_kernel if type(kernel) is ScaleKernel else kernel
    whole = kernel.active_dims is None and base.active_dims is None
    return whole and type(base) in (RBFKernel, LinearKernel)


def cross_covariance(kernel: Kernel, Z: Float[Tensor, "M D"]) -> Cross:
    """Return k(X, Z) and k(x, x) as a function of X; the rest is computed once.

    Scaled RBF and Matérn kernels need one product and one exponential in place: with RBF a tenth of
    GPyTorch's time for a single row and a third for 10,000. Linear kernels are a product, and the
    terms of a sum are added up. Other kernels use GPyTorch, and so do RBF and Matérn kernels if a
    gradient in X is needed.
    """

    def general(X: Tensor) -> tuple[Tensor, Tensor]:
        return covariance(kernel, X, Z), prior_variance(kernel, X)

    if len(Z) == 0:
        return general
    if type(kernel) is AdditiveKernel and kernel.active_dims is None:
        return _summed_cross(
            [cross_covariance(k, Z) for k in kernel.kernels if isinstance(k, Kernel)]
        )
    if type(kernel) is LinearKernel and kernel.active_dims is None:
        return _linear_cross(kernel.variance.reshape(-1), Z)
    form = stationary_form(kernel, Z.shape[1])
    return general if form is None else _stationary_cross(form, Z, general)


def _linear_cross(variances: Float[Tensor, " #D"], Z: Float[Tensor, "M D"]) -> Cross:
    scaled = variances * Z
    return lambda X: (X @ scaled.mT, (variances * X.square()).sum(1))


def _summed_cross(terms: Sequence[Cross]) -> Cross:
    def summed(X: Tensor) -> tuple[Tensor, Tensor]:
        blocks, variances = zip(*(term(X) for term in terms), strict=True)
        return reduce(torch.add, blocks), reduce(torch.add, variances)

    return summed


def _stationary_cross(form: StationaryForm, Z: Float[Tensor, "M D"], general: Cross) -> Cross:
    centre, rate = Z.mean(0), form.profile.rate
    z = (Z - centre) / form.lengthscales
    norms = z.square().sum(1)

    def quick(X: Tensor) -> tuple[Tensor, Tensor]:
        if X.requires_grad or len(X) == 0:
            return general(X)
        x = (X - centre) / form.lengthscales
        # c r² = c ‖z‖² − 2c x·z + c ‖x‖²
        u = torch.addmm(norms, x, z.mT, beta=rate, alpha=-2 * rate)
        u.add_(x.square().sum(1, keepdim=True), alpha=rate)
        return form.profile.covariances_(u, 0.0).mul_(form.variance), form.variance.expand(len(X))

    return quick


def copy_module(module: _Module) -> _Module:
    """Return a deep copy of a kernel, a mean, a model or another module.

    It equals that of `copy.deepcopy` and takes half as long: a module has a dozen empty
    dictionaries of hooks, which are made anew, and buffers, which are cloned.
    """
    memo: dict[int, Any] = {}
    for part in module.modules():
        for value in vars(part).values():
            if type(value) in (dict, OrderedDict, set) and not value:
                memo[id(value)] = type(value)()
        for buffer in part.buffers(recurse=False):
            if not buffer.requires_grad:
                memo[id(buffer)] = buffer.clone()
    return deepcopy(module, memo)
