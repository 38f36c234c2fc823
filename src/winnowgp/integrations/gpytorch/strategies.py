"""Discovery of the inducing points of a GPyTorch model, and recording of its evaluations."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
from gpytorch import settings, variational
from gpytorch.distributions import MultivariateNormal
from gpytorch.models import GP, ApproximateGP, ExactGP
from gpytorch.models.deep_gps import DeepGP
from gpytorch.models.deep_gps.dspp import DSPP
from gpytorch.module import Module
from jaxtyping import Float, Int
from linear_operator.operators import DiagLinearOperator
from torch import Tensor, nn

from winnowgp.errors import InputError


@dataclass(frozen=True, slots=True)
class Call:
    """An evaluation of a strategy: its rows and the marginals of q(f)."""

    x: Float[Tensor, "*rows B D"]
    arguments: dict[str, Any]
    mean: Float[Tensor, "*batch B"]
    mean_shift: Float[Tensor, "*batch B"]
    """Zeros added to the mean, so that a gradient in them is one in the mean."""
    variance_shift: Float[Tensor, "*batch B"]


@final
class Recorder(Module):
    """A wrapper of a strategy that records its calls and returns marginals only.

    An ELBO depends on q(f) through means and variances of single rows, and deep layers sample rows
    independently. Zeros are added to both, so that the ELBO can be differentiated in them though no
    parameter requires a gradient.
    """

    def __init__(self, strategy: Any) -> None:
        super().__init__()
        self.base_variational_strategy = strategy
        self.calls: list[Call] = []

    def __call__(
        self, x: Tensor, prior: bool = False, diag: bool = True, **arguments: Any
    ) -> MultivariateNormal:
        q = self.base_variational_strategy(x, prior=prior, diag=diag, **arguments)
        covariance = q.lazy_covariance_matrix
        least = settings.min_variance.value(q.mean.dtype)
        variance = covariance.diagonal(dim1=-1, dim2=-2).clamp_min(least)
        variance = variance.expand(q.mean.shape)
        shifts = [torch.zeros_like(q.mean, requires_grad=True) for _ in range(2)]
        mean = q.mean + shifts[0]
        self.calls.append(Call(x, arguments, mean, *shifts))
        return MultivariateNormal(mean, DiagLinearOperator(variance + shifts[1]))


_Same = TypeVar("_Same", bound=Module)

_WRAPPERS = (
    variational.IndependentMultitaskVariationalStrategy,
    variational.LMCVariationalStrategy,
    Recorder,
)

_STRATEGIES = (
    variational.BatchDecoupledVariationalStrategy,
    variational.LargeBatchVariationalStrategy,
    variational.VariationalStrategy,
    variational.UnwhitenedVariationalStrategy,
)

DISTRIBUTIONS = (
    variational.CholeskyVariationalDistribution,
    variational.MeanFieldVariationalDistribution,
    variational.DeltaVariationalDistribution,
    variational.NaturalVariationalDistribution,
    variational.TrilNaturalVariationalDistribution,
)
# Methods that a subclass may override, because neither q(f) nor the KL depend on them.
_FREE = {"__init__", "_clear_cache", "amortized_exact_gp", "get_fantasy_model", "pseudo_points"}
# A wrapper may also evaluate q(f) in its own way, but not the KL.
_FREE_AROUND = {*_FREE, "__call__", "forward"}

_INSTEAD = {
    "CiqVariationalStrategy": "It whitens with a symmetric root that is never formed; train with "
    "VariationalStrategy, whose bound is the same.",
    "GridInterpolationVariationalStrategy": "Its points form a grid, which interpolation needs "
    "whole; train with VariationalStrategy.",
    "AdditiveGridInterpolationVariationalStrategy": "Its points form a grid, which "
    "interpolation needs whole; train with VariationalStrategy.",
    "NNVariationalStrategy": "Its points are the rows of the data, and each row depends on its "
    "neighbours only; train with VariationalStrategy.",
    "OrthogonallyDecoupledVariationalStrategy": "One of its sets of points models the "
    "residual of the other; use BatchDecoupledVariationalStrategy.",
}


@final
@dataclass(frozen=True, slots=True)
class InducingStrategy:
    """A strategy with inducing points, whose batches are flattened.

    It has F functions, one for each element of the batch of q(u), and G sets of locations, one for
    each element of the batch of `inducing_points`; functions may share a set. A decoupled strategy
    has two roles: its means and its covariances have sets and kernel matrices of their own.
    """

    name: str
    """Name of the module: `model.get_submodule(name)`."""
    strategy: Any
    roles: int
    whitened: bool

    @property
    def q(self) -> Any:
        """The `_VariationalDistribution` of the strategy."""
        return self.strategy._variational_distribution

    @property
    def K(self) -> int:
        """Number of points in each set."""
        return self.strategy.inducing_points.shape[-2]

    @property
    def batch(self) -> torch.Size:
        """Batch shape of q(u)."""
        return torch.Size(self.q.batch_shape)

    @property
    def F(self) -> int:
        """Number of functions."""
        return self.batch.numel()

    @property
    def locations(self) -> Float[Tensor, "G K D"]:
        """Locations of all sets; with two roles those of the means come first."""
        return self._by_role().flatten(0, -3)

    @property
    def jitter(self) -> float:
        """Number that GPyTorch adds to the diagonal of K_uu."""
        return self.strategy.jitter_val

    def set_of(self, role: int) -> Int[Tensor, " F"]:
        """Return the index of the set that each function uses in a role."""
        shape = self._by_role().shape[1:-2]
        index = torch.arange(shape.numel()).reshape(shape).expand(self.batch)
        return index.flatten() + role * shape.numel()

    def stacked(self, sets: Float[Tensor, "G M D"]) -> Tensor:
        """Reshape locations of any number of points as GPyTorch stores them."""
        shape = self._by_role().shape[:-2]
        split = sets.reshape(*shape, *sets.shape[1:])
        return split[0] if self.roles == 1 else split.movedim(0, self.role_axis(2))

    def role_axis(self, events: int) -> int:
        """Return the axis of roles in a tensor with this number of trailing event axes."""
        return (self.strategy.mean_var_batch_dim or -1) - events

    def _by_role(self) -> Float[Tensor, "R *batch K D"]:
        Z = self.strategy.inducing_points.detach()
        return Z[None] if self.roles == 1 else Z.movedim(self.role_axis(2), 0)


def inducing_strategies(model: GP) -> tuple[InducingStrategy, ...]:
    """Return all strategies of a model, in the order of its layers.

    Raises:
        InputError: the model has none, or one that is not supported.
    """
    name = type(model).__name__
    if isinstance(model, ExactGP):
        raise InputError(
            f"`model` must have a variational strategy; {name} is an ExactGP. Give its kernel to "
            "winnowgp.SparseGP, which learns its points by the collapsed bound."
        )
    if isinstance(model, DSPP):
        raise InputError(
            f"`model` must be trained by a bound on the evidence; {name} is a DSPP, whose layers "
            "are mixtures. Use a DeepGP."
        )
    if not isinstance(model, ApproximateGP | DeepGP):
        raise InputError(
            f"`model` must be an ApproximateGP or a DeepGP of GPyTorch; got {name}.{_inner(model)}"
        )
    owners = [(path, m) for path, m in model.named_modules() if isinstance(m, ApproximateGP)]
    strategies = tuple(_strategy(path, owner) for path, owner in owners)
    if not strategies:
        raise InputError(f"`model` has no layers; {name} holds no DeepGPLayer.")
    return strategies


def _inner(model: object) -> str:
    """Return a hint that names the GP inside a larger model, if there is one."""
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    inner = next((path for path, m in modules if isinstance(m, ApproximateGP)), None)
    return "" if inner is None else f" Pass `model.{inner}`, with the inputs that it receives."


def _strategy(path: str, owner: ApproximateGP) -> InducingStrategy:
    steps, strategy = [*path.split("."), "variational_strategy"], owner.variational_strategy
    name = ".".join(steps).removeprefix(".")
    while (around := _kind(strategy, _WRAPPERS)) is not None:
        _check_overrides(name, strategy, around, _FREE_AROUND)
        name, strategy = f"{name}.base_variational_strategy", strategy.base_variational_strategy
    kind = _kind(strategy, _STRATEGIES)
    if kind is None:
        cls = type(strategy).__name__
        raise InputError(
            f"`{name}` must be a VariationalStrategy, UnwhitenedVariationalStrategy or "
            "BatchDecoupledVariationalStrategy, or a multitask strategy around one; got "
            f"{cls}. {_INSTEAD.get(cls, 'Train with VariationalStrategy.')}"
        )
    _check_overrides(name, strategy, kind, _FREE)
    q = strategy._variational_distribution
    if not any(isinstance(q, d) and type(q).forward is d.forward for d in DISTRIBUTIONS):
        raise InputError(
            f"`{name}` must have a variational distribution of GPyTorch's (Cholesky, MeanField, "
            f"Delta, Natural, TrilNatural); got {type(q).__name__}."
        )
    decoupled = kind is variational.BatchDecoupledVariationalStrategy
    inducing = InducingStrategy(
        name, strategy, 2 if decoupled else 1, kind is not variational.UnwhitenedVariationalStrategy
    )
    _check_batches(inducing)
    return inducing


def _kind(strategy: object, kinds: tuple[type, ...]) -> type | None:
    return next((kind for kind in kinds if isinstance(strategy, kind)), None)


def _check_overrides(name: str, strategy: object, kind: type, free: set[str]) -> None:
    """Raise an `InputError` if a subclass overrides how q(f) or the KL are computed."""
    lineage = type(strategy).__mro__
    known = {
        n for c in kind.__mro__ if issubclass(c, variational._VariationalStrategy) for n in vars(c)
    }
    new = {n for c in lineage[: lineage.index(kind)] for n, v in vars(c).items() if _is_code(v)}
    own = sorted((new & known) - free)
    if own:
        raise InputError(
            f"`{name}` must compute q(f) and the KL as {kind.__name__} does; got "
            f"{type(strategy).__name__}, which has its own `{'`, `'.join(own)}`. Train with "
            f"{kind.__name__}, or move the difference into the model's mean and kernel."
        )


def _is_code(value: object) -> bool:
    return callable(value) or isinstance(value, property)


def _check_batches(inducing: InducingStrategy) -> None:
    shape = inducing._by_role().shape[1:-2]
    if torch.broadcast_shapes(shape, inducing.batch) != inducing.batch:
        raise InputError(
            f"`{inducing.name}` must have a q(u) for each set of inducing points; their batch "
            f"shape is {list(shape)} and that of its variational distribution "
            f"{list(inducing.batch)}. Give the distribution "
            f"`batch_shape=torch.Size({list(shape)})`."
        )


def copy_module(module: _Same) -> _Same:
    """Return a deep copy of a module without cached results of its last evaluation.

    GPyTorch stores intermediate results on its modules, and PyTorch cannot copy tensors with an
    autograd history. The original module keeps its cache.
    """
    memo: dict[int, Any] = {}
    for child in module.modules():
        for name, value in vars(child).items():
            if name == "_memoize_cache":
                memo[id(value)] = {}
            elif isinstance(value, Tensor) and value.grad_fn is not None:
                memo[id(value)] = value.detach().clone()
        if isinstance(child, Module):
            terms = child._added_loss_terms.values()
            memo |= {id(term): None for term in terms if term is not None}
    try:
        return deepcopy(module, memo)
    except (RuntimeError, TypeError) as error:
        raise InputError(
            f"{type(module).__name__} cannot be copied: {error} If it holds a list of losses, "
            "outputs of earlier calls, a file or a lock, keep these elsewhere, or `detach` them."
        ) from error
