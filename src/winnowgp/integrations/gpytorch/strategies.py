"""The variational strategies that are supported, and why others are not."""

from dataclasses import dataclass
from typing import Any, final

import torch
from gpytorch import settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.models import GP, ApproximateGP, ExactGP
from gpytorch.models.deep_gps import DeepGP
from gpytorch.models.deep_gps.dspp import DSPP
from gpytorch.module import Module
from gpytorch.variational import (
    BatchDecoupledVariationalStrategy,
    CholeskyVariationalDistribution,
    DeltaVariationalDistribution,
    IndependentMultitaskVariationalStrategy,
    LargeBatchVariationalStrategy,
    LMCVariationalStrategy,
    MeanFieldVariationalDistribution,
    NaturalVariationalDistribution,
    TrilNaturalVariationalDistribution,
    UnwhitenedVariationalStrategy,
    VariationalStrategy,
    _VariationalStrategy,
)
from jaxtyping import Float, Int
from linear_operator.operators import DiagLinearOperator
from torch import Tensor, nn

from winnowgp.errors import InputError

# What passes through a strategy while a model is evaluated.


@dataclass(frozen=True, slots=True)
class Call:
    """One evaluation: rows in, marginals of q(f) out."""

    x: Float[Tensor, "*rows B D"]
    arguments: dict[str, Any]
    mean: Float[Tensor, "*batch B"]
    mean_shift: Float[Tensor, "*batch B"]
    """Zeros that were added to the mean: a gradient in them is one in the mean."""
    variance_shift: Float[Tensor, "*batch B"]


@final
class Recorder(Module):
    """A strategy around another one that remembers its calls and answers with marginals alone.

    All that a bound asks of q(f) are means and variances row by row, and layers draw from them
    row by row too. Zeros are added to both, so that what follows can be differentiated in them
    though no parameter asks for a gradient.
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


# Where a GPyTorch model keeps its inducing points, and which kinds of it we can read.


_WRAPPERS = (IndependentMultitaskVariationalStrategy, LMCVariationalStrategy, Recorder)

_STRATEGIES = (
    BatchDecoupledVariationalStrategy,
    LargeBatchVariationalStrategy,
    VariationalStrategy,
    UnwhitenedVariationalStrategy,
)

DISTRIBUTIONS = (
    CholeskyVariationalDistribution,
    MeanFieldVariationalDistribution,
    DeltaVariationalDistribution,
    NaturalVariationalDistribution,
    TrilNaturalVariationalDistribution,
)
# What a subclass may do in its own way: neither q(f) nor the KL depend on it.
_FREE = {"__init__", "_clear_cache", "amortized_exact_gp", "get_fantasy_model", "pseudo_points"}
# Around a strategy q(f) is evaluated as it is; its KL is ours.
_FREE_AROUND = {*_FREE, "__call__", "forward"}

_INSTEAD = {
    "CiqVariationalStrategy": "It whitens with a symmetric root that it never forms; train with "
    "VariationalStrategy, whose bound is the same.",
    "GridInterpolationVariationalStrategy": "Its points are a grid that interpolation needs whole; "
    "train with VariationalStrategy.",
    "AdditiveGridInterpolationVariationalStrategy": "Its points are a grid that interpolation "
    "needs whole; train with VariationalStrategy.",
    "NNVariationalStrategy": "Its points are the rows of the data, and each row looks at its "
    "neighbours alone; train with VariationalStrategy.",
    "OrthogonallyDecoupledVariationalStrategy": "One of its sets of points lives on what the other "
    "leaves; use BatchDecoupledVariationalStrategy.",
}


@final
@dataclass(frozen=True, slots=True)
class InducingStrategy:
    """A strategy that holds inducing points, with its batches laid out in rows.

    It has F functions, one for each element of the batch of q(u), and G sets of locations, one for
    each element of the batch of `inducing_points`; functions may share a set. A decoupled strategy
    plays two roles: its means and its covariances have sets and kernel matrices of their own.
    """

    name: str
    """Where it is: `model.get_submodule(name)`."""
    strategy: Any
    roles: int
    whitened: bool

    @property
    def q(self) -> Any:
        """Its `_VariationalDistribution`."""
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
        """All sets; with two roles those of the means come first."""
        return self._by_role().flatten(0, -3)

    @property
    def jitter(self) -> float:
        """What GPyTorch adds to the diagonal of K_uu."""
        return self.strategy.jitter_val

    def set_of(self, role: int) -> Int[Tensor, " F"]:
        """Which set each function has, in one of its roles."""
        shape = self._by_role().shape[1:-2]
        index = torch.arange(shape.numel()).reshape(shape).expand(self.batch)
        return index.flatten() + role * shape.numel()

    def stacked(self, sets: Float[Tensor, "G M D"]) -> Tensor:
        """Locations of other numbers of points, shaped as GPyTorch has them."""
        shape = self._by_role().shape[:-2]
        split = sets.reshape(*shape, *sets.shape[1:])
        return split[0] if self.roles == 1 else split.movedim(0, self.role_axis(2))

    def role_axis(self, events: int) -> int:
        """Where the roles are in a tensor with so many axes that are no batch."""
        return (self.strategy.mean_var_batch_dim or -1) - events

    def _by_role(self) -> Float[Tensor, "R *batch K D"]:
        Z = self.strategy.inducing_points.detach()
        return Z[None] if self.roles == 1 else Z.movedim(self.role_axis(2), 0)


def inducing_strategies(model: GP) -> tuple[InducingStrategy, ...]:
    """All of a model's, in the order of its layers; an error by name where we know no way."""
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
    found = tuple(_found(path, owner) for path, owner in owners)
    if not found:
        raise InputError(f"`model` has no layers; {name} holds no DeepGPLayer.")
    return found


