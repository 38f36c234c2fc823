"""The interface of every model with candidate inducing points."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import Mean
from jaxtyping import Float
from torch import Tensor, nn

from winnowgp.bounds.evidence import Evidence
from winnowgp.data import Dataset, Source
from winnowgp.errors import InputError
from winnowgp.models.kernels import copy_module, covariance, share_modules
from winnowgp.models.posterior import Posterior
from winnowgp.selection import SubsetObjective, SubsetStatistics
from winnowgp.selection.objective import RelaxedObjective
from winnowgp.typing import Mask, Scalar

_Data = TypeVar("_Data", contravariant=True)
_Same = TypeVar("_Same", bound="SelectableModel[Any]")
_Module = TypeVar("_Module", bound=nn.Module)


class SelectableModel(nn.Module, ABC, Generic[_Data]):
    """A model whose inducing points can be selected among candidates.

    Regression, classification and latent-variable models have one set of candidates, a deep model
    has one per layer. `subset_objective` scores subsets of the candidates by the bound, `prune`
    keeps a subset, and `posterior` is the predictor that is left.
    """

    likelihood: Likelihood

    @property
    @abstractmethod
    def candidate_sets(self) -> tuple[nn.Parameter, ...]:
        """Locations of the candidates, one tensor `[K D]` per set."""

    @abstractmethod
    def check(self, data: _Data) -> None:
        """Raise an `InputError` if the model cannot have generated such data."""

    @abstractmethod
    def bound(self, data: _Data, *, generator: torch.Generator | None = None) -> Scalar:
        """Return a lower bound on log p(Y) with all candidates, in nats, differentiable.

        Args:
            generator: source of randomness for models whose bound is estimated from samples.
        """

    @abstractmethod
    def subset_objective(
        self, data: _Data, *, generator: torch.Generator | None = None
    ) -> SubsetObjective:
        """Return the bound in nats as a function of the subset of candidates that is used.

        Candidates of several sets are concatenated in the masks.
        """

    def prune(self: _Same, masks: Mask | Sequence[Tensor]) -> _Same:
        """Return a new model with the same parameters and only the selected candidates.

        Args:
            masks: one Boolean mask `[K]` per candidate set; a single mask may be passed by itself.
        """
        each = (masks,) if isinstance(masks, Tensor) else tuple(masks)
        if len(each) != len(self.candidate_sets):
            raise InputError(
                f"`masks` must hold one mask for each of the {len(self.candidate_sets)} candidate "
                f"sets; got {len(each)}."
            )
        for mask, Z in zip(each, self.candidate_sets, strict=True):
            if mask.dtype != torch.bool or mask.shape != Z.shape[:1]:
                raise InputError(
                    f"`masks` must be Boolean of shape [{len(Z)}]; got {mask.dtype} of shape "
                    f"{list(mask.shape)}."
                )
        return self._pruned(*each)

    @abstractmethod
    def _pruned(self: _Same, *masks: Tensor) -> _Same:
        """Prune each set by its mask."""

    @abstractmethod
    def posterior(self, data: _Data) -> nn.Module:
        """Return the predictor, which does not depend on the data afterwards."""


class InducingModel(SelectableModel[Any]):
    """A sparse Gaussian process with K candidate inducing points and observed inputs.

    A model can be trained in two ways: `bound` and `subset_objective` are differentiable in all
    parameters; the other bounds have the optimal q(u) substituted, and depend on kernel, mean,
    likelihood and locations only.
    """

    kernel: Kernel
    mean: Mean
    candidates: nn.Parameter

    @property
    def candidate_sets(self) -> tuple[nn.Parameter, ...]:
        """Locations of the candidates, one tensor `[K D]`."""
        return (self.candidates,)

    @property
    def K(self) -> int:
        """Number of candidates."""
        return self.candidates.shape[0]

    @abstractmethod
    def check(self, data: Source) -> None:
        """Raise an `InputError` if the model cannot have generated such data."""

    @abstractmethod
    def bound(
        self,
        data: Dataset,
        *,
        total: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Scalar:
        """Return a lower bound on log p(Y) with all candidates, in nats, differentiable.

        Args:
            total: number of rows that the given ones are a random minibatch of; the result is then
                an unbiased estimate of the bound of all of them.
            generator: not used; the bound of a shallow model needs no samples.
        """

    @abstractmethod
    def subset_objective(
        self,
        data: Dataset,
        *,
        total: int | None = None,
        generator: torch.Generator | None = None,
    ) -> RelaxedObjective:
        """Return the bound in nats as a function of the subset of candidates that is used."""

    @abstractmethod
    def subset_statistics(self, data: Source) -> SubsetStatistics:
        """Return statistics that score subsets at fixed parameters and the optimal q(u).

        Their cost does not depend on the number of rows.
        """

    @abstractmethod
    def fixed_bound(self, data: Source) -> float:
        """Return the bound with all candidates and the optimal q(u), as a number."""

    @abstractmethod
    def chunked_bound(self, data: Source) -> Callable[[], Scalar]:
        """Return the bound with the optimal q(u) as a function for optimisers.

        It reads the parameters when it is called. Memory does not grow with N · K, and the jitter
        is 1e-8, part of the objective.
        """

    def chunked_cost(self, data: Source) -> float:
        """Return the approximate floating-point operations of `chunked_bound` and its gradient."""
        return self.chunked_cost_of(data, self.K)

    @abstractmethod
    def chunked_cost_of(self, data: Source, K: int) -> float:
        """Return the operations of `chunked_bound` and its gradient with K candidates."""

    def noise_terms(self, data: Source) -> int:
        """Return the number of groups of targets with noise, and so factorisations, of their own.

        Models without a closed form for Gaussian noise have one.
        """
        del data
        return 1

    @abstractmethod
    def dense_bound(self, data: Dataset) -> Callable[[], Scalar]:
        """Return the bound with every row as an inducing point, as a function; O(N³)."""

    @abstractmethod
    def upper_bound(self, data: Source) -> float:
        """Return an upper bound on log p(Y) at the same parameters; infinite if none is known."""

    @abstractmethod
    def evidence(self, data: Source, *, max_rows: int | None = None) -> Evidence:
        """Return log p(Y) at the same parameters in nats, exact or between two bounds.

        Args:
            data: the rows.
            max_rows: rows up to which the evidence is exact, if it can be; chosen for the device
                if None.
        """

    @abstractmethod
    def with_candidates(self: _Same, candidates: Float[Tensor, "J D"]) -> _Same:
        """Return a new model with the same parameters and other candidates."""

    @abstractmethod
    def with_best_q(self: _Same, data: Source) -> _Same:
        """Return a new model with the same parameters and the optimal q(u) for the data."""

    @abstractmethod
    def posterior(self, data: Source) -> Posterior:
        """Return q(f), which does not depend on the data afterwards."""


Model = TypeVar("Model", bound=InducingModel)

"""The class of model that a fit takes and returns."""


def check_kernel(kernel: Kernel, candidates: Tensor, *, name: str = "kernel") -> None:
    """Raise an `InputError` if the kernel cannot be evaluated at the candidates.

    Args:
        name: the argument that the kernel was passed as, for the error message.
    """
    floating = candidates.dtype.is_floating_point
    if candidates.dim() != 2 or not floating or not torch.isfinite(candidates).all():
        raise InputError(
            "`candidates` must be finite floating-point numbers of shape [K D]; "
            f"got {candidates.dtype} of shape {list(candidates.shape)}."
        )
    if kernel.batch_shape:
        raise InputError(
            f"`{name}` must not have a batch shape; got {type(kernel).__name__} with "
            f"{list(kernel.batch_shape)}. All outputs share one kernel: remove its `batch_shape`, "
            "or fit a model for each output."
        )
    row = candidates.new_zeros(1, candidates.shape[1])
    try:
        shape = covariance(_like(kernel, row), row, row).shape
    except RuntimeError as error:
        raise InputError(
            f"`{name}` cannot be evaluated on {row.shape[1]} columns ({error}); give it "
            f"`ard_num_dims={row.shape[1]}`, or none."
        ) from error
    if shape != (1, 1):
        raise InputError(
            f"`{name}` must give one covariance for a pair of rows; {type(kernel).__name__} gives "
            f"{list(shape)}. All outputs share one kernel: pass the kernel of one output."
        )


def _like(kernel: Kernel, row: Tensor) -> Kernel:
    """Return a kernel with the type and the device of a row, a copy if it has others."""
    own = {(t.dtype, t.device) for t in (*kernel.parameters(), *kernel.buffers())}
    return kernel if own == {(row.dtype, row.device)} else copy_module(kernel).to(row)


def copy_with(
    model: _Module, candidates: Tensor, *, shared: bool = False, **parameters: Tensor
) -> _Module:
    """Return a copy of a model with other candidates, frozen if they were, and other parameters.

    Args:
        shared: whether the copy has the kernel, mean and likelihood of the model itself, for models
            of which only one is trained.
    """
    copied = share_modules(model) if shared else copy_module(model)
    learnt = model.get_parameter("candidates").requires_grad
    copied.register_parameter(
        "candidates", nn.Parameter(candidates.detach().clone(), requires_grad=learnt)
    )
    for name, value in parameters.items():
        copied.register_parameter(name, nn.Parameter(value.detach().contiguous().clone()))
    return copied
