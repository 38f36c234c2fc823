"""Copies of GPyTorch models with fewer inducing points."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, TypeVar

import torch
from gpytorch.models import GP
from gpytorch.module import Module
from gpytorch.variational import CholeskyVariationalDistribution
from jaxtyping import Bool, Float
from torch import Tensor, nn

from winnowgp.errors import InputError
from winnowgp.integrations.gpytorch.distribution import Frame, GaussianQ
from winnowgp.integrations.gpytorch.strategies import InducingStrategy, inducing_strategies

# A deep copy of a GPyTorch model that was trained a moment ago.


_Same = TypeVar("_Same", bound=Module)


def copied(module: _Same) -> _Same:
    """The module without what it has remembered of its last evaluation.

    GPyTorch keeps intermediate results on its modules, and PyTorch refuses to copy a tensor that
    has a history. They are left behind, and the module that was given keeps its own.
    """
    memo: dict[int, Any] = {}
    for part in module.modules():
        for name, value in vars(part).items():
            if name == "_memoize_cache":
                memo[id(value)] = {}
            elif isinstance(value, Tensor) and value.grad_fn is not None:
                memo[id(value)] = value.detach().clone()
        if isinstance(part, Module):
            memo |= {id(term): None for term in part._added_loss_terms.values() if term is not None}
    try:
        return deepcopy(module, memo)
    except (RuntimeError, TypeError) as error:
        raise InputError(
            f"{type(module).__name__} cannot be copied: {error} Does it hold a list of losses, "
            "what it has returned, a file or a lock? Keep these elsewhere, or `detach` them."
        ) from error


# The same model with fewer points.


Same = TypeVar("Same", bound=GP)

"""The class of model that goes in and comes out."""


def pruned(model: Same, keep: Sequence[Bool[Tensor, "_ _"]]) -> Same:
    """A copy that has some of the points, and the marginal q(u) of these.

    Args:
        keep: `[G K]` for each strategy of the model, which points of each of its sets stay; as
            many in each.
            Where that is none, the functions of the strategy are those of the prior.
    """
    smaller = copied(model)
    for found, kept in zip(inducing_strategies(smaller), keep, strict=True):
        if not bool(kept.any()):
            _forget(found)
            continue
        frame = Frame.of(found)
        q = frame.marginal(frame.read(), kept)
        put_points(found, kept_points(found, kept))
        Frame.of(found).write(q)
    return smaller


def kept_points(found: InducingStrategy, keep: Bool[Tensor, "G K"]) -> Float[Tensor, "G M D"]:
    """The locations that are left in each set."""
    return torch.stack([Z[kept] for Z, kept in zip(found.locations, keep, strict=True)])


def put_points(found: InducingStrategy, sets: Float[Tensor, "G M D"]) -> None:
    """Give a strategy other locations; its q(u) is to follow."""
    strategy = found.strategy
    old = strategy.inducing_points
    fresh = found.stacked(sets).to(old).contiguous().clone()
    learnt = isinstance(old, nn.Parameter)
    # A buffer where the user does not learn locations.
    strategy.inducing_points = (
        nn.Parameter(fresh, requires_grad=old.requires_grad) if learnt else fresh
    )
    strategy._clear_cache()


def _forget(found: InducingStrategy) -> None:
    """One point left whose q(u) is its prior: q(f) is then the prior everywhere."""
    put_points(found, found.locations[:, :1])
    q = CholeskyVariationalDistribution(1, batch_shape=found.batch)
    found.strategy._variational_distribution = q.to(found.strategy.inducing_points)
    ones = found.strategy.inducing_points.new_ones(found.F, 1, 1)
    frame = Frame.of(found)
    frame.write(GaussianQ(torch.zeros_like(ones[..., 0]), ones))
