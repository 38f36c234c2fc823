"""The same model with fewer points."""

from collections.abc import Sequence
from typing import TypeVar

import torch
from gpytorch.models import GP
from gpytorch.variational import CholeskyVariationalDistribution
from jaxtyping import Bool, Float
from torch import Tensor, nn

from winnowgp.integrations.gpytorch.copied import copied
from winnowgp.integrations.gpytorch.frame import Frame
from winnowgp.integrations.gpytorch.gaussian_q import GaussianQ
from winnowgp.integrations.gpytorch.strategies import InducingStrategy, inducing_strategies

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
