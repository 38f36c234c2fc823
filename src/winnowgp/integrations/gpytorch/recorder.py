"""What passes through a strategy while a model is evaluated."""

from dataclasses import dataclass
from typing import Any, final

import torch
from gpytorch import settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.module import Module
from jaxtyping import Float
from linear_operator.operators import DiagLinearOperator
from torch import Tensor


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
