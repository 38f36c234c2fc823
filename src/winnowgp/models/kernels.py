"""Kernel matrices: of GPyTorch kernels, for predictions, and expectations; RBF and Matérn forms.

A stationary kernel is a function of the scaled squared distance r² = Σ_d (x_d − z_d)²/ℓ_d². The
kernels differ in their `RadialProfile`.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, reduce
from types import FunctionType
from typing import Any, ClassVar, TypeAlias, TypeVar, final

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
from winnowgp.typing import Scalar

_Module = TypeVar("_Module", bound=nn.Module)

# Types of attributes that copies share.
_ATOMIC = (bool, int, float, str, torch.Size, torch.dtype, torch.device, FunctionType)

# 2ν r² beyond which a Matérn covariance is zero in double precision; keeps infinities out.
_FAR = 1e6
# Distance r below which rounding decides it.
_ROUNDED = 1e-6

# RBF covariances up to this size are zero. In double precision, products of smaller ones are
# subnormal, with which factorisations and products of matrices take up to forty times as long.
_LEAST_COVARIANCE = 1e-60

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
        K = to_dense(kernel(A, B))
    base = kernel.base_kernel if type(kernel) is ScaleKernel else kernel
    return threshold(K, _LEAST_COVARIANCE, 0.0) if type(base) is RBFKernel else K


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


class RadialProfile(ABC):
    """A stationary kernel as a function of u = c r², or of u = log s + c r².

    The derivative is written relative to the covariance, with ρ = 1 at r = 0:

        ∂k/∂r² = −½ γ k ρ(u)
    """

    rate: ClassVar[float]
    """c, the factor of r² in u."""
    steepness: ClassVar[float]
    """γ, which is −2 ∂ log k/∂r² at r = 0."""
    is_log: ClassVar[bool]
    """Whether u contains the logarithm of the variance."""
    is_smooth: ClassVar[bool] = True
    """Whether k is differentiable in r² at r = 0; otherwise γ is not its slope there."""

    @abstractmethod
    def covariances_(self, u: Float[Tensor, "*S"], log_s: float) -> Float[Tensor, "*S"]:
        """Return k(u), overwriting u; rounding may have moved u to the wrong side of r = 0."""

    @abstractmethod
    def weigh_(
        self, P: Float[Tensor, "*S"], u: Callable[[], Float[Tensor, "*S"]]
    ) -> Float[Tensor, "*S"]:
        """Return P ∘ ρ(u), overwriting P and u; `u` is called only if ρ is not constant."""

    @abstractmethod
    def weighed_covariances_(
        self, u: Float[Tensor, "*S"], log_s: float
    ) -> tuple[Float[Tensor, "*S"], Float[Tensor, "*S"]]:
        """Return k(u) and k(u) ρ(u), which may be one tensor; overwrites u."""


@final
class RBFProfile(RadialProfile):
    """k = exp(u) with u = log s − ½ r², the RBF kernel."""

    rate, steepness, is_log = -0.5, 1.0, True

    def covariances_(self, u: Float[Tensor, "*S"], log_s: float) -> Float[Tensor, "*S"]:
        k = u.clamp_max_(log_s).exp_()
        # Subnormal numbers cost a GPU nothing, and a pass over all covariances does.
        return k if k.is_cuda else threshold(k, _LEAST_COVARIANCE, 0.0, inplace=True)

    def weigh_(
        self, P: Float[Tensor, "*S"], u: Callable[[], Float[Tensor, "*S"]]
    ) -> Float[Tensor, "*S"]:
        return P

    def weighed_covariances_(
        self, u: Float[Tensor, "*S"], log_s: float
    ) -> tuple[Float[Tensor, "*S"], Float[Tensor, "*S"]]:
        k = self.covariances_(u, log_s)
        return k, k


@final
class Matern12Profile(RadialProfile):
    """k = s exp(−t) with t² = u = r², the Matérn kernel with ν = 1/2.

    Its slope in r² is infinite at r = 0, where the one used here is zero: the limit depends on the
    direction, and opposite ones cancel. An error ε of r² is one of √ε in k, so that distances which
    rounding decides are zero: otherwise the variances of rows at inducing points would be 1e-7.
    """

    rate, steepness, is_log, is_smooth = 1.0, 1.0, False, False

    def covariances_(self, u: Float[Tensor, "*S"], log_s: float) -> Float[Tensor, "*S"]:
        return torch.rsub(self._distances_(u), log_s).exp_()

    def weigh_(
        self, P: Float[Tensor, "*S"], u: Callable[[], Float[Tensor, "*S"]]
    ) -> Float[Tensor, "*S"]:
        # ρ = 1/t
        t = self._distances_(u())
        return P.div_(t).masked_fill_(t == 0, 0.0)

    def weighed_covariances_(
        self, u: Float[Tensor, "*S"], log_s: float
    ) -> tuple[Float[Tensor, "*S"], Float[Tensor, "*S"]]:
        t = self._distances_(u)
        k = torch.rsub(t, log_s).exp_()
        return k, (k / t).masked_fill_(t == 0, 0.0)

    @staticmethod
    def _distances_(u: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        return torch.threshold_(u.clamp_(0, _FAR).sqrt_(), _ROUNDED, 0.0)


@final
class Matern32Profile(RadialProfile):
    """k = s (1 + t) exp(−t) with t² = u = 3 r², the Matérn kernel with ν = 3/2."""

    rate, steepness, is_log = 3.0, 3.0, False

    def covariances_(self, u: Float[Tensor, "*S"], log_s: float) -> Float[Tensor, "*S"]:
        t = u.clamp_(0, _FAR).sqrt_()
        scaled = torch.rsub(t, log_s).exp_()
        return scaled.addcmul_(scaled, t)

    def weigh_(
        self, P: Float[Tensor, "*S"], u: Callable[[], Float[Tensor, "*S"]]
    ) -> Float[Tensor, "*S"]:
        # ρ = 1/(1 + t): a square root and a division instead of another exponential.
        return P.div_(u().clamp_(0, _FAR).sqrt_().add_(1))

    def weighed_covariances_(
        self, u: Float[Tensor, "*S"], log_s: float
    ) -> tuple[Float[Tensor, "*S"], Float[Tensor, "*S"]]:
        # k ρ = s exp(−t)
        t = u.clamp_(0, _FAR).sqrt_()
        weighed = torch.rsub(t, log_s).exp_()
        return t.mul_(weighed).add_(weighed), weighed


@final
class Matern52Profile(RadialProfile):
    """k = s (1 + t + t²/3) exp(−t) with t² = u = 5 r², the Matérn kernel with ν = 5/2."""

    rate, steepness, is_log = 5.0, 5 / 3, False

    def covariances_(self, u: Float[Tensor, "*S"], log_s: float) -> Float[Tensor, "*S"]:
        t = u.clamp_(0, _FAR).sqrt()
        scaled = torch.rsub(t, log_s).exp_()
        return scaled.addcmul_(scaled, t.add_(u, alpha=1 / 3))

    def weigh_(
        self, P: Float[Tensor, "*S"], u: Callable[[], Float[Tensor, "*S"]]
    ) -> Float[Tensor, "*S"]:
        # ρ = (1 + t)/(1 + t + t²/3)
        squares = u().clamp_(0, _FAR)
        linear = squares.sqrt().add_(1)
        return P.mul_(linear).div_(linear.add_(squares, alpha=1 / 3))

    def weighed_covariances_(
        self, u: Float[Tensor, "*S"], log_s: float
    ) -> tuple[Float[Tensor, "*S"], Float[Tensor, "*S"]]:
        # k ρ = s (1 + t) exp(−t),  k = k ρ + s t²/3 exp(−t)
        t = u.clamp_(0, _FAR).sqrt()
        scaled = torch.rsub(t, log_s).exp_()
        weighed = t.mul_(scaled).add_(scaled)
        return torch.addcmul(weighed, u, scaled, value=1 / 3, out=u), weighed


_MATERN: dict[float, RadialProfile] = {
    0.5: Matern12Profile(),
    1.5: Matern32Profile(),
    2.5: Matern52Profile(),
}


@final
@dataclass(frozen=True, slots=True)
class StationaryForm:
    """The profile and the parameters of a stationary kernel, differentiable."""

    profile: RadialProfile
    variance: Scalar
    lengthscales: Float[Tensor, " D"]
    """One lengthscale per column; infinite for the columns that the kernel ignores."""


def stationary_form(kernel: Kernel, D: int) -> StationaryForm | None:
    """Return the form of an RBF or Matérn kernel on D columns, and None for other kernels.

    A kernel that is not in a ScaleKernel has a variance of one.
    """
    base = kernel.base_kernel if type(kernel) is ScaleKernel else kernel
    if type(base) is RBFKernel:
        profile = RBFProfile()
    elif type(base) is MaternKernel and base.nu in _MATERN:
        profile = _MATERN[base.nu]
    else:
        return None
    # GPyTorch gives the columns of the base kernel to the ScaleKernel, which selects them.
    lengthscales = on_columns(base.lengthscale, kernel, D=D, elsewhere=torch.inf)
    if lengthscales is None:
        return None
    variance = kernel.outputscale if type(kernel) is ScaleKernel else lengthscales.new_ones(())
    return StationaryForm(profile, variance.reshape(()), lengthscales)


def on_columns(
    values: Tensor, kernel: Kernel, *, D: int, elsewhere: float
) -> Float[Tensor, " D"] | None:
    """Return a parameter of a kernel for each of D columns; None if a column is repeated.

    Args:
        values: one number, or one per selected column.
        kernel: the kernel that selects columns.
        D: number of columns.
        elsewhere: value for the columns that are not selected.
    """
    columns = kernel.active_dims
    if columns is None:
        return values.reshape(-1).expand(D)
    assert isinstance(columns, Tensor)
    if len(set(columns.tolist())) < len(columns):
        return None
    values = values.reshape(-1).expand(len(columns))
    return values.new_full((D,), elsewhere).index_copy(0, columns, values)


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
