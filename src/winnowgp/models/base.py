"""What every model with candidates for inducing points can do."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import deepcopy
from typing import TypeVar

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import Mean
from jaxtyping import Float
from torch import Tensor, nn

from winnowgp.data import Dataset, Source
from winnowgp.errors import InputError
from winnowgp.models.kernels import covariance
from winnowgp.models.posterior import Posterior
from winnowgp.selection import RelaxedObjective, SubsetStatistics
from winnowgp.typing import Mask, Scalar

_Same = TypeVar("_Same", bound=nn.Module)


class InducingModel(nn.Module, ABC):
    """A Gaussian process seen through K candidate inducing points.

    Two ways to train it: `bound` and `subset_objective` are differentiable in everything the model
    holds; the rest speaks of the bound with the best q(u) already put in, which depends on kernel,
    mean, likelihood and locations alone.
    """

    kernel: Kernel
    mean: Mean
    likelihood: Likelihood
    candidates: nn.Parameter

    @property
    def K(self) -> int:
        """Number of candidates."""
        return self.candidates.shape[0]

    @abstractmethod
    def check(self, data: Source) -> None:
        """An error where the model cannot have produced such data."""

    @abstractmethod
    def bound(self, data: Dataset, *, total: int | None = None) -> Scalar:
        """Lower bound on log p(Y) with all candidates, in nats, differentiable.

        Args:
            total: if given, the rows are a random part of so many, and the result is an unbiased
                estimate of the bound of all of them.
        """

    @abstractmethod
    def subset_objective(self, data: Dataset, *, total: int | None = None) -> RelaxedObjective:
        """What is the bound, in nats, if only this subset of the candidates is used?"""

    @abstractmethod
    def subset_statistics(self, data: Source) -> SubsetStatistics:
        """The same question at fixed parameters and the best q(u), answered without the data."""

    @abstractmethod
    def fixed_bound(self, data: Source) -> float:
        """The bound with all candidates and the best q(u), as a number."""

    @abstractmethod
    def chunked_bound(self, data: Source, *, tighter: bool = False) -> Callable[[], Scalar]:
        """The same bound as a function of the parameters when it is called, made for optimisers.

        Memory does not grow with N · K, and the jitter is 1e-8, part of the objective.

        Args:
            tighter: the tighter collapsed bound, where there is one.
        """

    @abstractmethod
    def chunked_cost(self, data: Source) -> float:
        """Floating-point operations that one value of it takes with its gradient, roughly."""

    @abstractmethod
    def dense_bound(self, data: Dataset) -> Callable[[], Scalar]:
        """The same as if every row were an inducing point; O(N³)."""

    @abstractmethod
    def upper_bound(self, data: Source) -> float:
        """Upper bound on log p(Y) at the same parameters, in nats; infinite if none is known."""

    @abstractmethod
    def with_candidates(self: _Same, candidates: Float[Tensor, "J D"]) -> _Same:
        """A new model with the same parameters and other candidates."""

    @abstractmethod
    def prune(self: _Same, mask: Mask) -> _Same:
        """A new model with the same parameters and only the candidates that `mask` keeps."""

    @abstractmethod
    def with_best_q(self: _Same, data: Source) -> _Same:
        """A new model with the same parameters and the q(u) that is best for the data."""

    @abstractmethod
    def posterior(self, data: Source) -> Posterior:
        """q(f), small and independent of the data from then on."""


Model = TypeVar("Model", bound=InducingModel)

"""The kind of model that goes into a fit and comes out of it."""


def check_kernel(kernel: Kernel, candidates: Tensor) -> None:
    """Whether a model can be built of these."""
    floating = candidates.dtype.is_floating_point
    if candidates.dim() != 2 or not floating or not torch.isfinite(candidates).all():
        raise InputError(
            "`candidates` must be finite floating-point numbers of shape [K D]; "
            f"got {candidates.dtype} of shape {list(candidates.shape)}."
        )
    if kernel.batch_shape:
        raise InputError(
            f"`kernel` must not have a batch shape; got {list(kernel.batch_shape)}. "
            "All outputs share one kernel."
        )
    row = candidates.new_zeros(1, candidates.shape[1])
    try:
        covariance(deepcopy(kernel).to(row), row, row)
    except RuntimeError as error:
        raise InputError(
            f"`kernel` cannot be evaluated on {row.shape[1]} columns ({error}); give it "
            f"`ard_num_dims={row.shape[1]}`, or none."
        ) from error
