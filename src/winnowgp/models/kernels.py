"""Kernel matrices: of GPyTorch kernels, for predictions, and expectations; averages over boxes."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, reduce
from types import FunctionType
from typing import Any, TypeAlias, TypeVar, final

import numpy as np
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
from torch.distributions import Distribution
from torch.nn.functional import threshold

from winnowgp.bounds.gplvm import ExpectedKernel, LinearPsi, RBFPsi
from winnowgp.errors import InputError
from winnowgp.models.stationary import LEAST_COVARIANCE, StationaryForm, stationary_form

_Module = TypeVar("_Module", bound=nn.Module)

# Types of attributes that copies share.
_ATOMIC = (bool, int, float, str, torch.Size, torch.dtype, torch.device, FunctionType)


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
    if type(kernel) is ScaleKernel and kernel.active_dims is None:
        base = kernel.base_kernel
        if isinstance(base, AdditiveKernel | ProductKernel):
            return kernel.outputscale[..., None, None] * covariance(base, A, B)
    # Lazy evaluation takes a quarter of the time of a small block.
    with settings.lazily_evaluate_kernels(False):
        K = to_dense(kernel(A, B))
    base = kernel.base_kernel if type(kernel) is ScaleKernel else kernel
    return threshold(K, LEAST_COVARIANCE, 0.0) if type(base) is RBFKernel else K


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

    RBF and Matérn kernels need one product and one exponential in place: with RBF a tenth of
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

    It equals that of `copy.deepcopy` and takes a fifth of its time: a module has a dozen empty
    dictionaries of hooks, which are made anew, and parameters and buffers, which are cloned.
    """
    return _copied(module, {})


def share_modules(module: _Module) -> _Module:
    """Return a module of its own with the parts and parameters of another one."""
    kind, state = type(module), module.__getstate__()
    copied = kind.__new__(kind)
    vars(copied).update(
        (name, value.copy() if isinstance(value, dict | set) else value)
        for name, value in state.items()
    )
    return copied


def _copied(module: _Module, memo: dict[int, Any]) -> _Module:
    """Return the copy of a module; `memo` has the copies of objects so far, as in `deepcopy`."""
    known, kind = memo.get(id(module)), type(module)
    if known is not None:
        return known
    if not _is_copied_by_state(kind):
        return deepcopy(module, memo)
    copied = memo[id(module)] = kind.__new__(kind)
    state = vars(copied)
    for name, value in module.__getstate__().items():
        if value is None or type(value) in _ATOMIC:
            state[name] = value
        elif type(value) in (dict, OrderedDict, set) and not value:
            state[name] = type(value)()
        elif name == "_modules":
            pairs = (
                (k, None if part is None else _copied(part, memo)) for k, part in value.items()
            )
            state[name] = type(value)(pairs)
        elif name in ("_parameters", "_buffers"):
            state[name] = type(value)((k, _cloned(tensor, memo)) for k, tensor in value.items())
        else:
            if isinstance(value, Distribution):  # a prior, whose tensors take most of its time
                for tensor in vars(value).values():
                    _cloned(tensor if isinstance(tensor, Tensor) else None, memo)
            state[name] = deepcopy(value, memo)
    return copied


@cache
def _is_copied_by_state(kind: type[nn.Module]) -> bool:
    """Return whether `deepcopy` copies the attributes of a module, and nothing else."""
    own = {name for each in kind.__mro__[:-1] for name in vars(each)}
    plain = all(
        getattr(kind, name) in (getattr(nn.Module, name), getattr(Kernel, name))
        for name in ("__getstate__", "__setstate__")
    )
    return plain and not own & {"__deepcopy__", "__reduce__", "__reduce_ex__"}


def _cloned(tensor: Tensor | None, memo: dict[int, Any]) -> Tensor | None:
    """Return the copy of a parameter or buffer, without its gradient as in `deepcopy`."""
    if tensor is None or id(tensor) in memo:
        return None if tensor is None else memo[id(tensor)]
    plain = type(tensor) is nn.Parameter or (type(tensor) is Tensor and not tensor.requires_grad)
    if not plain:
        return deepcopy(tensor, memo)
    copied = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        copied = nn.Parameter(copied, requires_grad=tensor.requires_grad)
    memo[id(tensor)] = copied
    return copied