def _inner(model: object) -> str:
    """Where the GP of a model with a network around it is."""
    parts = model.named_modules() if isinstance(model, nn.Module) else ()
    inner = next((path for path, m in parts if isinstance(m, ApproximateGP)), None)
    return "" if inner is None else f" Pass `model.{inner}`, with the inputs that it sees."


def _found(path: str, owner: ApproximateGP) -> InducingStrategy:
    steps, strategy = [*path.split("."), "variational_strategy"], owner.variational_strategy
    name = ".".join(steps).removeprefix(".")
    while (around := _kind(strategy, _WRAPPERS)) is not None:
        _check_own_way(name, strategy, around, _FREE_AROUND)
        name, strategy = f"{name}.base_variational_strategy", strategy.base_variational_strategy
    kind = _kind(strategy, _STRATEGIES)
    if kind is None:
        given = type(strategy).__name__
        raise InputError(
            f"`{name}` must be a VariationalStrategy, UnwhitenedVariationalStrategy or "
            "BatchDecoupledVariationalStrategy, or a multitask strategy around one; got "
            f"{given}. {_INSTEAD.get(given, 'Train with VariationalStrategy.')}"
        )
    _check_own_way(name, strategy, kind, _FREE)
    q = strategy._variational_distribution
    if not any(isinstance(q, d) and type(q).forward is d.forward for d in DISTRIBUTIONS):
        raise InputError(
            f"`{name}` must have a variational distribution of GPyTorch's (Cholesky, MeanField, "
            f"Delta, Natural, TrilNatural); got {type(q).__name__}."
        )
    decoupled = kind is BatchDecoupledVariationalStrategy
    found = InducingStrategy(
        name, strategy, 2 if decoupled else 1, kind is not UnwhitenedVariationalStrategy
    )
    _check_batches(found)
    return found


def _kind(strategy: object, kinds: tuple[type, ...]) -> type | None:
    return next((kind for kind in kinds if isinstance(strategy, kind)), None)


def _check_own_way(name: str, strategy: object, kind: type, free: set[str]) -> None:
    """A subclass that computes q(f) or the KL in its own way is not its parent."""
    lineage = type(strategy).__mro__
    known = {n for c in kind.__mro__ if issubclass(c, _VariationalStrategy) for n in vars(c)}
    new = {n for c in lineage[: lineage.index(kind)] for n, v in vars(c).items() if _is_code(v)}
    own = sorted((new & known) - free)
    if own:
        raise InputError(
            f"`{name}` must compute q(f) and the KL as {kind.__name__} does; got "
            f"{type(strategy).__name__}, which has its own `{'`, `'.join(own)}`. Train with "
            f"{kind.__name__}, or put what is special into the model's mean and kernel."
        )


def _is_code(value: object) -> bool:
    return callable(value) or isinstance(value, property)


def _check_batches(found: InducingStrategy) -> None:
    shape = found._by_role().shape[1:-2]
    if torch.broadcast_shapes(shape, found.batch) != found.batch:
        raise InputError(
            f"`{found.name}` must have a q(u) for each set of inducing points; their batch shape "
            f"is {list(shape)} and that of its variational distribution {list(found.batch)}. Give "
            f"the distribution `batch_shape=torch.Size({list(shape)})`."
        )