@final
class BoxKernel(Kernel):
    """The covariance of averages over boxes; some columns are the widths of the boxes.

    An observation may be the average of f over a box with centre c and edges w rather than its
    value at a point. Averages of a Gaussian process are jointly Gaussian with its values, with the
    covariance

        k̄((c, w), (c', w')) = 1/(|w| |w'|) ∫∫ k(x, x') dx dx',

    computed by Gauss-Legendre quadrature with G nodes for each column. A box without extent is a
    point. For an RBF kernel of lengthscale ℓ and a box of width w the error of an average is at
    most

        (w/ℓ)^(2G) (G!)³ / ((2G + 1) 2^G ((2G)!)²)

    of the variance: 4e-7 for w = 2ℓ and five nodes. Matérn kernels are not as smooth where boxes
    overlap; with five nodes and w = 2ℓ the largest error, that of a box and the point in its
    centre, is 0.03 of the variance for ν = 1/2, 0.002 for ν = 3/2 and 3e-4 for ν = 5/2. Boxes much
    wider than a lengthscale need more nodes.

    A matrix costs G^(2d) times that of the kernel of the function, for d columns with widths.

    Args:
        base_kernel: kernel of the function, of the columns that are not widths; copied.
        widths: columns that hold widths, one for each other column, in their order.
        nodes: quadrature nodes G for each column.

    >>> from gpytorch.kernels import RBFKernel
    >>> kernel = BoxKernel(RBFKernel(), widths=[1])
    >>> point, box = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    >>> [round(kernel(a, b).to_dense().item(), 3) for a, b in ((point, point), (box, box))]
    [1.0, 0.857]
    """

    def __init__(self, base_kernel: Kernel, *, widths: Sequence[int], nodes: int = 5) -> None:
        super().__init__()
        if nodes < 1 or not widths or min(widths) < 0 or len(set(widths)) < len(widths):
            raise InputError(
                "`nodes` must be at least 1, and `widths` distinct column numbers, 0 or larger; "
                f"got {nodes} and {widths}."
            )
        self.base_kernel, self.widths, self.nodes = copy_module(base_kernel), list(widths), nodes

    def forward(
        self,
        x1: Float[Tensor, "*S R D"],
        x2: Float[Tensor, "*S C D"],
        diag: bool = False,
        last_dim_is_batch: bool = False,
        **params: Any,
    ) -> Tensor:
        """Return the covariances of averages; only the diagonal on request."""
        del last_dim_is_batch, params
        (a, weights), (b, _) = self.box_nodes(x1), self.box_nodes(x2)
        if diag:
            pairs = covariance(self.base_kernel, a, b)
            return torch.einsum("g,...gh,h->...", weights, pairs, weights)
        G = len(weights)
        K = covariance(self.base_kernel, a.flatten(-3, -2), b.flatten(-3, -2))
        K = K.reshape(*K.shape[:-2], x1.shape[-2], G, x2.shape[-2], G)
        return torch.einsum("g,...rgch,h->...rc", weights, K, weights)

    def box_nodes(self, X: Float[Tensor, "*S N D"]) -> tuple[Tensor, Float[Tensor, " G"]]:
        """Return the nodes of each box `[*S N G d]`, and their weights, which sum to one."""
        D = X.shape[-1]
        columns = [d for d in range(D) if d not in self.widths]
        if len(columns) != len(self.widths) or max(self.widths) >= D:
            raise RuntimeError(
                f"{D} columns cannot be {len(self.widths)} widths and as many centres. Pass one "
                "width for each other column."
            )
        at, weight = np.polynomial.legendre.leggauss(self.nodes)
        one = torch.as_tensor(0.5 * at).to(X), torch.as_tensor(0.5 * weight).to(X)
        d = len(columns)
        grid = torch.cartesian_prod(*[one[0]] * d).reshape(-1, d)
        weights = torch.cartesian_prod(*[one[1]] * d).reshape(-1, d).prod(1)
        centres, widths = X[..., columns], X[..., self.widths]
        return centres[..., None, :] + widths[..., None, :] * grid, weights
